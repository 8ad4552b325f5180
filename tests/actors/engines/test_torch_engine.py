"""The torch engine: adapters, names and families of models; and the pace of the scripted engine."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch

from actors.engines.engine import Chunk, Completion, Engine, Sampling
from actors.engines.scripted import ScriptedEngine
from actors.engines.torch import TorchEngine
from infra.model.model import load_model, model_tensors
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy, to_numpy
from schemas.errors import PolicyRefused
from tests.contracts.engine_case import Case, char_model
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.simulator.virtual_loop import VirtualLoop
from tests.tiny_models import WINDOW, build_tiny_model
from tests.variables import variables
from trainer.config import LoraConfig
from trainer.learners.torch import TorchLearner

SEQUENCES = ((1, *range(20, 40)), (1, *range(60, 30, -3)))
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_family(tmp_path_factory.mktemp("adapters") / "model", "qwen3"))


def learner_of(folder: str, lora: LoraConfig | None = LORA, dtype: str = "float32") -> TorchLearner:
    learner = opened(folder, lora=lora, dtype=dtype)
    assert isinstance(learner, TorchLearner)
    learner.step(batch(0), learning_rate=1e-2, seed=0)
    return learner


def version(learner: TorchLearner, number: int) -> Policy:
    probe = learner.probe(SEQUENCES)
    return Policy(version=number, tensors=learner.tensors(), probe=probe, adapter=learner.adapter)


def with_engine(folder: str, use: Callable[[TorchEngine], Awaitable[None]], dtype: str = "float32") -> None:
    async def main() -> None:
        engine = TorchEngine(model=folder, dtype=dtype)
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine.close()

    asyncio.run(main())


async def scores(engine: TorchEngine) -> list[tuple[float, ...]]:
    return [await engine.score_tokens(tokens) for tokens in SEQUENCES]


@pytest.mark.full
def test_logprobs_under_an_adapter_are_the_learners_also_of_what_was_sampled(folder: str) -> None:
    learner = learner_of(folder)

    async def use(engine: TorchEngine) -> None:
        base = await scores(engine)
        running = asyncio.create_task(engine.generate((1, 22, 30), Sampling(max_tokens=60)))
        for number in (1, 2, 3):
            policy = version(learner, number)
            report = await engine.load(policy)
            assert engine.version == number and report.probe_abs_max < 1e-5
            assert policy.probe is not None
            for got, expected in zip(await scores(engine), policy.probe.logprobs, strict=True):
                assert got == pytest.approx(expected, abs=1e-5)
            learner.step(batch(number), learning_rate=1e-2, seed=number)
        assert await scores(engine) != base
        await running
        await engine.load(version(learner, 4))
        done = await engine.generate((1, 22, 30), Sampling(max_tokens=20, seed=1))
        told = learner.probe(((1, 22, 30, *done.tokens),)).logprobs[0][2:]
        assert done.logprobs == pytest.approx(told, abs=1e-5) and {span.version for span in done.spans} == {4}

    with_engine(folder, use)


@pytest.mark.full
def test_in_bfloat16_versions_pass_the_gate_and_others_do_not(folder: str) -> None:
    learner = learner_of(folder, dtype="bfloat16")

    async def use(engine: TorchEngine) -> None:
        for number in range(1, 6):
            await engine.load(version(learner, number))
            learner.step(batch(number), learning_rate=1e-3, seed=number)
        policy = version(learner, 6)
        wrong = {
            name: from_numpy(-20 * to_numpy(tensor)) if ".lora_B." in name else tensor
            for name, tensor in policy.tensors.items()
        }
        with pytest.raises(PolicyRefused, match="does not compute what the trainer published"):
            await engine.load(msgspec.structs.replace(policy, tensors=wrong))
        assert engine.version == 5
        await engine.load(policy)

    with_engine(folder, use, "bfloat16")


@pytest.mark.full
def test_version_0_is_the_base_and_a_refused_adapter_leaves_it_so(folder: str, tmp_path: Path) -> None:
    learner, other = learner_of(folder), learner_of(str(build_family(tmp_path / "other", "qwen3", seed=1)))
    policy = version(learner, 1)

    async def use(engine: TorchEngine) -> None:
        base = await scores(engine)
        first = min(policy.tensors)
        forged = {
            "its adapter belongs to base": version(other, 1),
            "is missing": with_tensors(
                policy, {name: tensor for name, tensor in policy.tensors.items() if name != first}
            ),
            "is not in the model": with_tensors(policy, {**policy.tensors, "base_model.odd": policy.tensors[first]}),
            "does not compute": with_tensors(policy, {**policy.tensors, **doubled(policy)}),
            "NaN": with_tensors(
                policy, {**policy.tensors, first: from_numpy(to_numpy(policy.tensors[first]) * np.nan)}
            ),
        }
        for words, item in forged.items():
            with pytest.raises(PolicyRefused, match=words):
                await engine.load(item)
            assert engine.version == 0 and await scores(engine) == base
        await engine.load(policy)
        served = await scores(engine)
        with pytest.raises(PolicyRefused, match="does not compute"):
            await engine.load(with_tensors(policy, {**policy.tensors, **doubled(policy)}, version=2))
        assert engine.version == 1 and await scores(engine) == served != base

    with_engine(folder, use)


def with_tensors(policy: Policy, tensors: dict, **changes: int) -> Policy:
    return msgspec.structs.replace(policy, tensors=tensors, **changes)


def doubled(policy: Policy) -> dict:
    return {name: from_numpy(to_numpy(tensor) * 2) for name, tensor in policy.tensors.items() if ".lora_B." in name}


@pytest.mark.full
def test_another_rank_is_taken_and_a_change_to_or_from_whole_models_is_refused_with_what_helps(folder: str) -> None:
    small, large, whole = (
        learner_of(folder),
        learner_of(folder, LoraConfig(rank=6, targets=("q_proj",))),
        learner_of(folder, None),
    )

    async def use(engine: TorchEngine) -> None:
        for number, learner in enumerate((small, large, small), 1):
            assert (await engine.load(version(learner, number))).probe_abs_max < 1e-5
        with pytest.raises(PolicyRefused, match=r"policy 4: it is full weights, the engine serves an adapter .*start"):
            await engine.load(version(whole, 4))
        refused = msgspec.structs.replace(version(large, 5), probe=version(small, 5).probe)
        with pytest.raises(PolicyRefused, match="does not compute"):
            await engine.load(refused)
        assert engine.version == 3
        assert await scores(engine) == [pytest.approx(logprob, abs=1e-5) for logprob in small.probe(SEQUENCES).logprobs]

    async def begin_whole(engine: TorchEngine) -> None:
        await engine.load(version(whole, 1))
        with pytest.raises(
            PolicyRefused, match=r"policy 2: it is an adapter of .*, the engine serves full weights; start"
        ):
            await engine.load(version(small, 2))
        assert engine.version == 1

    with_engine(folder, use)
    with_engine(folder, begin_whole)


@pytest.mark.full
def test_base_weights_are_never_written(folder: str) -> None:
    learner = learner_of(folder)

    async def use(engine: TorchEngine) -> None:
        before = model_tensors(engine._model)
        await engine.load(version(learner, 1))
        held = dict(engine._model.named_parameters())
        for name, tensor in before.items():
            found = held.get(name, held.get(name.replace(".weight", ".base_layer.weight")))
            assert found is not None and torch.equal(found, torch.from_numpy(to_numpy(tensor).copy())), name

    with_engine(folder, use)


NAME, COMMIT = "org/tiny-model", "a" * 40


def torch_engine() -> Engine:
    from actors.engines.torch import TorchEngine

    return TorchEngine(model=NAME, seed=3)


def vllm_engine() -> Engine:
    from actors.engines.vllm.engine import VllmEngine

    return VllmEngine(model=NAME, seed=3, max_num_seqs=16)


def answers_and_follows(begun: Callable[[], Engine], cache: Path) -> None:
    """In a process that has the cache's place in its environment from the first import on."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    _, tensors, reference, _ = char_model(repository / "snapshots" / COMMIT)

    async def check(case: Case) -> None:
        for _ in range(2):
            answer = await case.engine.generate((1, 22, 33), Sampling(max_tokens=9, temperature=0.0))
            case.assert_reproduced((1, 22, 33), answer, 1.0)
            await case.load(case.next_policy())
        assert case.engine.version == 2

    with Case(begun(), tensors, reference, lambda tokens: "") as case:
        case.run(check)


