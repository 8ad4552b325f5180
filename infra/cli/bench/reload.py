"""Soak of an engine's hot reload: pauses, throughput and memory while versions arrive and requests run.

The model is the demo's; each version changes every tensor a little, as a training step does, and carries a probe. With a
lora_rank versions are adapters of it.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infra.cli.demo.char_model import build_char_model

if TYPE_CHECKING:
    from actors.engines.engine import Engine
    from infra.policies.policy import Policy, Probe
    from infra.policies.tensors import Tensor

PROMPT_TOKENS, GROUP, MAX_TOKENS = 7, 16, 5
ENGINES = {"torch": "actors.engines.torch:TorchEngine", "vllm": "actors.engines.vllm.engine:VllmEngine"}
VERSIONS_PER_SAMPLE = 5
ALL_LINEAR = "all-linear"
SETTLED = 100  # versions until caches are full; growth counts from there


def run(
    versions: int = 300,
    *,
    engine: str = "vllm",
    groups_in_flight: int = 64,
    seconds_per_version: float = 0.0,
    lora_rank: int = 0,
    options: dict[str, object] | None = None,
) -> dict[str, float]:
    """Load `versions` policies while groups of 16 short requests run; what it cost.

    engine: "vllm" or "torch". seconds_per_version: shortest time from one load to the next. lora_rank: of versions that are
    adapters of every linear module, 0 for whole models. *_mb_per_version: least-squares slope of resident memory after the
    first 100 versions (or the first half, where there are fewer).
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        build_char_model(folder, seed=0)
        lora = {"lora": {"rank": lora_rank, "alpha": lora_rank, "targets": (ALL_LINEAR,)}} if lora_rank else {}
        policies = _Adapters(folder, lora_rank) if lora_rank else _Policies(folder)
        made = open_engine(engine, folder, {**(options or {}), **(lora if engine == "vllm" else {})})
        return asyncio.run(_soak(made, policies, versions, groups_in_flight, seconds_per_version))


