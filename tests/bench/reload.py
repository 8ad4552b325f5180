"""Hot reloads of a running engine: pauses, tokens per second, failed requests, in both modes of `reload.kv`.

The demo's model; each version scales its matrices a little and carries a probe. Groups of 16 short requests and a few long
ones run all the time.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engines.engine import Engine, Sampling
from infra.cli.demo.char_model import build_char_model
from infra.model.model import load_into, load_model, model_tensors
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import from_numpy, to_numpy
from infra.settings.plugin import load as load_plugin
from tests.bench._additions import Problem, problems
from tests.bench.report import Row

ENGINES = {"torch": "actors.engines.torch:TorchEngine", "vllm": "actors.engines.vllm.engine:VllmEngine"}
PAUSES = {"rebuild": 60.0, "keep": 30.0}  # targets, ms
GROUP, MAX_TOKENS, LONG_TOKENS = 16, 5, 200


def run(
    versions: int = 100, engine: str = "vllm", groups: int = 64, long: int = 8, modes: str = "rebuild,keep"
) -> Iterator[Row]:
    """versions: Loaded one after the other. engine: vllm or torch. groups: In flight. long: Requests of 200 tokens."""
    for mode in modes.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = build_char_model(Path(name) / "model", seed=0)
            made: Engine = load_plugin(ENGINES[engine], {"model": str(folder), "kv": mode})
            yield from asyncio.run(soaked(made, mode, Versions(folder), problems(folder, 0)[0], versions, groups, long))


class Versions:
    """Each has every matrix of the one before scaled a little."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = load_model(folder)
        self._tensors = model_tensors(self._model)

    def next(self, version: int) -> Policy:
        scale = np.float32(1.001 if version % 2 else 1 / 1.001)
        self._tensors = {name: from_numpy(to_numpy(each) * scale) for name, each in self._tensors.items()}
        load_into(self._model, self._tensors)
        ids = torch.tensor([[1, 22, 30, 41, 52, 9]])
        with torch.no_grad():
            logprobs = torch.log_softmax(self._model(input_ids=ids).logits[0], -1)
        picked = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        probe = Probe((tuple(ids[0].tolist()),), (tuple(picked),))
        return Policy(version=version, tensors=self._tensors, probe=probe)


async def soaked(
    engine: Engine, mode: str, source: Versions, asked: list[Problem], versions: int, groups: int, long: int
) -> list[Row]:
    pauses, tokens, requests, failed, stopped = [], 0, 0, 0, False

    async def work(number: int, sampling: Sampling, size: int) -> None:
        nonlocal tokens, requests, failed
        random = np.random.default_rng(number)
        while not stopped:
            prompt = asked[int(random.integers(len(asked)))].prompt
            calls = (engine.generate(prompt, sampling) for _ in range(size))
            for completion in await asyncio.gather(*calls, return_exceptions=True):
                requests += 1
                failed += isinstance(completion, BaseException)
                tokens += 0 if isinstance(completion, BaseException) else len(completion.tokens)

    await engine.start()
    try:
        await engine.load(await asyncio.to_thread(source.next, 1))
        short = Sampling(max_tokens=MAX_TOKENS, stop=(asked[0].answer[-1],))
        async with asyncio.TaskGroup() as tasks:
            for number in range(groups):
                tasks.create_task(work(number, short, GROUP))
            for number in range(long):
                tasks.create_task(work(groups + number, Sampling(max_tokens=LONG_TOKENS), 1))
            begin = time.perf_counter()
            for version in range(2, versions + 2):
                policy = await asyncio.to_thread(source.next, version)
                pauses.append((await engine.load(policy)).pause_ms)
            seconds = time.perf_counter() - begin
            stopped = True
    finally:
        await engine.close()
    return [
        Row(f"{mode}, pause p50", float(np.percentile(pauses, 50)), "ms", high=PAUSES[mode]),
        Row(f"{mode}, pause p95", float(np.percentile(pauses, 95)), "ms", high=200.0),
        Row(f"{mode}, tokens", tokens / seconds, "/s"),
        Row(f"{mode}, requests", float(requests), ""),
        Row(f"{mode}, requests failed", float(failed), "requests", low=0.0, high=0.0),
    ]