@pytest.mark.full
@pytest.mark.parametrize("begun", [torch_engine, vllm_engine])
def test_a_model_named_as_in_the_cache_is_served_and_followed_as_one_in_a_folder(
    begun: Callable[[], Engine], tmp_path: Path
) -> None:
    with (
        variables(HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as another,
    ):
        another.submit(answers_and_follows, begun, tmp_path).result()


def test_a_token_that_is_given_late_delays_no_other() -> None:
    loop = VirtualLoop(Random(0))

    def busy(chunk: Chunk) -> None:
        loop.now_s += 0.09

    async def timed() -> float:
        engine = ScriptedEngine(token_s=0.1)
        await engine.start()
        begin_s = loop.time()
        await engine.generate((1,), Sampling(max_tokens=20), on_chunk=busy)
        return loop.time() - begin_s

    assert loop.run_until_complete(timed()) == pytest.approx(20 * 0.1 + 0.09)
    loop.close()


FAMILIES = ("gemma2", "gemma3", "gpt-oss", "llama", "mistral", "phi", "qwen2.5", "qwen3-moe", "qwen3.5")


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logprobs_of_every_family_are_those_of_a_plain_forward(tmp_path: Path, family: str) -> None:
    folder = build_tiny_model(tmp_path / family, family)
    prompts = [(1, 20, 30, *range(40, 40 + length)) for length in (0, WINDOW + 4)]

    async def sampled() -> list[Completion]:
        engine = TorchEngine(model=str(folder), seed=3)
        await engine.start()
        try:
            return await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=20)) for prompt in prompts))
        finally:
            await engine.close()

    plain = load_model(str(folder))
    for prompt, completion in zip(prompts, asyncio.run(sampled()), strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(input_ids=ids, use_cache=False).logits[0].float(), -1)
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4
