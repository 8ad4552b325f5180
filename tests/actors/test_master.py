"""The master on the memory log, with explorers on the scripted engine and a stand-in for streams and trainer."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.config import StopRule
from actors.engines.scripted import ScriptedEngine
from actors.master.plan import Plan
from actors.master.snapshot import (
    STATE,
    SnapshotFacts,
    Snapshots,
    Unfit,
    packed,
    put_back,
    require_reach,
    restore,
    series,
    shaping,
)
from actors.rollout.scheduler import require_issued
from infra.log.bus import Partition, Reader
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from infra.store.snapshots import FOLDER, SnapshotManifest, save
from infra.store.store import Store
from schemas import Closure, Directive, Drawn, Issued, Progress, Task
from schemas.errors import StoreError
from schemas.topics import EXPERIENCES, POLICIES, PROGRESS, REPORTS, TASKS
from tests.actors.master_life import CONFIG, METRICS, TOKEN, MasterLife, issued_in, new_plan
from tests.actors.rig import (
    MASTER,
    PACING,
    TopicArrivals,
    explorer,
    folder_store,
    load,
    master,
    memory_log,
    running,
    streams,
    until,
)
from tests.actors.test_explorer import announce, listening
from tests.simulator.virtual_loop import run_virtual


def issues_heard(heard: TopicArrivals) -> list[Issued]:
    return sorted((require_issued(task) for task in heard.of(Task)), key=lambda item: (item.sequence, item.attempt))


async def train(log: Log, store: Store, *, steps: int) -> dict[int, int]:
    """Draw full steps in issue order, publish a version after each; returns the staleness of what each step drew."""
    versions: dict[str, list[int]] = {}
    buffered: dict[int, str] = {}
    oldest: dict[int, int] = {}
    experiences, progress = TopicArrivals(log, EXPERIENCES), TopicArrivals(log, PROGRESS)
    async with running(*listening(experiences, progress)):
        for step in range(steps):
            size = PACING.groups_per_step

            def ready() -> bool:
                for closure in progress.of(Closure):
                    if closure.outcome == "buffered":
                        buffered[closure.sequence] = closure.group
                due = range(step * size, (step + 1) * size)  # noqa: B023
                return all(sequence in buffered for sequence in due)

            await until(ready)
            due = [buffered[sequence] for sequence in range(step * size, (step + 1) * size)]
            versions = {
                group: [experience.min_version for experience in experiences.experiences if experience.group == group]
                for group in due
            }
            oldest[step] = max(step - min(found) for found in versions.values())
            await log.publish(PROGRESS, Drawn(token=0, step=step, version=step, groups=tuple(due)))
            await announce(log, store, step + 1)
    return oldest


@pytest.mark.virtual
async def test_master_explorers_and_a_trainer_turn_within_the_staleness_bound(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log()
    await load(log)
    tasks, heard = TopicArrivals(log, TASKS), TopicArrivals(log, EXPERIENCES)
    first, second = explorer(log, store, ScriptedEngine()), explorer(log, store, ScriptedEngine())
    roles = (master(log), first, second, asyncio.create_task(streams(log)))
    async with running(*roles, *listening(tasks, heard)):
        oldest = await train(log, store, steps=12)
    places = Counter([message.partition async for message in log.scan(TASKS)])
    assert len(places) == 2 and max(places.values()) - min(places.values()) <= 1, "explorers get as many groups"
    issued, experiences = issues_heard(tasks), heard.experiences
    assert max(oldest.values()) <= PACING.max_staleness
    assert len({issue.group for issue in issued}) == len(issued)
    assert [issue.sequence for issue in issued] == list(range(len(issued)))
    assert len({experience.id for experience in experiences}) == len(experiences)


@pytest.mark.virtual
async def test_what_a_killed_explorer_held_is_issued_again_with_other_ids(tmp_path: Path) -> None:
    store = folder_store(tmp_path)
    log = await memory_log()
    await load(log)
    tasks, heard = TopicArrivals(log, TASKS), TopicArrivals(log, EXPERIENCES)
    stuck = ScriptedEngine(token_s=30.0)
    async with running(master(log), asyncio.create_task(streams(log)), *listening(tasks, heard)):
        async with running(explorer(log, store, stuck)):
            await until(lambda: stuck.num_running == 4 * MASTER.num_episodes)
        async with running(explorer(log, store, ScriptedEngine())):
            await until(lambda: len({experience.group for experience in heard.experiences}) == 4)
            await until(lambda: len(heard.experiences) == 4 * MASTER.num_episodes)
    issued = issues_heard(tasks)
    assert {experience.attempt for experience in heard.experiences} == {1}
    for sequence in range(4):
        attempts = [issue for issue in issued if issue.sequence == sequence]
        assert [attempt.attempt for attempt in attempts] == [0, 1]
        assert len({attempt.group for attempt in attempts}) == 1


WHEN = {  # moments of reading, which differ by what else had been read by then
    "running_ms", "_moved_ms", "_task_ms", "_trial_ms", "_stable_ms", "_early",
}  # fmt: skip
SETS = {"_gone", "_required", "words"}


def state_of(plan: Plan) -> dict[str, object]:
    found: dict[str, object] = msgspec.msgpack.decode(packed(plan), strict=False)
    return without(found)


def without(found: dict[str, object]) -> dict[str, object]:
    if "attempts" in found and (found["missed"] or found["result"]):
        return {"missed": found["missed"]}  # a request that has ended
    return {name: plain(name, value) for name, value in found.items() if name not in WHEN}


def plain(name: object, value: object) -> object:
    """Without the order of sets."""
    if isinstance(value, dict):
        return without(value)
    return sorted(value) if name in SETS and isinstance(value, list) else value


def from_snapshot(life: MasterLife, data: bytes, at: dict[str, int], token: int) -> Plan:
    """A master that begins with the state and reads each topic from its place on, `tasks` first."""
    plan = new_plan(token)
    put_back(plan, data)
    plan.put_back()
    tasks = life.topics[TASKS.name][at[TASKS.name] :]
    plan.issued_since([issued_in(message) for message in tasks])
    for message in tasks:
        plan.tick(message.timestamp_ms)
    left = {id(message) for name, stored in life.topics.items() for message in stored[at[name] :]}
    life.give(plan, [item for item in life.order if id(item) in left or item.record.topic == "taskset"])
    return plan


@settings(max_examples=40, deadline=None)
@given(
    happened=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 10**6)), min_size=20, max_size=160),
    share=st.floats(0.0, 1.0),
    late=st.integers(0, 4),
)
def test_a_master_from_a_snapshot_decides_as_one_that_read_everything(
    happened: list[tuple[int, int]], share: float, late: int
) -> None:
    life = MasterLife()
    cut = int(share * len(happened))
    for what, number in happened[:cut]:
        life.happen(what, number)
    data = packed(life.plan)
    # Its own tasks may not have been read back yet: `late` of them are read once more.
    at = {name: len(stored) for name, stored in life.topics.items()}
    at[TASKS.name] = max(0, at[TASKS.name] - late)
    for what, number in happened[cut:]:
        life.happen(what, number)
    life.now_ms += 120_000
    life.write(REPORTS, Progress(role="master", instance="m"))
    token = TOKEN + len(life.topics["policies"])
    read, begun = life.read_anew(token), from_snapshot(life, data, at, token)
    assert state_of(begun) == state_of(read)
    assert begun.decide() == read.decide()
    assert begun.state == read.state


def stored(plan: Plan, state: bytes | None = None) -> tuple[MemoryStore, SnapshotManifest]:
    store, facts = MemoryStore(), SnapshotFacts(shaping(CONFIG, "main"), "9f", {"tasks": {0: 3}})
    data = packed(plan) if state is None else state
    return store, save(store, series("test"), 1, [(STATE, data)], msgspec.to_builtins(facts))


def test_a_snapshot_that_is_not_whole_or_of_others_is_refused_in_a_line_that_says_which() -> None:
    life = MasterLife()
    store, snapshot = stored(life.plan)
    assert restore(store, snapshot, new_plan(), "main", "9f") == {"tasks": {0: 3}}
    for policy, log, why in (("main", "3a", "of the log 9f, this is 3a"), ("other", "9f", "have changed since")):
        with pytest.raises(Unfit, match=why):
            restore(store, snapshot, new_plan(), policy, log)
    store, snapshot = stored(life.plan, packed(life.plan)[:-20])
    with pytest.raises(Unfit, match="not read"):
        restore(store, snapshot, new_plan(), "main", "9f")
    with pytest.raises(Unfit, match="not read"):
        restore(store, replace(snapshot, about={}), new_plan(), "main", "9f")
    store.put(snapshot.parts[STATE].key, b"other")
    with pytest.raises(Unfit, match="not read"):
        restore(store, snapshot, new_plan(), "main", "9f")


def test_a_snapshot_fits_another_length_of_the_run_and_no_other_result_that_ends_it() -> None:
    longer, sooner = StopRule(after="9h", groups=900, versions=90), StopRule(suite="dev", at=0.5)
    assert shaping(replace(CONFIG, stop=longer), "main") == shaping(CONFIG, "main")
    assert shaping(replace(CONFIG, stop=sooner), "main") != shaping(CONFIG, "main")


@pytest.mark.parametrize(
    ("places", "fits"), [({0: 5}, True), ({0: 9}, True), ({0: 4}, False), ({0: 10}, False), ({}, False)]
)
def test_the_log_must_hold_all_that_lies_behind_a_snapshot(places: dict[int, int], fits: bool) -> None:
    bounds = {"progress": ({0: 5}, {0: 9})}
    if fits:
        require_reach({"progress": places}, bounds)
    else:
        with pytest.raises(Unfit, match="the log holds 5 to 9"):
            require_reach({"progress": places}, bounds)


class TellingBus(MemoryBus):
    """The shared bus as a process sees it that tells where its readers began."""

    def __init__(self, shared: Log) -> None:
        super().__init__()
        self.__dict__.update(shared.bus.__dict__)
        self.begun: dict[str, int] = {}

    async def assigned(
        self, starts: Mapping[Partition, int], *, group: str | None = None, fetch_bytes: int = 0
    ) -> Reader:
        for at, offset in starts.items():
            name = at.topic.partition(".")[2]
            self.begun[name] = max(offset, self.begun.get(name, 0))
        return await super().assigned(starts, group=group, fetch_bytes=fetch_bytes)


def snapshots_in(store: Store) -> list[str]:
    return list(store.keys(f"{FOLDER}/{series('test')}/manifests/"))


OFTEN = replace(MASTER, snapshot_s=0.2)


@pytest.mark.virtual
async def test_a_master_on_another_machine_reads_on_from_the_snapshot_and_issues_what_comes_next() -> None:
    store, log = MemoryStore(), await memory_log()
    await load(log)
    tasks, progress, reports = TopicArrivals(log, TASKS), TopicArrivals(log, PROGRESS), TopicArrivals(log, REPORTS)
    listening = [asyncio.create_task(item.listen()) for item in (tasks, progress, reports)]
    roles = (explorer(log, store, ScriptedEngine()), asyncio.create_task(streams(log)))
    async with running(*roles, *listening):
        async with running(master(log, OFTEN, store=store)):
            await until(lambda: len(progress.of(Closure)) == 4)
            await until(lambda: bool(snapshots_in(store)))
            first, number = snapshots_in(store)[-1], len(reports.records)
            await until(lambda: len(reports.records) > number + 10 and snapshots_in(store)[-1] > first)
        names = [item.group for item in sorted(progress.of(Closure), key=lambda closure: closure.sequence)]
        await log.publish(PROGRESS, Drawn(token=0, step=0, version=0, groups=tuple(names[:2])))
        bus = TellingBus(log)
        async with running(master(Log(bus, log.app), OFTEN, store=store)):
            await until(lambda: len(tasks.of(Task)) == 6)
    issued, begun = [require_issued(task) for task in tasks.of(Task)], bus.begun
    assert sorted(issue.sequence for issue in issued) == list(range(6))
    assert begun["progress"] >= 4 and begun["tasks"] > 0 and begun["taskset"] == 0
    assert len(snapshots_in(store)) <= 3, "old ones are removed: two stay, and a third while it is written"


def test_a_master_whose_snapshots_are_damaged_or_cannot_be_read_counts_the_whole_log() -> None:
    async def run(damage: Callable[[MemoryStore], Store]) -> list[Issued]:
        store, log = MemoryStore(), await memory_log()
        await load(log)
        tasks, reports = TopicArrivals(log, TASKS), TopicArrivals(log, REPORTS)
        listening = [asyncio.create_task(item.listen()) for item in (tasks, reports)]
        async with running(*listening):
            async with running(master(log, OFTEN, store=store)):
                await until(lambda: bool(snapshots_in(store)) and len(tasks.records) == 4)
            number = len(reports.records)
            async with running(master(log, OFTEN, store=damage(store))):
                await until(lambda: len(reports.records) > number + 10)
        return [require_issued(task) for task in tasks.of(Task)]

    def cut(store: MemoryStore) -> Store:
        for key in snapshots_in(store):
            store.put(key, store.get(key)[:-1])
        return store

    for damage in (cut, lambda store: DeadStore()):
        assert sorted(item.sequence for item in run_virtual(run(damage))) == list(range(4))


class DeadStore(MemoryStore):
    """A store that does not answer."""

    def keys(self, prefix: str) -> Iterator[str]:
        raise StoreError("no answer")

    def put(self, key: str, data: bytes) -> None:
        raise StoreError("no answer")


async def test_a_state_that_was_taken_while_a_later_master_may_have_issued_is_thrown_away() -> None:
    store, log = MemoryStore(), await memory_log()
    made = Snapshots(log, store, METRICS, app="test", every_s=0.0, clock=lambda: 0.0)
    writing = asyncio.create_task(made.write())
    await log.publish(POLICIES, Directive(order="lease", owner="later"))
    made.take(new_plan(), "main", {"policies": {0: 0}})
    for _ in range(50):
        await asyncio.sleep(0)
    assert not snapshots_in(store)
    made.take(new_plan(), "main", {"policies": {0: 1}})
    await until(lambda: bool(snapshots_in(store)))
    writing.cancel()
    assert len(snapshots_in(store)) == 1
