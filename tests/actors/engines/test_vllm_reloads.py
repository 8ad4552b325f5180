"""What proves a load in vLLM: it holds what was sent, to the bit, in whatever form its kernels have it."""

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines.engine import Sampling
from actors.engines.vllm.engine import VllmEngine
from infra.policies.policy import Policy, Probe
from schemas.errors import PolicyRefused
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.variables import variables

TEXT = (1, *range(20, 60))
MATRIX = "model.layers.1.self_attn.o_proj"


def packed_matrix_times(worker: Any) -> None:
    """A matrix that lies packed in a kernel, × 1.01."""
    module = worker.model_runner.model.get_submodule(MATRIX)
    kernel = module.cpu_linear
    module.cpu_linear = lambda x, weight, bias: kernel(x * 1.01, weight, bias)


def stale_matrix(worker: Any) -> None:
    """A matrix whose columns are those of another."""
    module = worker.model_runner.model.get_submodule(MATRIX)
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
    learner = opened("trainer.learners.torch:TorchLearner", folder, dtype=dtype)
    number = 0

    def version() -> Policy:
        nonlocal number
        number += 1
        probe: Probe = learner.probe(((1, *range(20, 40)), (1, *range(60, 30, -3))))
        return Policy(version=number, tensors=learner.tensors(), touched=frozenset(), probe=probe)

    async def trained(engine: VllmEngine) -> None:
        learner.step(batch(number), learning_rate=1e-4, seed=number)
        report = await engine.load(version())
        assert engine.version == number and report.probe_abs_max < (1e-3 if dtype == "float32" else 0.5)

    async def refused(engine: VllmEngine, fault: Callable[[Any], None]) -> None:
        served, before = engine.version, await engine.score_tokens(TEXT)
        await engine._llm.collective_rpc(fault)
        running = asyncio.create_task(engine.generate((1, 20), Sampling(max_tokens=40)))
        with pytest.raises(PolicyRefused, match=r"after the load vLLM holds other values in (model|lm_head)"):
            await engine.load(version())  # the same weights, so that nothing of them is written again
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
