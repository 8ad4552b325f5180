"""Guarantees of every engine that takes pictures; the reference is a transformers forward over the same pixels."""

import asyncio
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.engine import Completion, Engine, Sampling
from infra.cli.demo.char_model import save_tokenizer
from infra.model.model import load_into, load_model, load_tokenizer, model_tensors
from infra.model.vision import load_vision
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor, from_numpy, to_numpy
from infra.store.images import Pixels, decode_image
from schemas import Message
from schemas.errors import ConfigError, PolicyRefused
from tests.contracts.engine_case import Started
from tests.tiny_models import INTERNVL_VOCABULARY, build_eye_model, drawings
from trainer.learners.forward import PackedModel

TOWER = "model.vision_tower."
PROJECTION = "model.multi_modal_projector.linear_1.weight"  # and not its bias
BLOCK = 32  # tokens that a prefix cache keeps together, the fewest on a CPU

Tensors = dict[str, Tensor]


class Case(Started):
    """An engine under test, the policies it served, and a forward that shares no code with it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.plain: Any = load_model(folder)
        vision = load_vision(folder)
        assert vision is not None
        self.vision = vision
        self.by_version: dict[int, Tensors] = {0: model_tensors(self.plain)}
        self.newest = 0  # a refused version is not used again
        found = drawings(3)
        self.images = [decode_image(entry.image, entry.picture) for entry in found]
        message = Message(role="user", content="count", images=(found[0].image,))
        self.prompt = load_tokenizer(folder).encode_chat([message])

    def policy(self, name: str, *, probe: Probe | None = None, scale: float = 1.2) -> Policy:
        """The served tensors, with the tensors of one part scaled."""
        self.newest += 1
        tensors = {
            key: from_numpy(to_numpy(item) * np.float32(scale))
            if key.startswith(name) and len(item.shape) > 1
            else item
            for key, item in self.by_version[self.engine.version].items()
        }
        return Policy(version=self.newest, tensors=tensors, probe=probe)

    def probe(self, policy: Policy) -> Probe:
        """A probe like the trainer's."""
        learner = PackedModel(str(self.folder), dtype="float32", device="cpu")
        load_into(learner.module, policy.tensors)
        sequence = (*self.prompt, 8, 2)
        return Probe((sequence,), (tuple(learner.sequence_logprobs(sequence)),))

    async def load(self, policy: Policy) -> None:
        report = await self.engine.load(policy)
        assert report.probe_abs_max < 1e-4
        self.by_version[policy.version] = dict(policy.tensors)

    def assert_reproduced(self, prompt: Sequence[int], image: Pixels, completion: Completion) -> None:
        """Every span's logprobs are its own version's, given the picture and the whole prefix."""
        for span in completion.spans:
            expected = self.reference(self.by_version[span.version], prompt, image, completion.tokens, span.temperature)
            of = slice(span.start, span.stop)
            np.testing.assert_allclose(completion.logprobs[of], expected[of], atol=1e-4, rtol=0)

    def reference(
        self, tensors: Tensors, prompt: Sequence[int], image: Pixels, tokens: tuple[int, ...], temperature: float
    ) -> np.ndarray[Any, Any]:
        """Logprobs of the sampled tokens by the model's own forward over ids and pixels."""
        load_into(self.plain, tensors)
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            features = self.plain.get_image_features(torch.from_numpy(self.vision.prepare(image)[None])).pooler_output
            embedded = self.plain.get_input_embeddings()(ids)
            embedded[0, self.vision.places(prompt, 1)] = torch.cat(tuple(features))
            logits = self.plain(inputs_embeds=embedded).logits[0]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)[len(prompt) - 1 : -1]
        return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def torch_case(folder: Path) -> Case:
    from actors.engines.torch import TorchEngine

    return Case(TorchEngine(model=str(folder), seed=1), folder)


def vllm_case(folder: Path) -> Case:
    from actors.engines.vllm.engine import VllmEngine

    return Case(VllmEngine(model=str(folder), seed=1, max_num_seqs=16, block_size=BLOCK), folder)


NO_TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="InternVL's processor needs torchvision")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((torch_case, "llava"), id="torch"),
        pytest.param((torch_case, "internvl"), id="torch-internvl"),
        pytest.param((vllm_case, "llava"), id="vllm", marks=pytest.mark.full),
        pytest.param((vllm_case, "internvl"), id="vllm-internvl", marks=[pytest.mark.full, NO_TORCHVISION]),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """An engine with larger entries in its matrices, so that the picture matters."""
    torch.set_num_threads(1)
    opened, family = request.param
    folder = build_eye_model(tmp_path_factory.mktemp("eye") / "model", family=family)
    module: Any = load_model(folder)
    with torch.no_grad():
        for value in module.parameters():
            value.mul_(4.0 if value.dim() > 1 else 1.0)
    module.save_pretrained(folder)
    with opened(folder) as made:
        yield made


