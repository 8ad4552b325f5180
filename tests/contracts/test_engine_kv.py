"""Reloads under load with keys and values rebuilt or kept, and three versions of every family of models."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines.engine import Completion, Engine, EngineStopped, KvMode, Sampling
from actors.engines.torch import TorchEngine
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy import Policy
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import from_numpy, to_numpy
from infra.store.memory import MemoryStore
from schemas import Span
from schemas.errors import PolicyRefused
from tests.contracts.engine_case import Case, Tensors, scripted, torch_case, vllm_case
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.tiny_models import FAMILIES, build_tiny_model
from trainer.config import LoraConfig

Answers = list[tuple[tuple[int, ...], Completion]]


WORKERS, TOKENS = 6, 60
LONG = (1, *(20 + at % 70 for at in range(300)))  # of blocks enough for vLLM to cache
CHECKED = 40  # of the answers, token by token
MOST_GROWTH_MB = 40.0
ENGINES = (("scripted", scripted, 400), ("torch", torch_case, 40), ("vllm", vllm_case, 400))
MARKS = {"vllm": [pytest.mark.full]}


class EachVersion(dict[int, Tensors]):
    """The tensors of every version, made when they are asked for: matrices of another size each."""

    def __missing__(self, version: int) -> Tensors:
        scale = np.float32(1 + 0.08 * np.sin(version))
        return {
            name: from_numpy(to_numpy(tensor) * scale) if len(tensor.shape) > 1 else tensor
            for name, tensor in self[0].items()
        }


class Lived(Case):
    """A case, its mode, and how many reloads it is to live through."""

    kv: KvMode
    reloads: int


def cases() -> Iterator[Any]:
    for name, make, reloads in ENGINES:
        for kv in ("rebuild", "keep"):
            marks = MARKS.get(name, [])
            yield pytest.param((partial(make, kv=kv), kv, reloads), id=f"{name}-{kv}", marks=marks)


@pytest.fixture(scope="module", params=cases())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    make, kv, reloads = request.param
    made = make(tmp_path_factory.mktemp("engine") / "model")
    made.by_version = EachVersion(made.by_version)
    made.__class__, made.kv, made.reloads = Lived, kv, reloads
    with made:
        yield made


async def answers(case: Lived, worker: int, stopped: asyncio.Event, found: Answers) -> None:
    """One request after the other, in prompts of their own."""
    number = 0
    while not stopped.is_set():
        prompt = (1, 20 + worker, 20 + number % 70)
        found.append((prompt, await case.engine.generate(prompt, Sampling(max_tokens=TOKENS))))
        number += 1


async def reload(case: Lived) -> int:
    """Load the next version."""
    policy = case.policy(case.by_version[case.newest + 1])
    await case.engine.load(policy)
    return policy.version


async def assert_fresh(case: Lived) -> None:
    """A request that begins now is sampled by the served version alone, with keys and values of that version."""
    completion = await case.engine.generate(LONG, Sampling(max_tokens=2, seed=7))
    assert [(span.version, span.kv) for span in completion.spans] == [(case.engine.version, -1)]
    case.assert_reproduced(LONG, completion, 1.0)


async def refused(case: Lived) -> None:
    """A version that the engine does not reproduce."""
    wrong = case.policy(case.by_version[case.newest + 1])
    other = case.policy(case.by_version[case.newest + 1])
    with pytest.raises(PolicyRefused, match="probe"):
        await case.engine.load(Policy(version=wrong.version, tensors=wrong.tensors, probe=other.probe))


def assert_true(case: Lived, completion: Completion) -> None:
    """Versions go up, and keys and values are as old as the mode has them."""
    spans = completion.spans
    assert len(completion.tokens) == len(completion.logprobs) == TOKENS == spans[-1].stop
    versions = [span.version for span in spans]
    assert versions == sorted(versions)
    if case.kv == "rebuild":
        assert {span.kv for span in spans} == {-1} and len(set(versions)) == len(versions)
    for before, span in itertools.pairwise(spans):
        # As old as in the span before, unless all were computed again after a refused version, or the answer was cut there.
        assert span.kv == -1 or oldest(before) <= span.kv < span.version


def oldest(span: Span) -> int:
    """Version of its oldest keys and values."""
    return span.version if span.kv < 0 else span.kv


def kept_all(completion: Completion) -> bool:
    """True if no refused version had its keys and values computed again in its midst, at a step that spans do not tell."""
    return all(span.kv in (-1, oldest(before)) for before, span in itertools.pairwise(completion.spans))


def test_reloads_under_load_fail_nothing_and_no_new_request_meets_keys_of_older_weights(case: Lived) -> None:
    async def check(case: Lived) -> None:
        stopped, found, memory_mb = asyncio.Event(), Answers(), []
        async with asyncio.TaskGroup() as tasks:
            for worker in range(WORKERS):
                tasks.create_task(answers(case, worker, stopped, found))
            for number in range(case.reloads):
                assert await reload(case) == case.engine.version
                if number % 4 == 0:
                    await assert_fresh(case)
                if number % (case.reloads // 4) == 7:
                    await refused(case)
                    await assert_fresh(case)
                if number % (case.reloads // 4) == case.reloads // 4 - 1:
                    memory_mb.append(await resident_mb(case))
            stopped.set()
        assert len(found) >= WORKERS
        for _, completion in found:
            assert_true(case, completion)
        kept = [span for _, completion in found for span in completion.spans if span.kv >= 0]
        assert bool(kept) == (case.kv == "keep")
        lived = [entry for entry in found if len(entry[1].spans) > 1 and kept_all(entry[1])]
        assert lived, "some answers live through a reload"
        for prompt, completion in lived[:: -(-len(lived) // CHECKED)]:
            case.assert_reproduced(prompt, completion, 1.0)
        assert memory_mb[-1] - memory_mb[1] < MOST_GROWTH_MB

    run_long(case, check)


def test_a_salt_that_is_left_out_is_found(case: Lived) -> None:
    """The planted fault: requests reach vLLM without the salt that divides its caches."""
    if not hasattr(case.engine, "_llm") or case.kv != "keep":
        pytest.skip("this engine shares no keys and values between requests, or has none of before")
    llm: Any = case.engine._llm
    salted = llm.add_request

    async def unsalted(request_id: str, prompt: dict[str, Any], *args: Any, **named: Any) -> Any:
        assert prompt.pop("cache_salt")
        return await salted(request_id, prompt, *args, **named)

    async def check(case: Lived) -> None:
        llm.add_request = unsalted
        try:
            await case.engine.generate(LONG, Sampling(max_tokens=2))
            await reload(case)
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                await assert_fresh(case)
        finally:
            llm.add_request = salted
        await assert_fresh(case)

    run_long(case, check)


async def resident_mb(case: Lived) -> float:
    """Anonymous memory of the processes that hold vLLM's model."""
    llm: Any = getattr(case.engine, "_llm", None)
    return float(sum(await llm.collective_rpc("headrace_memory"))) if llm is not None else 0.0


