"""Two masters, or two workers where one was meant, are harmless: nothing is lost, doubled or given two contents."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from actors.master.plan import ATTEMPTS_PER_LEASE, Plan
from actors.rollout.scheduler import require_issued
from infra.ledger.account import drain
from infra.log.bus import Partition, Reader, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from schemas import Block, Closure, Directive, PolicyEvent, Progress, Task
from schemas.errors import FencedOut
from schemas.topics import BUFFER, EXPERIENCES, PROGRESS, REPORTS, TASKS, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.rules import Rules
from tests.actors.rig import MASTER, TopicArrivals, load, master, memory_log, reissues, rollouts, running, task, until
from tests.infra.ledger.whole_loop import PACING, trained_steps, whole_loop
from tests.streams.collect.collecting import answer, block
from tests.streams.deliveries import memory_log as app_log
from tests.streams.deliveries import stored, values
from trainer.buffer.buffer import Buffer


class DeafReader:
    """Reads of `policies` that bring nothing once `deaf` is set: a process that was stopped before it could look."""

    def __init__(self, reader: Reader, deaf: asyncio.Event) -> None:
        self._reader = reader
        self._deaf = deaf

    async def get_many(self, *, timeout_s: float, max_records: int = 500) -> list[Record]:
        records = [] if self._deaf.is_set() else await self._reader.get_many(timeout_s=0.05, max_records=max_records)
        if self._deaf.is_set():
            await asyncio.sleep(timeout_s)
            return []
        return records

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)


class DeafBus(MemoryBus):
    """The shared bus as a process sees it that hears nothing from `policies` any more."""

    def __init__(self, shared: Log) -> None:
        super().__init__()
        self.__dict__.update(shared.bus.__dict__)
        self.deaf = asyncio.Event()

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        reader = await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)
        is_policies = any(partition.topic.endswith(".policies") for partition in starts)
        return DeafReader(reader, self.deaf) if is_policies else reader  # type: ignore[return-value]


def test_a_second_master_takes_the_lease_and_the_first_ends() -> None:
    async def main() -> None:
        log = await memory_log()
        await load(log)
        heard = TopicArrivals(log, REPORTS)
        listening = asyncio.create_task(heard.listen())
        first = master(log)
        async with running(listening):
            await until(lambda: bool(heard.of(Progress)))
            async with running(master(log)):
                with pytest.raises(FencedOut, match="took lease"):
                    await first

    asyncio.run(main())


def plan(token: int) -> Plan:
    made = Plan(MASTER, PACING, policy="main", token=token)
    made.policy(PolicyEvent(event="published", policy="main", version=0, manifest="m"), 1)
    for index in range(4):
        made.task(task(f"task-{index}"))
    return made


def test_two_masters_never_number_an_attempt_alike() -> None:
    old, new = plan(0), plan(7)
    issued = [require_issued(one) for master in (old, new) for one in rollouts(master)]
    assert {one.group for one in issued[:2]} == {one.group for one in issued[2:]}, "they choose alike"
    for each in (old, new):
        each.admission.wait_anew(-1_000.0)
        issued += [require_issued(one) for one in reissues(each)]
    names = [(one.group, one.attempt) for one in issued]
    assert len(names) == 8 and len(set(names)) == 8


def test_a_later_lease_ends_a_master_and_an_earlier_one_does_not() -> None:
    made = plan(7)
    made.directive(Directive(order="lease", owner="before"), 3)
    made.directive(Directive(order="lease", owner="itself"), 7)
    with pytest.raises(FencedOut):
        made.directive(Directive(order="lease", owner="after"), 8)


@pytest.mark.full
def test_a_master_that_does_not_notice_its_successor_does_no_harm(tmp_path: Path) -> None:
    async def main() -> None:
        async with whole_loop(tmp_path, with_master=False) as log:
            bus = DeafBus(log)
            async with running(master(Log(bus, log.app, store=log.store), MASTER, PACING)):
                await trained_steps(log, 2)
                bus.deaf.set()
                successor = master(log, MASTER, PACING)
                await trained_steps(log, 12)
            async with running(successor):
                account = await drain(log, "test", "ann", 60.0, lambda now: None)
            leases: dict[int, list[int]] = {}
            for message in await stored(log, TASKS):
                assert isinstance(message.value, Task)
                leases.setdefault(message.partition, []).append(
                    require_issued(message.value).attempt // ATTEMPTS_PER_LEASE
                )
            assert any(one != sorted(one) for one in leases.values()), "the old one issued behind the new one"
            contents: dict[str, list[int]] = {}
            for sent in await values(log, EXPERIENCES):
                for one in sent.experiences if isinstance(sent, Block) else ():
                    assert contents.setdefault(one.id, one.tokens.tolist()) == one.tokens.tolist()
            assert account.is_clean and account.on_the_way == 0

    asyncio.run(main())


def test_two_workers_that_both_believe_in_a_partition_say_the_same_and_the_trainer_takes_it_once(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with app_log() as log:
            settings = [
                CollectSettings(tmp_path / name, Rules(deadline_ms=3_600_000, keep_ms=86_400_000), ()) for name in "ab"
            ]
            both = [Collector(log, Metrics("process"), 0, one) for one in settings]
            for collector in both:
                await collector.recover(0, lambda: False)
            for group in ("t.0", "u.0"):
                for episode in range(2):
                    await log.publish(VERIFIED, block(answer(group, episode)))
            records = [message.record for message in await stored(log, VERIFIED)]
            await asyncio.gather(*(collector.take(records) for collector in both))
            for collector in both:
                collector.close()
            ends = [one for one in await values(log, PROGRESS) if isinstance(one, Closure)]
            assert len(ends) == 4 and ends[0] in ends[1:] and len({one.group for one in ends}) == 2
            buffer = Buffer({"usual": 1})
            taken = [
                buffer.add(message.offset, message.record.value, message.value)
                for message in await stored(log, BUFFER)
                if isinstance(message.value, Block)
            ]
            assert sorted(taken) == ["", "", "duplicate", "duplicate"]

    asyncio.run(main())