def test_what_is_sampled_about_a_picture_has_the_logprobs_of_a_plain_forward(case: Case) -> None:
    async def check(case: Case) -> None:
        sampling = Sampling(max_tokens=6)
        asked = [case.engine.generate(case.prompt, sampling, images=[item]) for item in case.images * 2]
        for completion, image in zip(await asyncio.gather(*asked), case.images * 2, strict=True):
            assert len(completion.tokens) == 6
            case.assert_reproduced(case.prompt, image, completion)

    case.run(check)


@pytest.mark.parametrize("part", [TOWER, PROJECTION])
def test_a_reload_of_what_sees_loses_nothing_and_each_span_is_its_own_versions(case: Case, part: str) -> None:
    async def check(case: Case) -> None:
        version, came = case.engine.version, asyncio.Event()
        long = Sampling(max_tokens=300)
        asked = [
            asyncio.create_task(case.engine.generate(case.prompt, long, images=[image], on_chunk=lambda _: came.set()))
            for image in case.images
        ]
        asked.append(asyncio.create_task(case.engine.generate(case.prompt, long, images=case.images[:1])))
        await came.wait()
        policy = case.policy(part)
        await case.load(policy)
        for completion, image in zip(await asyncio.gather(*asked), [*case.images, case.images[0]], strict=True):
            assert len(completion.tokens) == 300
            assert completion.spans[-1].version == policy.version > version, "nothing was sampled under the new weights"
            case.assert_reproduced(case.prompt, image, completion)
        after = await case.engine.generate(case.prompt, Sampling(max_tokens=3), images=case.images[:1])
        assert [span.version for span in after.spans] == [policy.version]
        case.assert_reproduced(case.prompt, case.images[0], after)

    case.run(check)


def test_equal_prompts_about_different_pictures_are_not_confused(case: Case) -> None:
    """Neither beside each other nor by a cache of prefixes, for which the prompt is long enough."""
    prompt = [*case.prompt, *(20 + index for index in range(2 * BLOCK))]

    async def check(case: Case) -> None:
        greedy = Sampling(max_tokens=1, temperature=0.0)
        together = await asyncio.gather(
            *(case.engine.generate(prompt, greedy, images=[image]) for image in case.images)
        )
        alone = [await case.engine.generate(prompt, greedy, images=[image]) for image in reversed(case.images)]
        for completion, image in zip([*together, *alone], [*case.images, *reversed(case.images)], strict=True):
            case.assert_reproduced(prompt, image, completion)
        assert len({completion.logprobs for completion in together}) == len(case.images)

    case.run(check)


def test_a_prompt_with_other_images_than_places_is_refused(case: Case) -> None:
    async def check(case: Case) -> None:
        for wrong in ([], case.images[:2]):
            with pytest.raises(ValueError, match="image tokens"):
                await case.engine.generate(case.prompt, Sampling(max_tokens=1), images=wrong)

    case.run(check)


def test_the_probe_of_a_policy_covers_the_vision_tower(case: Case) -> None:
    """A tower with other weights than the trainer's tower is refused, though no token's own embedding changed."""

    async def check(case: Case) -> None:
        version = case.engine.version
        right = case.probe(case.policy(TOWER, scale=1.0))
        with pytest.raises(PolicyRefused, match="probe"):
            await case.engine.load(case.policy(TOWER, probe=right, scale=1.5))
        assert case.engine.version == version
        await case.load(case.policy(TOWER, probe=right, scale=1.0))
        altered = case.policy(TOWER, scale=1.1)
        policy = Policy(version=altered.version, tensors=altered.tensors, probe=case.probe(altered))
        await case.load(policy)
        assert case.engine.version == policy.version

    case.run(check)


def test_an_image_token_that_the_policy_samples_is_a_token_like_any_other(case: Case) -> None:
    """The token after it is sampled after its own embedding, as the trainer scores it."""

    async def check(case: Case) -> None:
        sampling = Sampling(max_tokens=200, temperature=2.0)  # nearly uniform, so that it comes up
        asked = [case.engine.generate(case.prompt, sampling, images=case.images[:1]) for _ in range(12)]
        completions = await asyncio.gather(*asked)
        assert any(case.vision.token in completion.tokens[:-1] for completion in completions)
        for completion in completions:
            case.assert_reproduced(case.prompt, case.images[0], completion)

    case.run(check)


def test_text_that_imitates_a_picture_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build_eye_model(tmp_path / "model"))
    with pytest.raises(ValueError, match="none in a text"):
        tokenizer.encode_chat([Message(role="user", content="<image>count")])


def test_text_that_imitates_a_picture_stays_text_where_its_token_is_one_of_control(tmp_path: Path) -> None:
    folder = build_eye_model(tmp_path / "model", family="internvl")
    vision = load_vision(folder)
    assert vision is not None
    ids = load_tokenizer(folder).encode_chat([Message(role="user", content="<img><image></img>count")])
    assert vision.token not in ids


def test_a_tokenizer_without_the_ids_around_a_picture_is_refused(tmp_path: Path) -> None:
    folder = build_eye_model(tmp_path / "model", family="internvl")
    save_tokenizer(folder, INTERNVL_VOCABULARY)
    with pytest.raises(ConfigError, match="got no start_image_token, expected one in extra_special_tokens"):
        load_tokenizer(folder)
