"""Soak of an engine's hot reload: pauses, throughput and memory while versions arrive and requests run.

The model is the demo's, and a trainer beside the engine makes a step for each version, so that the machine is as busy as a
run's and versions differ as those of a run do; each carries a probe. Requests are the demo's, in groups, and a few long ones.
Of the tokens after a reload it says how far their recorded logprobs are from an exact computation at their version. With a
lora_rank versions are adapters of the model, each changed a little, without a trainer.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infra.cli.bench.learning.adding import Problem, problems
from infra.cli.bench.weights.distance import distances
from infra.cli.bench.weights.versions import Versions, trainer_beside
from infra.cli.demo.char_model import build_char_model

if TYPE_CHECKING:
    from actors.engines.engine import Chunk, Completion, Engine, Sampling
    from infra.policies.policy import Policy, Probe
    from infra.policies.tensors import Tensor

    Sampled = list[tuple[tuple[int, ...], Completion]]

GROUP, MAX_TOKENS = 16, 5
LONG_REQUESTS, LONG_TOKENS = 8, 200
MOST_KEPT = 5_000  # completions that lived through a reload, of each kind
ENGINES = {"torch": "actors.engines.torch:TorchEngine", "vllm": "actors.engines.vllm.engine:VllmEngine"}
MODES = ("rebuild", "keep")
VERSIONS_PER_SAMPLE = 5
ALL_LINEAR = "all-linear"
SETTLED = 100  # versions until caches are full; growth counts from there


def run(
    versions: int = 300,
    *,
    engine: str = "vllm",
    groups_in_flight: int = 64,
    lora_rank: int = 0,
    modes: Sequence[str] = MODES,
    options: dict[str, object] | None = None,
) -> dict[str, float]:
    """Load `versions` policies while groups of 16 short requests run; what it cost, by mode of `reload.kv`.

    engine: "vllm" or "torch". lora_rank: of versions that are adapters of every linear module, 0 for whole models.
    *_mb_per_version: least-squares slope of resident memory after the first 100 versions (or the first half, where there are
    fewer). *_short_*, *_long_*: distances of the demo's answers, and of those of 200 tokens. *_stream_gap_ms_*: from the last
    token of one version to the first of the next, as the listener of a stream sees them.
    """
    figures: dict[str, float] = {}
    for mode in modes if not lora_rank else modes[:1]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            build_char_model(folder, seed=0)
            lora = {"lora": {"rank": lora_rank, "alpha": lora_rank, "targets": (ALL_LINEAR,)}} if lora_rank else {}
            asked = {**(options or {}), **(lora if engine == "vllm" else {}), "kv": mode}
            asked_of = problems(folder, 0).train
            with _source(folder, lora_rank) as source:
                made = open_engine(engine, folder, asked)
                found, short, long = asyncio.run(_soak(made, source.next, versions, groups_in_flight, asked_of))
            if isinstance(source, Versions):
                for kind, sampled in (("short", short), ("long", long)):
                    apart = distances(folder, source.tensors, sampled)
                    found |= {f"{kind}_{figure}": value for figure, value in apart.items()}
        figures |= {f"{mode}_{figure}" if not lora_rank else figure: value for figure, value in found.items()}
    return figures


@contextmanager
def _source(folder: Path, lora_rank: int) -> "Iterator[Versions | _Adapters]":
    if lora_rank:
        yield _Adapters(folder, lora_rank)
        return
    with trainer_beside(folder, folder.parent / "versions") as versions:
        yield versions


async def _soak(
    engine: "Engine", next_policy: "Callable[[int], Policy]", versions: int, groups: int, asked_of: Sequence[Problem]
) -> "tuple[dict[str, float], Sampled, Sampled]":
    began = time.perf_counter()
    await engine.start()
    try:
        return await _soaked(engine, next_policy, versions, groups, asked_of, time.perf_counter() - began)
    finally:
        await engine.close()


async def _soaked(
    engine: "Engine",
    next_policy: "Callable[[int], Policy]",
    versions: int,
    groups: int,
    asked_of: Sequence[Problem],
    started_s: float,
) -> "tuple[dict[str, float], Sampled, Sampled]":
    load = _Load(engine, asked_of)
    pauses, swaps, front_mb, core_mb = [], [], [], []
    await engine.load(await asyncio.to_thread(next_policy, 1))
    async with asyncio.TaskGroup() as tasks:
        for worker in range(groups):
            tasks.create_task(load.work(worker))
        for worker in range(LONG_REQUESTS):
            tasks.create_task(load.work_long(groups + worker))
        began = time.perf_counter()
        for version in range(2, versions + 2):
            policy = await asyncio.to_thread(next_policy, version)
            loading = time.perf_counter()
            pauses.append((await engine.load(policy)).pause_ms)
            swaps.append((time.perf_counter() - loading) * 1e3)
            if version % VERSIONS_PER_SAMPLE == 0:
                front_mb.append(_resident_mb())
                core_mb.append(await _core_mb(engine))
        seconds = time.perf_counter() - began
        load.stop = True
    settled = min(SETTLED, versions // 2) // VERSIONS_PER_SAMPLE
    figures = {
        "versions": float(versions),
        "start_s": started_s,
        "pause_ms_p50": float(np.percentile(pauses, 50)),
        "pause_ms_p95": float(np.percentile(pauses, 95)),
        "stream_gap_ms_p50": float(np.percentile(load.gaps_ms, 50)) if load.gaps_ms else 0.0,
        "stream_gap_ms_p95": float(np.percentile(load.gaps_ms, 95)) if load.gaps_ms else 0.0,
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
    return figures, load.short, load.long


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

    def __init__(self, engine: "Engine", asked_of: Sequence[Problem]) -> None:
        self._engine = engine
        self._asked_of = asked_of
        self.stop = False
        self.num_tokens = 0
        self.num_requests = 0
        self.num_failed = 0
        self.short: Sampled = []
        self.long: Sampled = []
        self.gaps_ms: list[float] = []

    async def work(self, worker: int) -> None:
        """Run groups until asked to stop."""
        from actors.engines.engine import Sampling

        ends = tuple({one.answer[-1] for one in self._asked_of})
        await self._work(worker, Sampling(max_tokens=MAX_TOKENS, stop=ends), GROUP, self.short)

    async def work_long(self, worker: int) -> None:
        """Run one long request after the other."""
        from actors.engines.engine import Sampling

        await self._work(worker, Sampling(max_tokens=LONG_TOKENS), 1, self.long)

    async def _work(self, worker: int, sampling: "Sampling", group: int, kept: "Sampled") -> None:
        random = np.random.default_rng(worker)
        while not self.stop:
            prompt = self._asked_of[int(random.integers(len(self._asked_of)))].prompt
            # A long one is streamed: what its listener sees of a reload.
            calls = (
                self._engine.generate(prompt, sampling, on_chunk=self._seen() if group == 1 else None)
                for _ in range(group)
            )
            for completion in await asyncio.gather(*calls, return_exceptions=True):
                self.num_requests += 1
                if isinstance(completion, BaseException):
                    self.num_failed += 1
                    continue
                self.num_tokens += len(completion.tokens)
                if len(completion.spans) > 1 and len(kept) < MOST_KEPT:
                    kept.append((prompt, completion))

    def _seen(self) -> "Callable[[Chunk], None]":
        """Notes how long after the last token of one version the first of the next one came."""
        version, at_s = -1, 0.0

        def seen(chunk: "Chunk") -> None:
            nonlocal version, at_s
            now_s = time.perf_counter()
            if version not in (-1, chunk.version):
                self.gaps_ms.append((now_s - at_s) * 1e3)
            version, at_s = chunk.version, now_s

        return seen


def slope(values: Sequence[float]) -> float:
    """Least-squares growth per step; 0 for fewer than two values.

    >>> round(slope([1.0, 2.0, 3.0]), 6)
    1.0
    """
    return float(np.polyfit(np.arange(len(values)), np.asarray(values), 1)[0]) if len(values) > 1 else 0.0


def open_engine(name: str, folder: Path, options: dict[str, object]) -> "Engine":
    """The engine of that name on a model folder, not started. Raises ValueError for a name that is not in `ENGINES`."""
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
