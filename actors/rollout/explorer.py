"""The explorer: runs the episodes of issued tasks on an engine, publishes the samples, and follows the policy.

    tasks ──> intake ──> Scheduler ──> dispatch ──> run_group (many) ──> experiences, drop markers, closures
             (commits)    ^ ended, reloaded          │ generate
    policies ──> PolicyFollower ───── load ──────> engine
    progress ──> groups that are over: their episodes are stopped

    consumes        tasks (as a consumer group), policies, progress
    produces        experiences, verified (markers of episodes without an answer), progress (closures of evals), reports
    waits for       an issued task; a place for its episodes; the version that it asks for
    unblocked by    a record of tasks; the end of an episode; a loaded version
    durable first   the offset of a task before its first token

Delivery: it commits an offset on receipt, before it starts the task, so a task runs at most once per attempt. It reports its
tasks; if the process dies, the reports stop, and the master issues the tasks again as another attempt. A task with a refused
commit does not start.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec

from actors.config import ExploreConfig
from actors.engines.engine import Engine
from actors.engines.reload import PolicyFollower
from actors.rollout.rollout import RolloutRuntime, give_up, pass_over, run_group
from actors.rollout.scheduler import Scheduler, groups_over
from actors.rollout.session import ChatTokenizer
from actors.rollout.workflow import Workflows
from infra.log.bus import CommitRefused, Partition, Reader
from infra.log.log import LogMessage
from infra.observe.failpoint import reach
from infra.observe.release import full_release
from infra.roles.role import Role, run_until
from infra.store.images import ImageReader
from schemas import Progress, Task
from schemas.fields import VERSION_PASSED, Life
from schemas.records import MAX_HELD
from schemas.topics import PROGRESS, REPORTS, TASKS

_log = logging.getLogger(__name__)

GROUP = "explore"
_POLL_S = 0.5
_SETTLE_S = 5.0  # of waiting for a share of the partitions; there may be none for this explorer


async def run_explorer(
    role: Role,
    config: ExploreConfig,
    engine: Engine,
    tokenizer: ChatTokenizer,
    stop_tokens: tuple[int, ...],
    *,
    started: Callable[[], None] | None = None,
) -> None:
    """Start the engine and serve until the role is stopped; running groups then get `drain_s` to finish.

    started: called once the engine has.
    """
    log = role.log
    runtime = RolloutRuntime(
        role=role,
        engine=engine,
        tokenizer=tokenizer,
        workflows=Workflows(config.workflow, config.options, config.workflows),
        config=config,
        stop_tokens=stop_tokens,
        images=ImageReader(role.store),
    )
    scheduler = Scheduler(max_episodes=config.episodes_in_flight)
    loading = Progress(role="explore", instance=role.instance, state="loading", life="starting", release=full_release())
    await log.publish(REPORTS, loading)
    await engine.start()
    if started is not None:
        started()
    try:
        follower = PolicyFollower(role, engine, gate=scheduler, hold_s=config.eval_hold_s)
        reader = await log.subscribed(TASKS, group=GROUP)
        halt = asyncio.Event()
        await run_until(
            halt,
            _take_tasks(reader, runtime, scheduler),
            _dispatch(runtime, scheduler),
            follower.read(),
            _hear(runtime, scheduler),
            follower.load(),
            _report(runtime, scheduler, follower),
            _drain(scheduler, config.drain_s, role.stop, halt),
        )
        await log.publish(REPORTS, _progress(runtime, "stopped", "ended"))
    finally:
        await engine.close()


async def _take_tasks(reader: Reader, runtime: RolloutRuntime, scheduler: Scheduler) -> None:
    clock = asyncio.get_running_loop().time
    started = clock()
    log = runtime.role.log
    ends = await log.bus.end_offsets(log.name(TASKS))
    try:
        while not runtime.role.stop.is_set():
            if len(scheduler.waiting) >= runtime.config.max_held:
                scheduler.settled.set()  # all of them may wait for a version that is not loaded before
                await scheduler.next_start()
                continue
            messages = await log.read(reader, timeout_s=_POLL_S if scheduler.settled.is_set() else 0.1)
            for message in await _committed(messages, reader):
                await _accept(message, runtime, scheduler)
            scheduler.changed.set()
            if not scheduler.settled.is_set():
                mine = reader.positions()
                read = bool(mine) and all(mine[partition] >= ends[partition] for partition in mine)
                if read or clock() - started > _SETTLE_S:
                    scheduler.settled.set()
    finally:
        await reader.close()


async def _committed(messages: Sequence[LogMessage], reader: Reader) -> list[LogMessage]:
    """Commit read messages and return them, without partitions that another explorer holds by now: that explorer reads them."""
    batches: dict[Partition, list[LogMessage]] = {}
    for message in messages:
        batches.setdefault(Partition(message.record.topic, message.partition), []).append(message)
    kept: list[LogMessage] = []
    for partition, batch in batches.items():
        try:
            reach("explore.before_commit")
            await reader.commit({partition: batch[-1].offset + 1})
            reach("explore.after_commit")
            kept += batch
        except CommitRefused as error:
            _log.info("commit_refused tasks=%d error=%s", len(batch), error)
    return kept


async def _accept(message: LogMessage, runtime: RolloutRuntime, scheduler: Scheduler) -> None:
    """Put a task on the scheduler; a record that cannot be read as one goes to the dead letters."""
    task = message.value
    if not isinstance(task, Task) or task.issued is None:
        reason = "bad frame" if message.error is not None else "not an issued task"
        runtime.role.metrics.counter("dead_letters", reason=reason).inc()
        await runtime.role.log.dead_letter(message, stage=GROUP, reason=reason)
    else:
        scheduler.waiting.add(task)


async def _dispatch(runtime: RolloutRuntime, scheduler: Scheduler) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            scheduler.changed.clear()
            version = runtime.engine.version
            if passed := scheduler.pass_over(version):
                await pass_over(passed, VERSION_PASSED, runtime.role.log)
            while (task := scheduler.take(runtime.engine.version)) is not None:
                group.create_task(_run(task, runtime, scheduler))
            await scheduler.changed.wait()


async def _run(task: Task, runtime: RolloutRuntime, scheduler: Scheduler) -> None:
    try:
        await run_group(task, runtime, scheduler.stop_for(task))
    finally:
        scheduler.end(task)


async def _hear(runtime: RolloutRuntime, scheduler: Scheduler) -> None:
    """Stop groups that are over: given up, or closed without the episodes here (another attempt was first, or time was up)."""
    log = runtime.role.log
    async with aclosing(log.tail(PROGRESS, "end")) as messages:
        async for message in messages:
            for group in groups_over(message.value):
                for task in scheduler.over(group):
                    await give_up(task, runtime)


async def _drain(scheduler: Scheduler, drain_s: float, stop: asyncio.Event, halt: asyncio.Event) -> None:
    await stop.wait()
    scheduler.closed = True
    clock = asyncio.get_running_loop().time
    deadline = clock() + drain_s
    while scheduler.num_groups and (left := deadline - clock()) > 0:
        await scheduler.next_end(left)
    if scheduler.num_groups:
        _log.warning("drain_expired groups=%d", scheduler.num_groups)
    halt.set()


async def _report(runtime: RolloutRuntime, scheduler: Scheduler, follower: PolicyFollower) -> None:
    """Report every few seconds, often enough that the master reissues no held group if a single report is lost."""
    metrics, clock = runtime.role.metrics, asyncio.get_running_loop().time
    report_every_s, reported_s = runtime.role.floor.pacing.reissue_s / 3, -math.inf
    while True:
        if busy_s := scheduler.busy_s():
            metrics.gauge("tokens_per_s").set(metrics.counters().get("tokens", 0.0) / busy_s)
        metrics.gauge("idle_share").set(scheduler.idle_share())
        metrics.gauge("episodes_in_flight").set(scheduler.num_episodes)
        metrics.gauge("tasks_waiting").set(len(scheduler.waiting))
        for name, value in follower.times.gauges().items():
            metrics.gauge(name).set(value)
        metrics.gauge("policy_version").set(runtime.engine.version)
        holds = scheduler.holds(MAX_HELD) if clock() - reported_s >= report_every_s else None
        reported_s = reported_s if holds is None else clock()
        report = msgspec.structs.replace(
            _progress(runtime, "serving", "working"), holds=holds, refused=follower.refused
        )
        await runtime.role.log.publish(REPORTS, report)
        await asyncio.sleep(runtime.config.report_s)


def _progress(runtime: RolloutRuntime, state: str, life: Life) -> Progress:
    return Progress(
        role="explore",
        instance=runtime.role.instance,
        version=runtime.engine.version,
        counters=runtime.role.metrics.counters(),
        gauges=runtime.role.metrics.gauges(),
        state=state,
        life=life,
        release=full_release(),
    )