def run_long(case: Lived, call: Callable[[Any], Any]) -> None:
    case.runner.run(asyncio.wait_for(call(case), 900))


SEQUENCES = ((1, *range(20, 40)), (1, *range(60, 30, -3)))


def torch_engine(folder: str) -> Engine:

    return TorchEngine(model=folder)


def vllm_engine(folder: str) -> Engine:
    from actors.engines.vllm.engine import VllmEngine

    return VllmEngine(model=folder, max_num_seqs=8)


@pytest.mark.full
@pytest.mark.parametrize(
    "family", sorted(FAMILIES.keys() - {"cohere", "qwen2.5-vl", "qwen3-vl"})
)  # those are refused by name
def test_three_versions_of_a_family_are_trained_published_loaded_and_proved(tmp_path: Path, family: str) -> None:
    three_versions(str(build_tiny_model(tmp_path / family, family)), torch_engine)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "llava", "qwen3.5"])
def test_three_adapters_of_a_family_are_too(tmp_path: Path, family: str) -> None:
    three_versions(str(build_tiny_model(tmp_path / family, family)), torch_engine, LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param("llama", True, marks=pytest.mark.slow),
        *(
            pytest.param(family, family != "qwen3_moe", marks=pytest.mark.full)
            for family in ("qwen3_moe", "qwen2", "gemma2", "gemma3_text", "granite")
        ),
    ],
)
def test_a_family_is_too_in_vllm_with_embeddings_tied_or_not(tmp_path: Path, family: str, tied: bool) -> None:
    width = {"hidden_size": 128} if family == "qwen2" else {}  # vLLM takes the head's size from it alone there
    three_versions(str(build_family(tmp_path / "model", family, tie_word_embeddings=tied, **width)), vllm_engine)


@pytest.mark.slow
async def test_an_engine_that_fails_at_its_first_answer_says_where_the_cause_is(tmp_path: Path) -> None:
    engine = vllm_engine(str(build_family(tmp_path / "model", "qwen2")))  # with heads of 8, which vLLM lacks on a CPU
    with pytest.raises(EngineStopped, match="for the root cause"):
        await engine.start()
    await engine.close()


def three_versions(folder: str, engine: Callable[[str], Engine], lora: LoraConfig | None = None) -> None:
    """Train, publish, fetch and load; the engine's logprobs are the learner's after each reload."""
    learner = opened(folder, lora=lora)
    store = MemoryStore()

    async def main() -> None:
        follower, serving, previous = PolicyFetcher(store, "main"), engine(folder), None
        await serving.start()
        try:
            for version in range(3):
                learner.step(batch(version), learning_rate=1e-3, seed=version)
                tensors, probe = learner.tensors(), learner.probe(SEQUENCES)
                new = NewVersion(
                    policy="main", token=0, version=version, parent=version - 1, step=version, adapter=learner.adapter
                )
                event = publish(store, new, tensors, previous=previous, probe=probe)
                policy = await asyncio.to_thread(follower.fetch, event)
                report = await serving.load(policy)
                assert serving.version == version and report.probe_abs_max < 1e-4
                for tokens, expected in zip(SEQUENCES, probe.logprobs, strict=True):
                    assert await serving.score_tokens(tokens) == pytest.approx(expected, abs=1e-4)
                previous = tensors
        finally:
            await serving.close()

    asyncio.run(main())
