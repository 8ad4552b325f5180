"""The torch engine under adapters: the learner's logprobs exactly, and nothing that does not fit."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from actors.engines.engine import Sampling
from actors.engines.torch import TorchEngine
from infra.model.model import model_tensors
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy, to_numpy
from schemas.errors import PolicyRefused
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from trainer.config import LoraConfig
from trainer.learners.torch import TorchLearner

pytestmark = pytest.mark.full  # importing transformers alone takes seconds
SEQUENCES = ((1, *range(20, 40)), (1, *range(60, 30, -3)))
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_family(tmp_path_factory.mktemp("adapters") / "model", "qwen3"))


def learner_of(folder: str, lora: LoraConfig | None = LORA, dtype: str = "float32") -> TorchLearner:
    learner = opened("trainer.learners.torch:TorchLearner", folder, lora=lora, dtype=dtype)
    assert isinstance(learner, TorchLearner)
    learner.step(batch(0), learning_rate=1e-2, seed=0)
    return learner


def version(learner: TorchLearner, number: int) -> Policy:
    probe = learner.probe(SEQUENCES)
    return Policy(version=number, tensors=learner.tensors(), touched=frozenset(), probe=probe, adapter=learner.adapter)


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


def test_in_bfloat16_versions_pass_the_gate_and_others_do_not(folder: str) -> None:
    learner = learner_of(folder, dtype="bfloat16")

    async def use(engine: TorchEngine) -> None:
        for number in range(1, 6):
            await engine.load(version(learner, number))
            learner.step(batch(number), learning_rate=1e-3, seed=number)
        policy = version(learner, 6)
        wrong = {
            name: from_numpy(-20 * to_numpy(one)) if ".lora_B." in name else one for name, one in policy.tensors.items()
        }
        with pytest.raises(PolicyRefused, match="does not compute what the trainer published"):
            await engine.load(msgspec.structs.replace(policy, tensors=wrong))
        assert engine.version == 5
        await engine.load(policy)

    with_engine(folder, use, "bfloat16")


def test_version_0_is_the_base_and_a_refused_adapter_leaves_it_so(folder: str, tmp_path: Path) -> None:
    learner, other = learner_of(folder), learner_of(str(build_family(tmp_path / "other", "qwen3", seed=1)))
    policy = version(learner, 1)

    async def use(engine: TorchEngine) -> None:
        base = await scores(engine)
        first = min(policy.tensors)
        forged = {
            "its adapter belongs to base": version(other, 1),
            "is missing": with_tensors(policy, {name: one for name, one in policy.tensors.items() if name != first}),
            "is not in the model": with_tensors(policy, {**policy.tensors, "base_model.odd": policy.tensors[first]}),
            "does not compute": with_tensors(policy, {**policy.tensors, **doubled(policy)}),
            "NaN": with_tensors(
                policy, {**policy.tensors, first: from_numpy(to_numpy(policy.tensors[first]) * np.nan)}
            ),
        }
        for words, one in forged.items():
            with pytest.raises(PolicyRefused, match=words):
                await engine.load(one)
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
    return {name: from_numpy(to_numpy(one) * 2) for name, one in policy.tensors.items() if ".lora_B." in name}


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
        assert await scores(engine) == [pytest.approx(one, abs=1e-5) for one in small.probe(SEQUENCES).logprobs]

    async def begin_whole(engine: TorchEngine) -> None:
        await engine.load(version(whole, 1))
        with pytest.raises(
            PolicyRefused, match=r"policy 2: it is an adapter of .*, the engine serves full weights; start"
        ):
            await engine.load(version(small, 2))
        assert engine.version == 1

    with_engine(folder, use)
    with_engine(folder, begin_whole)


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
