"""The master: issues groups as fast as the trainer uses them, reissues unfinished groups, and requests evals.

    taskset ─────┐                            ┌──> tasks      groups, re-issues, eval tasks
    progress ────┤                            │
    reports ─────┤ follow ─> Plan ── decide ─>┼──> evals      results
    policies ────┤  (state)    │              │
    evals ───────┘             v              └──> reports    report, every few seconds
                     Snapshots (store)

    consumes        taskset, progress, reports, policies, evals, tasks (issued under other leases)
    produces        tasks, evals (results), policies (its lease, decisions of the gate), reports
    waits for       room for a group: fewer outstanding than the bound on age allows
    unblocked by    a drawn or dropped group in progress; a version or a directive in policies; a report
    durable first   the lease before the count of issued groups; a decision before the next; both before a snapshot

It waits only for the log: each batch of records wakes the loop that decides. Delivery: the broker confirms issued records
before the next decision. A restart continues from a snapshot (`actors.master.snapshot`) or recounts the log, so no attempt is
issued twice and no result is published twice. A second master takes the lease and the first master ends; groups that it still
issues meanwhile have their own attempt numbers, never the same ids with other content.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from actors.config import MasterConfig
from actors.master.plan import ATTEMPTS_PER_LEASE, NOTHING, Decisions, Plan
from actors.master.snapshot import Places, Snapshots
from infra.log.blob_prune import prune_frames
from infra.log.blobs import epoch_day
from infra.log.log import Log, LogMessage, follow, lately, readable
from infra.observe.alarms import raised
from infra.observe.metrics import Metrics
from infra.observe.release import full_release
from infra.roles.role import Role, run_until
from infra.settings.config import duration_s
from schemas import Block, Closure, Directive, Drawn, EvalResult, Issued, MasterState, PolicyEvent, Progress, Task
from schemas.errors import BrokerUnavailable, OffsetOutOfRange, StoreError, UnknownMajor
from schemas.fields import CANARY_MISSING
from schemas.topics import EVALS, POLICIES, PROGRESS, REPORTS, TASKS, TASKSET

_log = logging.getLogger(__name__)

PRUNE_EVERY_S = 3600.0


async def run_master(role: Role, config: MasterConfig, *, finish: asyncio.Event | None = None) -> None:
    """Run until the role is stopped. Raises FencedOut when another master takes the lease.

    `finish` ends issuing as the stop rule does: drain, last evals, then state "done"."""
    log, metrics, floor = role.log, role.metrics, role.floor
    # First the lease, then the count: so it includes the tasks that the previous master issued until then.
    lease = await log.publish(POLICIES, Directive(order="lease", owner=role.instance))
    policy, clock = floor.policy.name, asyncio.get_running_loop().time
    snapshots = Snapshots(log, role.store, metrics, app=floor.app, every_s=config.snapshot_s, clock=clock)
    plan, places = await snapshots.restored(
        lambda: Plan(config, floor.pacing, policy=policy, token=lease.offset), policy
    )
    starts = {**places, TASKS.name: await _recount(log, plan, metrics, places.get(TASKS.name))}
    starts[REPORTS.name] = later(await lately(log), places.get(REPORTS.name, {}))
    decide = _decide(log, plan, metrics, finish, starts, lambda at: snapshots.take(plan, policy, at))
    report = _report(role, plan, config.report_s)
    prune = _prune(log, int(duration_s(floor.keep.replay) * 1000))
    await run_until(role.stop, decide, report, snapshots.write(), prune)
    if plan.state != "done":
        await _tell(role, plan, "stopped")


def later(offsets: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    """Merge two offset maps, keeping the larger offset of each partition."""
    return {partition: max(offset, other.get(partition, 0)) for partition, offset in offsets.items()}


async def _recount(log: Log, plan: Plan, metrics: Metrics, since: Mapping[int, int] | None) -> Mapping[int, int]:
    """Count everything issued, ever or since a snapshot; returns the end offsets of `tasks`."""
    begins, ends = await log.bounds(TASKS)
    since_ = None if since is None else {part: since.get(part, begin) for part, begin in begins.items()}
    issued: list[Issued] = []
    async for message in log.scan(TASKS, since_ or "beginning", ends):
        if readable(message, TASKS, metrics) and isinstance(message.value, Task) and message.value.issued is not None:
            if since_ is None:
                plan.issued(message.value.issued)
            else:
                issued.append(message.value.issued)
            plan.tick(message.timestamp_ms)
    plan.issued_since(issued)
    _log.info("recounted next_sequence=%d", plan.admission.next_sequence)
    return ends


async def _decide(
    log: Log,
    plan: Plan,
    metrics: Metrics,
    finish: asyncio.Event | None,
    starts: Places,
    settled: Callable[[Places], None],
) -> None:
    """Read all past records from `starts`, then decide after every change. settled: called with the end of the counted records
    when all decisions are in the log.
    """
    wake = asyncio.Event()
    caught_up: list[asyncio.Event] = []
    places = {topic: dict(at) for topic, at in starts.items()}
    partitions = itertools.cycle(sorted(starts[TASKS.name]))

    def apply(message: LogMessage) -> None:
        take_in(plan, metrics, message)

    def read(topic: str, at: dict[int, int]) -> None:
        places.setdefault(topic, {}).update(at)
        wake.set()

    async with asyncio.TaskGroup() as followers:
        for topic in (TASKSET, POLICIES, EVALS, PROGRESS, REPORTS, TASKS):
            caught_up.append(asyncio.Event())
            loop = follow(
                log, topic, apply, metrics=metrics, caught_up=caught_up[-1], changed=partial(read, topic.name),
                starts=starts.get(topic.name, "beginning"),
            )  # fmt: skip
            followers.create_task(loop)
        for event in caught_up:
            await event.wait()
        plan.caught_up()
        while True:
            if finish is not None and finish.is_set():
                plan.finish()
            await _act(log, plan, metrics, partitions)
            settled({name: at for name, at in places.items() if name != TASKSET.name})
            await wake.wait()
            wake.clear()


def take_in(plan: Plan, metrics: Metrics, message: LogMessage) -> None:
    """Pass a record of any topic to the plan."""
    plan.tick(message.timestamp_ms)
    record = message.value
    if isinstance(record, Task) and record.issued is not None:
        if record.issued.attempt // ATTEMPTS_PER_LEASE != plan.token:  # our own were counted when they were decided
            plan.issued_since([record.issued])
    elif isinstance(record, Task):
        plan.task(record)
    elif isinstance(record, Closure):
        plan.closure(record, message.timestamp_ms)
        metrics.counter("closures_read", outcome=record.outcome, reason=record.reason).inc()
    elif isinstance(record, Drawn):
        plan.drawn(record)
    elif isinstance(record, Progress):
        plan.progress(record, message.timestamp_ms)
    elif isinstance(record, PolicyEvent):
        plan.policy(record, message.offset, message.timestamp_ms)
    elif isinstance(record, Directive):
        plan.directive(record, message.offset)
    elif isinstance(record, EvalResult):
        plan.result(record)
    elif isinstance(record, Block):
        for experience in record.experiences:
            plan.evals.scored(experience)


async def _act(log: Log, plan: Plan, metrics: Metrics, partitions: Iterator[int]) -> None:
    """Publish decisions until there are no more. They count at once: an answer may arrive before the last confirmation.

    partitions: of `tasks`, in turn, so that explorers get equal numbers of groups.
    """
    while (decisions := plan.decide()) != NOTHING:
        plan.apply(decisions)
        await _publish(log, metrics, decisions, partitions)


async def _publish(log: Log, metrics: Metrics, decisions: Decisions, partitions: Iterator[int]) -> None:
    for result in decisions.results:
        await log.publish(EVALS, result)
        metrics.gauge("accuracy", suite=result.suite).set(result.accuracy)
        correct = f"{result.num_correct}/{result.num_tasks * result.num_samples}"
        _log.info("eval suite=%s version=%d correct=%s", result.suite, result.version, correct)
    for event in decisions.channels:
        await log.publish(POLICIES, event)
        metrics.counter("gate_decisions", owner=event.owner, event=event.event).inc()
        level = logging.WARNING if event.event == "rolled_back" else logging.INFO
        words = (event.event, event.channel, event.version, event.owner, event.reason)
        _log.log(level, "channel %s channel=%s version=%d owner=%s reason=%s", *words)
    for kind, tasks in decisions.tasks.items():
        if tasks:
            await log.publish_all(TASKS, tasks, [next(partitions) for _ in tasks])
            metrics.counter("issued", kind=kind).inc(len(tasks))


async def _prune(log: Log, keep_ms: int) -> None:
    """Remove unclaimed large frames every PRUNE_EVERY_S; a failure is retried the next time."""
    while True:
        await asyncio.sleep(PRUNE_EVERY_S)
        try:
            await prune_frames(log, today=epoch_day(time.time()), keep_ms=keep_ms)
        except (BrokerUnavailable, StoreError, OffsetOutOfRange, UnknownMajor) as error:
            _log.warning("frames_not_pruned error=%s", error)


async def _report(role: Role, plan: Plan, every_s: float) -> None:
    metrics = role.metrics
    while True:
        if plan.look_for_canary():
            _log.warning("canary_missing trial=%d", plan.gate.stable.trial)
        metrics.gauge(CANARY_MISSING).set(plan.canary.missing_s)
        await _tell(role, plan, plan.state)
        await asyncio.sleep(every_s)


async def _tell(role: Role, plan: Plan, state: str) -> None:
    metrics, admission = role.metrics, plan.admission
    phase = MasterState(state=plan.state, outstanding=len(admission.outstanding), drained_to=plan.drain_offset)
    metrics.gauge("outstanding_groups").set(phase.outstanding)
    metrics.gauge("max_outstanding_groups").set(admission.limits.max_outstanding)
    metrics.gauge("issued_groups").set(admission.next_sequence)
    metrics.gauge("stable_version").set(plan.gate.stable.version)
    metrics.gauge("trial_version").set(plan.gate.stable.trial)
    alarms = tuple(plan.gate.alarms())
    for name, is_raised in raised(alarms).items():
        metrics.gauge("alarm_raised", alarm=name).set(is_raised)
    metrics.gauge("tasks").set(len(plan.book.tasks))
    metrics.gauge("evals_missed").set(sum(request.missed for request in plan.evals.requests.values()))
    progress = Progress(
        role="master",
        instance=role.instance,
        version=plan.feed.newest,
        counters=metrics.counters(),
        gauges=metrics.gauges(),
        state=state,
        life="ended" if state in ("stopped", "done") else "working",
        master=phase,
        alarms=alarms,
        release=full_release(),
    )
    await role.log.publish(REPORTS, progress)
