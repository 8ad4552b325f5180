"""The trainer: one policy learning from the buffer at its own pace, top to bottom.

    lease ─> fence the journal ─> newest verifying checkpoint ─> execute journaled batches again ─┐
     ┌────────────────────────────────────────────────────────────────────────────────────────────v──┐
     │ wait for a draw (intake wakes us) ─> JOURNAL (confirmed) ─> tell the master ─> optimizer step ─>│
     │ checkpoint when due ─> publish when due ────────────────────────────────────────────────────────│
     └───────────────────────────────────────────────────────────────────────────────────────────────┘

    consumes        buffer, policies (leases, directives), progress, reports, evals (results, for the board)
    produces        batches (the journal), progress (groups drawn and dropped), policies (versions), reports
    waits for       as many groups as a step takes, within the bound on age
    unblocked by    a block in buffer; the end of `straggler_s` of a missing group; the drain at the end of a run
    durable first   a batch before its step; a checkpoint before the version due with it; weights before their event

Guarantees: a batch is journaled before its step; a checkpoint is written before the version that falls due with it is
published; a killed trainer continues with the same batches, in one process on one model of CPU to the same bits. It waits for
explorers only when the buffer has too little for a step; while an operator has paused learning it begins no step. Where a user
is forgotten it drops the user's waiting groups and writes a checkpoint. With a store of another log it does not begin.
"""

import asyncio
import logging
from contextlib import aclosing
from functools import partial

from infra.chain.chain import Step
from infra.log.log import Log
from infra.policies.fold import PoliciesFold
from infra.roles.identity import claim, require_fit
from infra.roles.role import Role
from schemas import Directive, PolicyEvent, topics
from schemas.errors import FencedOut
from trainer.batch.image_inputs import ImageInputs
from trainer.buffer.intake import Intake, follow_buffer, follow_progress, follow_reports, hear_directives
from trainer.config import TrainerConfig
from trainer.journal.checkpoint import check_warm_up
from trainer.journal.journal import Lease, take_lease
from trainer.learners.learner import Learner
from trainer.loop.report import TrainerReport, follow_results, publish_progress, report_progress
from trainer.loop.saving import write_checkpoint
from trainer.loop.state import Run
from trainer.loop.step import publish_now, train_step
from trainer.loop.waiting import admitted, drop_forgotten, must_forget, next_draw, tell_dropped
from trainer.loop.warmup import warm_up
from trainer.replay.resume import resume

logger = logging.getLogger(__name__)


async def run_trainer(
    role: Role,
    config: TrainerConfig,
    learner: Learner,
    *,
    seed: int = 0,
    report: TrainerReport | None = None,
    chain: tuple[Step, ...] = (),
    image_inputs: ImageInputs | None = None,
    max_tokens: int = 0,
) -> None:
    """Train until the role is stopped or `max_steps` are done. Raises FencedOut when a newer trainer takes the run,
    ConfigError where log and store do not belong together.

    report: its counters. chain: processors of every drawn batch before it is journaled. image_inputs: of a model that takes
    pictures. max_tokens: of a sequence that the model takes, 0 for any.
    """
    log, floor = role.log, role.floor
    name = floor.run or floor.app
    await require_fit(log, role.store, floor)
    lease = await take_lease(log, policy=floor.policy.name, run=name, owner=role.instance)
    await claim(log, role.store, floor)
    logger.info("lease taken run=%s token=%d", name, lease.token)
    report = report or TrainerReport(role.metrics, role.instance)
    run = await resume(
        role, config, lease, learner, seed=seed, report=report, image_inputs=image_inputs, max_tokens=max_tokens
    )
    run.chain = chain
    past = run.publisher.past
    await hear_directives(log, run.supply.intake, past)
    try:
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(follow_buffer(log, run.supply.intake, role.metrics, partial(tell_dropped, run))),
                tasks.create_task(follow_progress(log, run.supply.intake)),
                tasks.create_task(follow_reports(log, run.supply.intake)),
                tasks.create_task(watch_policies(log, lease, floor.policy.name, run.supply.intake, past)),
                tasks.create_task(report_progress(log, report, lambda: reported_version(run))),
            ]
            run.saving.tasks, run.saving.stop = tasks, role.stop
            if report.board is not None:
                background.append(tasks.create_task(follow_results(log, report.board)))
            await learn(run, role.stop)
            for task in background:
                task.cancel()
    finally:
        run.executor.shutdown()
        run.saving.executor.shutdown()
    await publish_progress(log, report, reported_version(run))


def reported_version(run: Run) -> int:
    """The version that a report bears; sets the gauge that is read, not counted."""
    run.report.set("groups_waiting", run.supply.intake.buffer.num_waiting())
    return run.position.version


async def watch_policies(log: Log, lease: Lease, policy: str, intake: Intake, past: PoliciesFold) -> None:
    """Take the operators' directives, and fold every record of `policies`.

    Raises FencedOut as soon as a newer trainer of this policy has announced itself.
    """
    async with aclosing(log.tail(topics.POLICIES, {0: lease.token + 1})) as messages:
        async for message in messages:
            past.take(message)
            event = message.value
            if isinstance(event, Directive):
                intake.take_directive(event)
            if isinstance(event, PolicyEvent) and event.policy == policy and event.event == "lease":
                raise FencedOut(
                    f"run {lease.run!r}: token {lease.token} is held here, {event.owner} took {message.offset}"
                )


async def learn(run: Run, stop: asyncio.Event) -> None:
    """Make the first version, warm up, then draw and train until the end."""
    if run.config.warmup is not None:
        check_warm_up(run.position)
    run.report.life = "working"
    if run.position.step < 0 and not run.position.warmed_up and run.saving.saved_step < -1:
        if run.config.warmup is None:
            await run.begin_training()
        await write_checkpoint(run, 0)
        await publish_now(run, 0)
    if not run.position.warmed_up:
        await warm_up(run, stop)
    run.report.state = "learning"
    while not stop.is_set() and not finished(run):
        if must_forget(run):
            await drop_forgotten(run)
        draw = await next_draw(run, stop)
        draw = None if draw is None else await admitted(run, draw)
        if draw is not None and not draw.wait:
            await train_step(run, draw)
    await run.saving.finished()
    run.report.state, run.report.life = "stopped", "ended"
    if run.position.warmed_up and run.saving.saved_step < run.position.step:
        await write_checkpoint(run, run.position.version)


def finished(run: Run) -> bool:
    """True once `max_steps` optimizer steps have followed the warm-up."""
    return 0 < run.config.max_steps <= run.position.step + 1 - run.position.first_train_step
