"""Cost of a crash: seconds of trajectories lost or sampled again, and seconds until the loop learns from new tasks.

The unit is that of verl's RFC #7579. `tests.e2e.crash_loop` kills each role once at each interval between checkpoints; the log
gives the rest. A trajectory's seconds count from the record that issued its group to its own record, by the broker's clock.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from infra.cli.connect import connected
from infra.cli.settings import load_settings
from infra.local.broker import EmbeddedKafka
from schemas import Batch, Block, Progress, Saved, Task, topics
from tests.bench.report import Row
from tests.e2e.crash_loop import Shot, crash_loop, lost

KILLED = {"": "nobody", "master": "master", "process": "stream worker", "explore": "explorer", "train": "trainer"}
STEP = (r"^groups_per_step = \d+", "groups_per_step = 8")  # a quarter of the demo's, so that an interval is soon over


def run(intervals: str = "1,5,20,80", pause_s: float = 10.0, seed: int = 0) -> Iterator[Row]:
    """intervals: steps between checkpoints. pause_s: recovery to next kill. seed: seed of model, tasks and draws."""
    kills = [each for role in KILLED if role for each in (Shot(role, pause_s, 0.0), Shot("", 0.0, 0.0))]
    shots = [Shot("", pause_s, 0.0), *kills, Shot("", pause_s, 0.0)]
    for every in intervals.split(","):
        with tempfile.TemporaryDirectory(prefix="hr-crash-") as name:
            folder, changes = Path(name) / "run", (STEP, (r"^checkpoint_every = .*", f"checkpoint_every = {every}"))
            found = asyncio.run(crash_loop(folder, shots, seed=seed, minutes=60.0, changes=changes, replays=False))
            if found["lost"] or found["pending"] or not found["audit_clean"]:
                raise RuntimeError(f"crash: a promise is broken: {found}")
            with EmbeddedKafka(folder / "kafka") as broker:
                history = asyncio.run(read(folder, broker.bootstrap))
        first, *fired = found["fired"]  # type: ignore[misc]
        for (role, at_s), (_, end_s) in pairwise([first, *(each for each in fired if each[0]), fired[-1]]):
            yield from history.rows(f"interval {every}, {KILLED[role]}", role, at_s, end_s)
        yield Row(f"trained twice, interval {every}", float(str(found["trained_twice"])), "trajectories", low=0, high=0)
        yield Row(f"mean of a trajectory, interval {every}", fmean(history.seconds.values()), "s")
        yield Row(
            f"journal, of a step, interval {every}", 1e3 * sum(history.journal_s.values()) / len(history.steps), "ms"
        )


class History:
    """Times of a run, in seconds of the epoch. issued: groups. stored: trajectories, and whether again. seconds: they took."""

    def __init__(self) -> None:
        self.issued: dict[str, float] = {}
        self.stored: list[tuple[float, str, bool]] = []
        self.seconds: dict[str, float] = {}
        self.trained: dict[str, float] = {}
        self.first: dict[str, int] = {}
        self.steps: list[tuple[float, int]] = []
        self.saved: list[tuple[float, int]] = []
        self.journal_s: dict[str, float] = {}
        self.lost: set[str] = set()

    def take(self, record: object, at_s: float) -> None:
        """Take in the next record of a topic."""
        if isinstance(record, Task) and record.issued is not None:
            self.issued.setdefault(f"{record.issued.group}.{record.issued.attempt}", at_s)
        elif isinstance(record, Block):
            for each in (each for each in record.experiences if not each.suite):
                is_again = each.id in self.seconds or self.first.setdefault(each.group, each.attempt) != each.attempt
                self.stored.append((at_s, each.id, is_again))
                self.seconds.setdefault(each.id, at_s - self.issued[f"{each.group}.{each.attempt}"])
        elif isinstance(record, Batch) and record.phase == "train":
            self.steps.append((at_s, record.step))
            self.trained |= {item.id: at_s for item in record.items if item.id not in self.trained}
        elif isinstance(record, Saved):
            self.saved.append((at_s, record.step))
        elif isinstance(record, Progress) and record.role == "train":
            self.journal_s[record.instance] = record.counters.get("journal_seconds", 0.0)

    def rows(self, case: str, role: str, at_s: float, end_s: float) -> Iterator[Row]:
        """Figures of a kill; the next is at `end_s`."""
        waited = [name for stored_s, name, _ in self.stored if stored_s <= at_s < self.trained.get(name, end_s)]
        again = [name for stored_s, name, is_again in self.stored if is_again and at_s < stored_s <= end_s]
        learned = [
            when_s for name, when_s in self.trained.items() if self.issued.get(name.rsplit("-", 2)[0], 0.0) > at_s
        ]
        yield Row(f"{case}: in the buffer", sum(self.seconds[name] for name in waited if name in self.trained), "s")
        yield Row(f"{case}: lost", sum(self.seconds[name] for name in waited if name in self.lost), "s", low=0, high=0)
        yield Row(f"{case}: sampled again", sum(self.seconds[name] for name in again), "s")
        if role == "train":
            step, saved = (
                max(number for when_s, number in each if when_s <= at_s) for each in (self.steps, self.saved)
            )
            yield Row(f"{case}: steps done again", step - saved)
        yield Row(f"{case}: learns again after", min(learned) - at_s, "s")


async def read(folder: Path, bootstrap: str) -> History:
    history, acknowledged = History(), set((folder / "acknowledged.txt").read_text().split())
    settings = load_settings(folder / "headrace.toml", [f"kafka.bootstrap_servers={bootstrap}"])
    async with connected(settings) as log:
        history.lost = await lost(log, acknowledged)
        for topic in (topics.TASKS, topics.EXPERIENCES, topics.BATCHES, topics.REPORTS):
            async for message in log.scan(topic):
                history.take(message.value, message.timestamp_ms / 1000)
    return history
