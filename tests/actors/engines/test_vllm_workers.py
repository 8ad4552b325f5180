"""vLLM in several processes, each with a shard of every matrix: all of them hold a version, or none serves it."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engines.engine import Completion, Sampling
from actors.engines.vllm.engine import VllmEngine
from infra.model.model import load_tokenizer
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import to_numpy
from schemas.errors import PolicyRefused
from tests.contracts.engine_case import Case, char_model
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.variables import variables
from trainer.config import LoraConfig

WORKERS = 2
MATRIX = "model.layers.1.self_attn.o_proj"  # cut by its inputs, packed on a CPU
PROMPTS = ((1, 22, 33), (1, 20), (1, 44, 5, 9))
GREEDY = Sampling(max_tokens=24, temperature=0.0)


def started(folder: Path, **options: object) -> Case:
    model, tensors, reference, kept = char_model(folder)
    engine = VllmEngine(model=str(model), seed=3, max_num_seqs=16, **options)
    return Case(engine, tensors, reference, load_tokenizer(model).decode, kept)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with (
        variables(VLLM_ALLOW_INSECURE_SERIALIZATION="1"),  # so that a test can look into vLLM's workers
        started(tmp_path_factory.mktemp("workers") / "model", tensor_parallel_size=WORKERS) as made,
    ):
        yield made


async def answers(case: Case) -> list[Completion]:
    """Greedy ones, each as the reference has it."""
    found = await asyncio.gather(*(case.engine.generate(prompt, GREEDY) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        case.assert_reproduced(prompt, completion, 1.0)
    return found


async def asked(case: Case, look: Callable[[Any], Any]) -> list[Any]:
    """The answer of each worker."""
    assert isinstance(case.engine, VllmEngine)
    return list(await case.engine._llm.collective_rpc(look))


def shard(worker: Any) -> tuple[int, list[list[float]]]:
    """The rank of a worker, and what it multiplies with in the place of MATRIX."""
    from actors.engines.vllm.loading import columns

    module = worker.model_runner.model.get_submodule(MATRIX)
    return int(worker.rank), columns(module, tuple(range(module.input_size_per_partition))).tolist()


async def assert_shards(case: Case) -> None:
    """Each worker holds its part of the version that serves, and answers each call with the answer to it."""
    whole = to_numpy(case.tensors[f"{MATRIX}.weight"])
    found = await asked(case, shard)
    assert [rank for rank, _ in found] == list(range(WORKERS))
    for (_, held), wanted in zip(found, np.split(whole, WORKERS, axis=1), strict=True):
        np.testing.assert_array_equal(np.array(held, np.float32), wanted)


@pytest.mark.full
def test_every_worker_holds_its_shard_of_a_version_and_they_answer_as_one_worker_does(
    case: Case, tmp_path: Path
) -> None:
    async def followed(case: Case) -> list[Completion]:
        found = await answers(case)
        for only in ("", "mlp", "layers.1."):
            await case.load(case.next_policy(scale=1.05, only=only))
            found += await answers(case)
        return found

    def several(case: Case) -> Any:
        async def check() -> list[Completion]:
            found = await followed(case)
            await assert_shards(case)
            return found

        return check()

    of_two = case.run(several)
    with started(tmp_path / "model") as alone:
        of_one = alone.run(followed)
    assert {item.spans[0].version for item in of_two} == {0, 1, 2, 3}
    for entry, two in zip(of_one, of_two, strict=True):
        assert entry.tokens == two.tokens
        np.testing.assert_allclose(entry.logprobs, two.logprobs, atol=1e-4, rtol=0)


def cannot_read_once(worker: Any, rank: int) -> None:
    """One worker cannot read the adapter that comes next."""
    if worker.rank == rank:
        manager = worker.model_runner.lora_manager

        def fail(_: object) -> None:
            del manager._load_adapter
            raise MemoryError("planted")

        manager._load_adapter = fail


@pytest.mark.full
def test_an_adapter_that_one_worker_cannot_read_is_refused_for_all_of_them(tmp_path: Path) -> None:
    folder = str(build_family(tmp_path / "model", "qwen3"))
    lora = LoraConfig(rank=3, alpha=7)
    learner = opened(folder, lora=lora)
    text = (1, *range(20, 40))

    def version(number: int) -> Policy:
        learner.step(batch(number), learning_rate=1e-2, seed=number)
        tensors, adapter = learner.tensors(), learner.adapter
        probe = learner.probe((text, (1, *range(60, 30, -3))))
        return Policy(version=number, tensors=tensors, probe=probe, adapter=adapter)

    async def main() -> None:
        told = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}
        engine = VllmEngine(model=folder, max_num_seqs=8, tensor_parallel_size=WORKERS, lora=told)
        await engine.start()
        try:
            for rank in range(WORKERS):
                served = 2 * rank + 1
                assert (await engine.load(version(served))).probe_abs_max < 1e-3
                before = await engine.score_tokens(text)
                await engine._llm.collective_rpc(partial(cannot_read_once, rank=rank))
                with pytest.raises(PolicyRefused, match=r"could not load it: .*planted"):
                    await engine.load(version(served + 1))
                assert engine.version == served
                assert await engine.score_tokens(text) == pytest.approx(before, abs=1e-5)
        finally:
            await engine.close()

    with variables(VLLM_ALLOW_INSECURE_SERIALIZATION="1"):  # so that a fault can be planted in vLLM's workers
        asyncio.run(main())


TEXT = (1, *range(20, 60))
RELOADS = "model.layers.1.self_attn.o_proj"


def packed_matrix_times(worker: Any) -> None:
    """A matrix that lies packed in a kernel, × 1.01."""
    module = worker.model_runner.model.get_submodule(RELOADS)
    kernel = module.cpu_linear
    module.cpu_linear = lambda x, weight, bias: kernel(x * 1.01, weight, bias)


def stale_matrix(worker: Any) -> None:
    """A matrix whose columns are those of another."""
    module = worker.model_runner.model.get_submodule(RELOADS)
    kernel = module.cpu_linear
    module.cpu_linear = lambda x, weight, bias: kernel(x.roll(1, -1), weight, bias)


def stale_norm(worker: Any) -> None:
    """One value of a vector, by the last bit."""
    worker.model_runner.model.model.norm.weight.data.view(torch.uint8)[0] ^= 1


def swapped_experts(worker: Any) -> None:
    """Two experts of one layer, in the form vLLM packed them."""
    (experts,) = [
        module
        for name, module in worker.model_runner.model.model.layers[1].named_modules()
        if hasattr(module, "w2_weight") and module._parameters
    ]
    held = experts.w2_weight.data
    held.copy_(held[[1, 0, *range(2, len(held))]].clone())


FAULTS = (packed_matrix_times, stale_matrix, stale_norm)


def stale_head(worker: Any) -> None:
    """The output matrix of tied embeddings in a kernel of its own, × 1.01."""
    head = worker.model_runner.model.lm_head
    kernel = head.cpu_linear
    head.cpu_linear = lambda x, weight, bias: kernel(x * 1.01, weight, bias)


def after_the_load(worker: Any, fault: Callable[[Any], None]) -> None:
    """Plant a fault behind the next load, since a load writes every layer."""
    apply = worker.headrace_apply

    def faulty(*given: Any) -> Any:
        del worker.headrace_apply
        done = apply(*given)
        fault(worker)
        return done

    worker.headrace_apply = faulty


def stop_collecting(worker: Any) -> None:
    """From now on only what nothing refers to is let go of."""
    gc.collect()
    gc.disable()


def alive(worker: Any) -> tuple[int, int]:
    """Tensors and packed matrices that vLLM's process holds."""
    from vllm._custom_ops import CPUDNNLGEMMHandler

    found = gc.get_objects()
    return sum(isinstance(value, torch.Tensor) for value in found), sum(
        isinstance(value, CPUDNNLGEMMHandler) for value in found
    )


