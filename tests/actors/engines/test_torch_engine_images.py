"""The torch engine with pictures: its logprobs are those of a transformers forward over the same pixels."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engine import Completion, Sampling
from actors.engines.torch import TorchEngine
from infra.images import Pixels, decode_image
from infra.model import load_model, load_tokenizer, model_tensors
from infra.vision import load_vision
from infra.weights.policy import Policy, Probe
from infra.weights.tensors import Tensor, from_numpy, to_numpy
from schemas import Message
from schemas.errors import PolicyRefused
from tests.eye_model import NUM_PLACES, build_eye_model, drawings
from trainer.learners.forward import PackedModel

TOWER = "model.vision_tower."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its matrices widened, so that what it sees matters."""
    torch.set_num_threads(1)
    folder = build_eye_model(tmp_path_factory.mktemp("eye") / "model")
    module = load_model(folder)
    with torch.no_grad():
        for value in module.parameters():
            value.mul_(4.0 if value.dim() > 1 else 1.0)
    module.save_pretrained(folder)
    yield folder


def shown(folder: Path, count: int) -> tuple[list[int], list[Pixels]]:
    """One prompt, and different pictures that it may be about."""
    found = drawings(count)
    prompt = load_tokenizer(folder).encode_chat([Message(role="user", content="count", images=(found[0].image,))])
    return prompt, [decode_image(one.image, one.picture) for one in found]


def reference(
    module: torch.nn.Module, folder: Path, prompt: list[int], image: Pixels, tokens: tuple[int, ...]
) -> np.ndarray:
    """Logprobs of the sampled tokens by the model's own forward over ids and pixels."""
    vision = load_vision(folder)
    assert vision is not None
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        features = module.get_image_features(torch.from_numpy(vision.prepare(image)[None])).pooler_output
        embedded = module.get_input_embeddings()(ids)
        embedded[0, 1 : 1 + NUM_PLACES] = torch.cat(tuple(features))
        logits = module(inputs_embeds=embedded).logits[0]
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def test_what_is_sampled_about_a_picture_has_the_logprobs_of_a_plain_forward_across_a_reload(model: Path) -> None:
    prompt, images = shown(model, 3)
    plain = load_model(model)
    tensors = model_tensors(plain)

    async def main() -> tuple[list[Completion], list[Completion]]:
        engine = TorchEngine(model=str(model), seed=1)
        await engine.start()
        try:
            sampling = Sampling(max_tokens=6)
            before = await asyncio.gather(*(engine.generate(prompt, sampling, images=[one]) for one in images * 2))
            came = asyncio.Event()
            long = Sampling(max_tokens=300)
            asked = [
                asyncio.create_task(engine.generate(prompt, long, images=[one], on_chunk=lambda _: came.set()))
                for one in images
            ]
            await came.wait()
            await engine.load(altered(tensors, TOWER))
            return before, await asyncio.gather(*asked)
        finally:
            await engine.close()

    before, across = asyncio.run(main())
    for completion, image in zip(before, images * 2, strict=True):
        expected = reference(plain, model, prompt, image, completion.tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    after = load_model(model)
    after.load_state_dict(
        {name: torch.from_numpy(to_numpy(one).copy()) for name, one in altered(tensors, TOWER).tensors.items()}
    )
    for completion, image in zip(across, images, strict=True):
        expected = {0: reference(plain, model, prompt, image, completion.tokens)}
        expected[1] = reference(after, model, prompt, image, completion.tokens)
        assert completion.spans[-1].version == 1, "nothing was sampled under the new tower"
        for span in completion.spans:
            of = slice(span.start, span.stop)
            np.testing.assert_allclose(completion.logprobs[of], expected[span.version][of], atol=1e-4)


def altered(tensors: dict[str, Tensor], name: str, probe: Probe | None = None) -> Policy:
    """The tensors with those of one part scaled."""
    scaled = {
        key: from_numpy(to_numpy(one) * np.float32(1.5)) if key.startswith(name) and len(one.shape) > 1 else one
        for key, one in tensors.items()
    }
    return Policy(version=1, tensors=scaled, touched=frozenset(scaled), probe=probe)


def test_equal_prompts_about_different_pictures_are_not_confused(model: Path) -> None:
    prompt, images = shown(model, 2)

    async def main() -> list[Completion]:
        engine = TorchEngine(model=str(model), seed=1)
        await engine.start()
        try:
            greedy = Sampling(max_tokens=1, temperature=0.0)
            return await asyncio.gather(*(engine.generate(prompt, greedy, images=[one]) for one in images))
        finally:
            await engine.close()

    first, second = asyncio.run(main())
    assert first.logprobs != second.logprobs


def test_a_prompt_with_other_images_than_places_is_refused_and_so_is_text_that_imitates_one(model: Path) -> None:
    prompt, images = shown(model, 2)
    tokenizer = load_tokenizer(model)

    async def main() -> None:
        engine = TorchEngine(model=str(model), seed=1)
        await engine.start()
        try:
            for wrong in ([], images):
                with pytest.raises(ValueError, match="image tokens"):
                    await engine.generate(prompt, Sampling(max_tokens=1), images=wrong)
        finally:
            await engine.close()

    asyncio.run(main())
    with pytest.raises(ValueError, match="none in a text"):
        tokenizer.encode_chat([Message(role="user", content="<image>count")])


def test_the_probe_of_a_policy_covers_the_vision_tower(model: Path) -> None:
    """A tower that is not what the trainer published is refused, though no token's own embedding changed."""
    prompt, _ = shown(model, 1)
    learner = PackedModel(str(model), dtype="float32", device="cpu")
    tensors = model_tensors(learner.module)
    sequence = (*prompt, 8, 2)
    probe = Probe((sequence,), (tuple(learner.sequence_logprobs(sequence)),))

    async def main() -> None:
        engine = TorchEngine(model=str(model), seed=1)
        await engine.start()
        try:
            report = await engine.load(Policy(version=1, tensors=tensors, touched=frozenset(tensors), probe=probe))
            assert report.probe_abs_max < 1e-4
            with pytest.raises(PolicyRefused, match="probe"):
                await engine.load(altered(tensors, TOWER, probe))
        finally:
            await engine.close()

    asyncio.run(main())
