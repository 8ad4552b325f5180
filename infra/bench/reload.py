"""Soak of an engine's hot reload: pauses, throughput and memory while versions arrive and requests run.

The model is the demo's; each version changes every tensor a little, as a training step does, and carries a probe.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

PROMPT_TOKENS, GROUP, MAX_TOKENS = 7, 16, 5


def run(
    versions: int = 200,
    *,
    engine: str = "vllm",
    groups_in_flight: int = 64,
    seconds_per_version: float = 0.0,
    options: dict[str, object] | None = None,
) -> dict[str, float]:
    """Load `versions` policies while groups of 16 short requests run; what it cost.

    *_mb_per_version: least-squares slope of resident memory over the second half of the versions. seconds_per_version:
    shortest time from one load to the next.
    """
    with tempfile.TemporaryDirectory() as folder:
        soak = _soak(Path(folder) / "model", versions, engine, groups_in_flight, seconds_per_version, options or {})
        return asyncio.run(soak)


async def _soak(
    folder: Path, versions: int, name: str, groups: int, seconds_per_version: float, options: dict[str, object]
) -> dict[str, float]:
    from actors.engines.torch import TorchEngine
    from actors.engines.vllm.engine import VllmEngine
    from infra.demo.char_model import build_char_model
    from infra.model import folder_tensors
    from infra.weights.policy import Policy
    from infra.weights.tensors import from_numpy, to_numpy

    build_char_model(folder, seed=0)
    held = folder_tensors(folder)
    began = time.perf_counter()
    engine = (VllmEngine if name == "vllm" else TorchEngine)(model=str(folder), **options)  # type: ignore[arg-type]
    await engine.start()
    started_s = time.perf_counter() - began
    load = Load(engine, groups)
    pauses, front_mb, core_mb, swaps = [], [], [], []
    async with asyncio.TaskGroup() as tasks:
        work = [tasks.create_task(load.work(index)) for index in range(groups)]
        began = time.perf_counter()
        for version in range(1, versions + 1):
            scale = np.float32(1.001 if version % 2 else 1 / 1.001)
            held = {key: from_numpy(to_numpy(tensor) * scale) for key, tensor in held.items()}
            loading = time.perf_counter()
            report = await engine.load(Policy(version=version, tensors=held, touched=frozenset(held)))
            swaps.append((time.perf_counter() - loading) * 1e3)
            pauses.append(report.pause_ms)
            front_mb.append(_resident_mb())
            core_mb.append(await engine.core_memory_mb() if isinstance(engine, VllmEngine) else 0.0)
            await asyncio.sleep(max(0.0, loading + seconds_per_version - time.perf_counter()))
        seconds = time.perf_counter() - began
        load.stop = True
    assert all(task.done() for task in work)
    await engine.close()
    if os.environ.get("SERIES"):
        print("core", [round(x) for x in core_mb[::10]])
        print("front", [round(x) for x in front_mb[::10]])
    return {
        "versions": float(versions),
        "start_s": started_s,
        "pause_ms_p50": float(np.percentile(pauses, 50)),
        "pause_ms_p95": float(np.percentile(pauses, 95)),
        "load_ms_p50": float(np.percentile(swaps, 50)),
        "load_ms_p95": float(np.percentile(swaps, 95)),
        "tokens_per_s": load.num_tokens / seconds,
        "requests": float(load.num_requests),
        "requests_failed": 0.0,
        "front_mb": front_mb[-1],
        "core_mb": core_mb[-1],
        "front_mb_per_version": slope(front_mb[versions // 2 :]),
        "core_mb_per_version": slope(core_mb[versions // 2 :]),
    }


class Load:
    """Groups of short requests, one after the other, on each of a number of workers."""

    def __init__(self, engine: object, groups: int) -> None:
        self._engine = engine
        self.stop = False
        self.num_tokens = 0
        self.num_requests = 0

    async def work(self, worker: int) -> None:
        """Run groups until told to stop; a failed request ends the soak."""
        from actors.engine import Sampling

        random = np.random.default_rng(worker)
        sampling = Sampling(max_tokens=MAX_TOKENS)
        while not self.stop:
            prompt = (1, *random.integers(3, 99, PROMPT_TOKENS - 1).tolist())
            calls = (self._engine.generate(prompt, sampling) for _ in range(GROUP))  # type: ignore[attr-defined]
            completions = await asyncio.gather(*calls)
            self.num_requests += len(completions)
            self.num_tokens += sum(len(completion.tokens) for completion in completions)


def slope(values: Iterable[float]) -> float:
    """Least-squares growth per step.

    >>> round(slope([1.0, 2.0, 3.0]), 6)
    1.0
    """
    ys = np.asarray(list(values))
    return float(np.polyfit(np.arange(len(ys)), ys, 1)[0]) if len(ys) > 1 else 0.0


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
