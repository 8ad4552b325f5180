"""After the drain: every snapshot that a master made, read on from its place, against a reading of the whole log."""

import hashlib
from collections.abc import Container
from typing import Any

from actors.master.evaluation import parse_eval_group
from actors.master.master import take_in
from actors.master.plan import Plan
from actors.master.snapshot import Unfit, restore, series
from infra.log.log import LogMessage
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.snapshots import candidates
from schemas import Block, Closure, Task, topics
from schemas.fields import VERSION_PASSED
from schemas.topics import topic_name
from tests.simulator.scenario import APP
from tests.simulator.world import World

Logged = dict[str, list[tuple[Any, Any]]]
FOLLOWED = (topics.TASKSET, topics.POLICIES, topics.EVALS, topics.PROGRESS, topics.REPORTS)
METRICS = Metrics("settlement")
WHOLE = "a snapshot is whole"


def settle_snapshots(world: World, log: Logged) -> None:
    """Complain about each from which a master would decide otherwise."""
    if not world.watch.snapshots:
        return
    begun = _begun(world)
    raced = raced_evals(log)
    told = facts(_read(_plan(world), log, {}), raced)
    store = MemoryStore()
    for key, data in world.watch.snapshots.items():
        store.put(key, data)
    for snapshot in candidates(store, series(APP), lambda reason, line: world.watch.complain(WHOLE, line)):
        key, plan = snapshot.key, _plan(world)
        try:
            places = restore(store, snapshot, plan, world.scenario.floor.policy.name, begun)
        except Unfit as error:
            world.watch.complain(WHOLE, f"{key}: {error}")
            continue
        found = facts(_read(plan, log, places), raced)
        for name, value in found.items():
            if value != told[name]:
                world.watch.complain(
                    "a master from a snapshot decides as one that read everything",
                    f"{key}: {name}: {value}, in the log {told[name]}",
                )


def raced_evals(log: Logged) -> set[tuple[str, int]]:
    """Evals of which a task has an answer and was refused as well, the one in one topic and the other in another: whichever a
    master reads first decides.
    """
    refused = {
        value.group
        for _, value in log[topics.PROGRESS.name]
        if isinstance(value, Closure) and value.reason == VERSION_PASSED
    }
    answered = {value.group for _, value in log[topics.EVALS.name] if isinstance(value, Block)}
    return {(found[0], found[1]) for group in refused & answered if (found := parse_eval_group(group)) is not None}


def facts(plan: Plan, raced: Container[tuple[str, int]] = ()) -> dict[str, object]:
    """What its decisions rest on. raced: evals that are left out."""
    requests = plan.evals.requests
    return {
        "outstanding": {name: (one.attempt, one.buffered) for name, one in sorted(plan.admission.outstanding.items())},
        "next number": plan.admission.next_sequence,
        "pacing": (plan.admission.version, plan.admission.steps_at_version),
        "rounds": {task: plan.book.next_round(task) for task in sorted(plan.book.tasks)},
        "evals": {
            key: (one.missed, one.result, one.answers)
            for key, one in sorted(requests.items())
            if key not in raced and (one.attempts or not one.open)
        },
        "channel": plan.gate.stable,
        "newest": plan.feed.newest,
        "paused": (plan.paused, plan.drained_by, plan.drain_offset),
    }


def _plan(world: World) -> Plan:
    scenario, newest = world.scenario, 10**6
    return Plan(scenario.master, scenario.floor.pacing, policy=scenario.floor.policy.name, token=newest)


def _read(plan: Plan, log: Logged, places: Any) -> Plan:
    """`tasks` first and then the others, as `run_master` does."""
    issued = []
    for record, value in log[topics.TASKS.name]:
        if isinstance(value, Task) and value.issued and record.offset >= _at(places, topics.TASKS, record):
            plan.tick(record.timestamp_ms)
            issued.append(value.issued)
    if places:
        plan.issued_since(issued)
    else:
        for one in issued:
            plan.issued(one)
    left = [
        (record, value)
        for topic in FOLLOWED
        for record, value in log[topic.name]
        if topic is topics.TASKSET or record.offset >= _at(places, topic, record)
    ]
    for record, value in sorted(left, key=lambda one: one[0].timestamp_ms):
        if not isinstance(value, bytes):
            take_in(plan, METRICS, LogMessage(record, value=value))
    plan.caught_up()
    return plan


def _at(places: Any, topic: topics.Topic, record: Any) -> int:
    return int(places.get(topic.name, {}).get(record.partition, 0))


def _begun(world: World) -> str:
    first = world.records(topics.POLICIES)[0]
    assert first.topic == topic_name(APP, topics.POLICIES)
    return hashlib.blake2b(b"%d:" % first.timestamp_ms + first.value, digest_size=16).hexdigest()
