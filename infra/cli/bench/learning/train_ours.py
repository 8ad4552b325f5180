"""Our side of the benchmark of training: the demo, from a model that is warmed up already.

python -m infra.cli.bench.learning.train_ours FOLDER ENGINE CONTROL SEED MINUTES
"""

import asyncio
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.common.awaited_log import log_of
from infra.cli.bench.common.children import cpu_s

if TYPE_CHECKING:
    from infra.cli.settings import Settings
    from infra.log.log import Log
    from schemas.topics import Topic

# One step of a warm-up that changes nothing: the model was warmed up before.
WARM = ("trainer.warmup.min_steps=0", "trainer.warmup.max_steps=1", "trainer.warmup.learning_rate=1e-12")
TENSORS = "model.safetensors"


def warmed(settings: "Settings", model: Path, out: Path, say: Callable[[str], None]) -> int:
    """Write a copy of a model folder after the demo's supervised warm-up; how many steps that took."""
    from actors.tasksets.arithmetic import TRAIN, arithmetic_demonstrations
    from infra.cli.bench.learning.adding import MAX_TOKENS, accuracy, deck, demonstration, opened, problem_of
    from infra.model.model import load_tokenizer
    from infra.policies.tensors import write_tensors
    from trainer.batch.batch import pack

    warmup, seed = settings.trainer.warmup, settings.master.seed
    assert warmup is not None, "the demo's arithmetic has a warm-up"
    tokenizer, rows = load_tokenizer(model), list(arithmetic_demonstrations(seed=seed))
    shown = deck([problem_of(one, tokenizer) for one in rows if one.split == TRAIN], seed)
    looked = [problem_of(one, tokenizer) for one in rows if one.split != TRAIN]
    learner = opened(model, settings.trainer)
    learner.begin_phase("warmup")
    for step in range(1, warmup.max_steps + 1):
        items = [demonstration(one) for one in shown.deal(warmup.batch)]
        learner.step(pack(items, max_tokens=MAX_TOKENS), learning_rate=warmup.learning_rate, seed=step)
        if step >= warmup.min_steps and step % warmup.every == 0 and accuracy(learner, looked) >= warmup.stop_at:
            break
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(TENSORS))
    with (out / TENSORS).open("wb") as file:
        write_tensors(file, learner.tensors(), {"format": "pt"})
    say(f"train: seed {seed}: warmed up in {step} steps")
    return step


class Looked(msgspec.Struct):
    """What a run has reported. begun: the share right of its first weights, None before that is known. step: of the version
    that was looked at last. accuracy: the share that it has right. wall_s, cpu_s: from the beginning until that was known.
    reward: of the newest step, None before there is one.
    """

    begun: float | None = None
    accuracy: float = 0.0
    step: int = 0
    reward: float | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0


class RunFollower:
    """Follows a demo from the version after its warm-up on. pid: of its process. suite: that is looked at. at: what ends it."""

    def __init__(self, pid: int, suite: str, at: float) -> None:
        self.looked = Looked()
        self.begins, self.arrives = asyncio.Event(), asyncio.Event()
        self._pid = pid
        self._suite = suite
        self._at = at
        self._begin = (0.0, 0.0)

    async def follow(self, config: Path, *, begin_s: float, limit_s: float) -> Looked:
        """Until it arrives, or `limit_s` after its beginning. Raises TimeoutError where it does not begin."""
        async with asyncio.timeout(begin_s) as waiting, log_of(config) as log, asyncio.TaskGroup() as tasks:
            from schemas import topics

            reading = [
                tasks.create_task(self._read(log, one)) for one in (topics.POLICIES, topics.EVALS, topics.REPORTS)
            ]
            await self.begins.wait()
            waiting.reschedule(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.arrives.wait(), limit_s)
            for one in reading:
                one.cancel()
        return self.looked

    async def _read(self, log: "Log", topic: "Topic") -> None:
        async for message in log.read_all(topic, until_end=False):
            self.take(message.value)

    def take(self, record: object) -> None:
        """One record of the log."""
        from schemas import EvalResult, PolicyEvent, Progress

        if isinstance(record, PolicyEvent) and record.event == "published" and record.version == 1:
            self._begin = (time.perf_counter(), cpu_s(self._pid))
            self.begins.set()
        elif isinstance(record, Progress) and record.role == "train":
            self.looked.reward = record.gauges.get("reward_mean", self.looked.reward)
        elif isinstance(record, EvalResult) and record.suite == self._suite and record.version > 0:
            self._look(record.version, record.accuracy)

    def _look(self, version: int, accuracy: float) -> None:
        looked = self.looked
        looked.begun = accuracy if version == 1 else looked.begun
        looked.step, looked.accuracy = version - 1, accuracy
        looked.wall_s, looked.cpu_s = time.perf_counter() - self._begin[0], cpu_s(self._pid) - self._begin[1]
        if accuracy >= self._at:
            self.arrives.set()


async def go_on(folder: Path, engine: str, control: str, seed: int, minutes: float) -> int:
    """The demo in a folder that holds the model."""
    from infra.cli.demo.demo import run_demo
    from infra.cli.demo.settings import DemoOptions

    return await run_demo(
        DemoOptions(directory=folder, engine=engine, control=control, seed=seed, minutes=minutes, sets=WARM, quiet=True)
    )


if __name__ == "__main__":
    _folder, _engine, _control, _seed, _minutes = sys.argv[1:]
    sys.exit(asyncio.run(go_on(Path(_folder), _engine, _control, int(_seed), float(_minutes))))
