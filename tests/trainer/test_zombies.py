"""A trainer that stood still while another took the run over, and then went on: nothing of it counts, nothing is loaded."""

import asyncio
import random
from collections import Counter

import pytest

from infra.log.bus import Record
from infra.log.log import Log
from infra.log.memory import MemoryBus, MemoryReader
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy_feed import PolicyFeed
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from schemas import Batch, Fence, PolicyEvent, topics
from schemas.errors import FencedOut
from schemas.journal import effective
from tests.trainer.memory_run import filled_log, journal, train
from trainer.journal.checkpoint import load_newest
from trainer.learners.scripted import ScriptedLearner

CYCLES = 100


class StandStill:
    """A process stands still before or after its n-th send, until it is opened: nothing of it reads or writes meanwhile."""

    def __init__(self, stall_at: int) -> None:
        self.stalled = asyncio.Event()
        self.opened = asyncio.Event()
        self._left = stall_at

    async def reach(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.stalled.set()
            await self.opened.wait()

    async def hold(self) -> None:
        """What another task of the process does while it stands still."""
        if self.stalled.is_set():
            await self.opened.wait()


class GatedReader(MemoryReader):
    """Hears nothing while its process stands still."""

    gate: StandStill

    async def get_many(self, *, timeout_s: float, max_records: int = 500, topic: str | None = None) -> list[Record]:
        records = await super().get_many(timeout_s=timeout_s, max_records=max_records, topic=topic)
        await self.gate.hold()
        return records


class GatedBus(MemoryBus):
    """One process's way to a log that others share."""

    def __init__(self, shared: MemoryBus, gate: StandStill) -> None:
        super().__init__()
        self.__dict__.update(shared.__dict__)
        self._gate = gate

    async def assigned(self, starts, *, group=None, fetch_bytes=0):
        reader = GatedReader(self, dict(starts), group=group)
        reader.gate = self._gate
        return reader

    async def send(self, *args, **kwargs):
        await self._gate.reach()
        position = await super().send(*args, **kwargs)
        await self._gate.reach()
        return position


async def overtaken(log: Log, store: MemoryStore, stall_at: int) -> str:
    """One cycle: a trainer stands still somewhere, another trains on, the first goes on. How the first ended."""
    gate = StandStill(stall_at)
    assert isinstance(log.bus, MemoryBus)
    zombie = asyncio.create_task(train(Log(GatedBus(log.bus, gate), log.app, store=store), store, ScriptedLearner()))
    await asyncio.wait([zombie, asyncio.create_task(gate.stalled.wait())], return_when=asyncio.FIRST_COMPLETED)
    if not gate.stalled.is_set():
        await zombie
        return "ended before"
    successor = asyncio.create_task(train(log, store, ScriptedLearner()))
    ends = len(await journal(log))
    async for message in log.read_all(topics.BATCHES, until_end=False):
        if message.offset >= ends + 2:  # the successor's fence and a step, or its last checkpoint
            break
    gate.opened.set()
    try:
        await zombie
        ended = "did nothing more"
    except* FencedOut:
        ended = "fenced out"
    await successor
    return ended


async def loaded(log: Log, store: MemoryStore) -> dict[int, set[str]]:
    """Versions as a follower of the log loads them, one by one: version → contents."""
    feed, follower = PolicyFeed("main"), PolicyFetcher(store, "main")
    found: dict[int, set[str]] = {}
    lease = -1
    async for message in log.read_all(topics.POLICIES):
        event = message.value
        assert isinstance(event, PolicyEvent)
        lease = message.offset if event.event == "lease" else lease
        stale = event.event != "lease" and event.token < lease
        if feed.apply(event, message.offset):
            assert not stale, f"{event.event} v{event.version} of token {event.token} under lease {lease}"
            policy = follower.fetch(event)
            found.setdefault(event.version, set()).add(hexed(policy.tensors["weights"]))
    return found


async def stale_events(log: Log) -> int:
    """What a zombie still sent to `policies` after it had been overtaken."""
    lease, found = -1, 0
    async for message in log.read_all(topics.POLICIES):
        event = message.value
        assert isinstance(event, PolicyEvent)
        found += event.event != "lease" and event.token < lease
        lease = message.offset if event.event == "lease" else lease
    return found


def hexed(tensor: Tensor) -> str:
    return bytes(tensor.data).hex()


@pytest.mark.parametrize("seed", range(5))
def test_a_trainer_that_was_overtaken_publishes_nothing_that_is_loaded_and_journals_nothing_that_counts(
    seed: int,
) -> None:
    async def main() -> None:
        chosen = random.Random(seed)
        outcomes: Counter[str] = Counter()
        expected_store = MemoryStore()
        quiet = await filled_log(expected_store)
        await train(quiet, expected_store, ScriptedLearner())
        alone = load_newest(expected_store, "t")
        expected, expected_loaded = counted(await journal(quiet)), await loaded(quiet, expected_store)
        for _ in range(CYCLES // 5):
            store = MemoryStore()
            log = await filled_log(store)
            outcomes[await overtaken(log, store, chosen.randint(3, 90))] += 1
            # What counts is what one trainer in peace would have journaled, and every version has its content.
            assert counted(await journal(log)) == expected
            assert await loaded(log, store) == expected_loaded
            outcomes["stale events"] += await stale_events(log)
            newest = load_newest(store, "t")
            assert newest is not None and alone is not None
            assert newest.learner == alone.learner
        assert outcomes["fenced out"] >= CYCLES // 10 and outcomes["stale events"] >= 1, outcomes

    asyncio.run(main())


def counted(records: list[object]) -> list[tuple[object, ...]]:
    """Steps that count, with what they trained on."""
    entries, _ = effective([one for one in records if isinstance(one, Fence | Batch)], "t")
    batches = {one.step: tuple(item.id for item in one.items) for one in reversed(entries) if isinstance(one, Batch)}
    assert len([one for one in entries if isinstance(one, Batch)]) == len(batches), "a step counts twice"
    return sorted(batches.items())