# A version of a model without experts is loaded beside the steps, that of one with experts in the pause.
@pytest.mark.parametrize(
    ("family", "tied", "dtype", "faults"),
    [
        pytest.param("qwen3", True, "bfloat16", (*FAULTS, stale_head), marks=pytest.mark.slow),
        pytest.param("qwen3", False, "float32", FAULTS, marks=pytest.mark.full),
        pytest.param("qwen3_moe", False, "float32", (*FAULTS, swapped_experts), marks=pytest.mark.full),
        pytest.param("qwen3_moe", True, "bfloat16", (*FAULTS, swapped_experts), marks=pytest.mark.full),
    ],
)
def test_a_version_is_held_to_the_bit_or_refused_and_leaves_memory_when_it_is_replaced(
    tmp_path: Path, family: str, tied: bool, dtype: str, faults: tuple[Callable[[Any], None], ...]
) -> None:
    folder = str(build_family(tmp_path / "model", family, tie_word_embeddings=tied))
    learner = opened(folder, dtype=dtype)
    number = 0

    def version() -> Policy:
        nonlocal number
        number += 1
        probe: Probe = learner.probe(((1, *range(20, 40)), (1, *range(60, 30, -3))))
        return Policy(version=number, tensors=learner.tensors(), probe=probe)

    async def trained(engine: VllmEngine) -> None:
        learner.step(batch(number), learning_rate=1e-4, seed=number)
        report = await engine.load(version())
        assert engine.version == number and report.probe_abs_max < (1e-3 if dtype == "float32" else 0.5)

    async def refused(engine: VllmEngine, fault: Callable[[Any], None]) -> None:
        served, before = engine.version, await engine.score_tokens(TEXT)
        await engine._llm.collective_rpc(partial(after_the_load, fault=fault))
        running = asyncio.create_task(engine.generate((1, 20), Sampling(max_tokens=40)))
        with pytest.raises(PolicyRefused, match=r"after the load vLLM holds other values in (model|lm_head)"):
            await engine.load(version())
        assert engine.version == served and await engine.score_tokens(TEXT) == before
        assert {span.version for span in (await running).spans} == {served}

    async def main() -> None:
        engine = VllmEngine(model=folder, dtype=dtype, max_num_seqs=8)
        await engine.start()
        try:
            await engine.load(version())
            await trained(engine)
            await engine._llm.collective_rpc(stop_collecting)
            held = []
            for _ in range(4):
                await trained(engine)
                held.append(await engine._llm.collective_rpc(alive))
            assert held[1:] == held[:-1], "what a load made stays after the next"
            for fault in faults:
                await refused(engine, fault)
            await trained(engine)
        finally:
            await engine.close()

    with variables(VLLM_ALLOW_INSECURE_SERIALIZATION="1"):  # so that a test can look into vLLM's process
        asyncio.run(main())