async def _soak(
    engine: "Engine", policies: "_Policies", versions: int, groups: int, seconds_per_version: float
) -> dict[str, float]:
    began = time.perf_counter()
    await engine.start()
    started_s = time.perf_counter() - began
    load = _Load(engine)
    pauses, swaps, front_mb, core_mb = [], [], [], []
    async with asyncio.TaskGroup() as tasks:
        for worker in range(groups):
            tasks.create_task(load.work(worker))
        began = time.perf_counter()
        for version in range(1, versions + 1):
            policy = await asyncio.to_thread(policies.next, version)
            loading = time.perf_counter()
            pauses.append((await engine.load(policy)).pause_ms)
            swaps.append((time.perf_counter() - loading) * 1e3)
            if version % VERSIONS_PER_SAMPLE == 0:
                front_mb.append(_resident_mb())
                core_mb.append(await _core_mb(engine))
            await asyncio.sleep(max(0.0, loading + seconds_per_version - time.perf_counter()))
        seconds = time.perf_counter() - began
        load.stop = True
    await engine.close()
    settled = min(SETTLED, versions // 2) // VERSIONS_PER_SAMPLE
    return {
        "versions": float(versions),
        "start_s": started_s,
        "pause_ms_p50": float(np.percentile(pauses, 50)),
        "pause_ms_p95": float(np.percentile(pauses, 95)),
        "load_ms_p50": float(np.percentile(swaps, 50)),
        "load_ms_p95": float(np.percentile(swaps, 95)),
        "tokens_per_s": load.num_tokens / seconds,
        "requests": float(load.num_requests),
        "requests_failed": float(load.num_failed),
        "front_mb": max(front_mb, default=0.0),
        "core_mb": max(core_mb, default=0.0),
        "front_mb_per_version": slope(front_mb[settled:]) / VERSIONS_PER_SAMPLE,
        "core_mb_per_version": slope(core_mb[settled:]) / VERSIONS_PER_SAMPLE,
    }


class _Policies:
    """Versions of the demo's model, each with every matrix scaled a little, and its probe."""

    def __init__(self, folder: Path) -> None:
        from infra.model.model import load_model, model_tensors

        self._model = load_model(folder)
        self._tensors = model_tensors(self._model)

    def next(self, version: int) -> "Policy":
        from infra.model.model import load_into
        from infra.policies.policy import Policy
        from infra.policies.tensors import from_numpy, to_numpy

        scale = np.float32(1.001 if version % 2 else 1 / 1.001)
        tensors: dict[str, Tensor] = {
            name: from_numpy(to_numpy(tensor) * scale) for name, tensor in self._tensors.items()
        }
        self._tensors = tensors
        load_into(self._model, tensors)
        return Policy(version=version, tensors=tensors, touched=frozenset(tensors), probe=self._probe())

    def _probe(self) -> "Probe":
        import torch

        from infra.policies.policy import Probe

        tokens = (1, 22, 30, 41, 52, 9)
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(self._model(input_ids=ids).logits[0], -1)
        picked = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        return Probe((tokens,), (tuple(picked),))


class _Adapters(_Policies):
    """Versions of an adapter of the demo's model: A as it begins, B random and scaled a little from version to version."""

    def __init__(self, folder: Path, rank: int) -> None:
        from infra.model.adapter import find_adapter, put_adapter
        from infra.model.model import model_tensors
        from infra.policies.tensors import from_numpy

        super().__init__(folder)
        self._adapter = find_adapter(folder, rank=rank, alpha=rank, targets=(ALL_LINEAR,))
        put_adapter(self._model, self._adapter)
        random = np.random.default_rng(0)
        self._tensors = {
            name: from_numpy(random.normal(size=tensor.shape).astype(np.float32) * np.float32(0.02))
            if ".lora_B." in name
            else tensor
            for name, tensor in model_tensors(self._model).items()
        }

    def next(self, version: int) -> "Policy":
        import msgspec

        return msgspec.structs.replace(super().next(version), adapter=self._adapter)


class _Load:
    """Groups of short requests, one after the other, on each of a number of workers."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.stop = False
        self.num_tokens = 0
        self.num_requests = 0
        self.num_failed = 0

    async def work(self, worker: int) -> None:
        """Run groups until asked to stop."""
        from actors.engines.engine import Sampling

        random = np.random.default_rng(worker)
        sampling = Sampling(max_tokens=MAX_TOKENS)
        while not self.stop:
            prompt = (1, *random.integers(3, 99, PROMPT_TOKENS - 1).tolist())
            calls = (self._engine.generate(prompt, sampling) for _ in range(GROUP))
            for completion in await asyncio.gather(*calls, return_exceptions=True):
                self.num_requests += 1
                if isinstance(completion, BaseException):
                    self.num_failed += 1
                else:
                    self.num_tokens += len(completion.tokens)


def slope(values: Sequence[float]) -> float:
    """Least-squares growth per step; 0 for fewer than two values.

    >>> round(slope([1.0, 2.0, 3.0]), 6)
    1.0
    """
    return float(np.polyfit(np.arange(len(values)), np.asarray(values), 1)[0]) if len(values) > 1 else 0.0


def open_engine(name: str, folder: Path, options: dict[str, object]) -> "Engine":
    """The engine of that name on a model folder, not started. Raises ValueError for a name that is none of `ENGINES`."""
    from infra.settings.plugin import load

    if name not in ENGINES:
        raise ValueError(f"engine: got {name!r}, expected one of {', '.join(ENGINES)}")
    engine: Engine = load(ENGINES[name], {"model": str(folder), **options})
    return engine


async def _core_mb(engine: "Engine") -> float:
    from actors.engines.vllm.engine import VllmEngine

    return await engine.core_memory_mb() if isinstance(engine, VllmEngine) else 0.0


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
