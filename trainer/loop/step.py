"""One optimizer step, from a draw to a published policy; and the same step again from the journal.

Order, always: journal (confirmed) → Drawn → optimizer → checkpoint when due → publication when due.

Repeated, for a resume and a replay alike, the journal decides and the kernels only compute: a step that was skipped or rolled
back changed nothing that remained and is not executed; every other step is, in order, with the items, seed and rate it had.
"""

import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from infra.observe.failpoint import reach
from infra.policies.manifest import HashedTensors
from infra.policies.policy import Probe
from schemas import Batch, Block, Drawn, Rollback, Skip, ids, topics
from trainer.batch.assemble import PACED, Stamp, apply_chain, assemble, masked_below, step_inputs, step_seed
from trainer.batch.batch import TrainItem
from trainer.buffer.pool import Candidate, Draw
from trainer.health import (
    ANY_FINITE,
    GuardState,
    alarms,
    collapses,
    judge,
    norm_limit,
    passed,
    refused,
    rolled_back,
    unhealthy,
)
from trainer.journal import checkpoint
from trainer.journal.journal import Pending
from trainer.journal.origin import config_hash
from trainer.learners.learner import StepStats, take_from, take_weights
from trainer.loop.fit import restore_learner
from trainer.loop.publication import PROBE_TOKENS, probe_sequences
from trainer.loop.report import Stopwatch
from trainer.loop.saving import remove_tensors, snapshot, store, wait_for_room, write_checkpoint
from trainer.loop.state import Learning, Run

logger = logging.getLogger(__name__)


async def train_step(run: Run, draw: Draw) -> None:
    batch, items = await journal_draw(run, draw, phase="train")
    run.settle([candidate.sequence for candidate in draw.taken if candidate.sequence >= 0])
    limit = norm_limit(run.position.guard, run.config.guard)
    stats = await execute(run, batch, items, max_grad_norm=limit)
    await settle_verdict(run, batch, stats)


async def journal_draw(run: Run, draw: Draw, *, phase: Literal["warmup", "train"]) -> tuple[Batch, list[TrainItem]]:
    """Count the uses, write the journal record, then tell the master."""
    step = run.position.step + 1
    stamp = Stamp(
        run=run.name,
        token=run.lease.token,
        step=step,
        version=run.position.version,
        phase=phase,
        seed=step_seed(run.supply.seed, step),
        config_hash=config_hash(run.config, run.floor, run.chain),
        masked_below=masked_below(run.position.version, run.floor.pacing.max_staleness) if phase == "train" else -1,
    )
    drawn: list[tuple[Candidate, Block]] = list(zip(draw.taken, run.supply.intake.buffer.take(draw.taken), strict=True))
    batch, items = assemble(stamp, drawn, draw.dropped)
    if phase == "train":
        paced = run.config.lanes.get(PACED)
        batch, items = await apply_chain(run.chain, batch, items, alone=paced is None or paced.optional)
        for reason in batch.dropped_because:
            run.report.add("dropped", reason=reason)
        run.report.add("tokens_masked", batch.masked)
    await run.journal(batch)
    await tell_drawn(run, batch)
    return batch, items


async def tell_drawn(run: Run, batch: Batch) -> None:
    """Report to the master which groups a journaled batch ends; again after a restart, it counts once."""
    used = (*batch.items, *batch.dropped)
    groups = tuple(dict.fromkeys(ids.experience_group(item.id) for item in used if item.lane == "usual"))
    if groups:
        drawn = Drawn(token=run.lease.token, step=batch.step, version=batch.version, groups=groups)
        await run.log.publish(topics.PROGRESS, drawn)


async def execute(
    run: Learning, batch: Batch, items: Sequence[TrainItem], *, max_grad_norm: float = ANY_FINITE
) -> StepStats:
    """The optimizer step of a journaled batch (none where the batch chain left nothing); the position moves past it.

    Resume and replay call it too. max_grad_norm: a step with a larger norm changes nothing; a batch that the journal calls
    trained is not judged again.
    """
    if not items:
        run.advance(step=batch.step)
        return StepStats(finite=True, loss=math.nan, grad_norm=math.nan, values={})
    steps_done = batch.step - run.position.first_train_step
    given = await with_pictures(run, items)
    packed, learning_rate = await run.in_thread(step_inputs, run.config, run.floor.pacing, batch, given, steps_done)
    with Stopwatch(run.report, "learner_seconds") as watch:
        reach("learner.before_step")
        stats = await run.in_thread(
            run.learner.step, packed, learning_rate=learning_rate, seed=batch.seed, max_grad_norm=max_grad_norm
        )
    reach("learner.after_step")
    run.advance(step=batch.step)
    stats = msgspec.structs.replace(stats, reward=mean_reward(items))
    run.report.step(batch.step, list(items), stats, batch.version, watch.elapsed_s)
    open_items = [item for item in items if not item.experience.key_id]  # a manifest is not encrypted
    sampled = [item.experience.tokens.tolist() for item in open_items[:4]]
    longest = PROBE_TOKENS + (run.image_inputs.vision.num_places if run.image_inputs is not None else 0)
    run.probe_sequences = probe_sequences(sampled, longest=longest) or run.probe_sequences
    return stats


async def with_pictures(run: Learning, items: Sequence[TrainItem]) -> Sequence[TrainItem]:
    """The items with their pictures, where the model takes any. Raises BadFrame naming one that cannot be read."""
    return items if run.image_inputs is None else await run.in_thread(run.image_inputs.shown, items)


async def settle_verdict(run: Run, batch: Batch, stats: StepStats) -> None:
    """Let the guard decide, then write the checkpoint and publish the version if they are due."""
    before, entropy, reward = run.position.guard, *condition(stats)
    raised = (*alarms(stats.values), *collapses(before, run.config.guard, entropy=entropy, reward=reward))
    for alarm in raised:
        run.report.add("alarms", alarm=alarm)
    verdict, reason = judge(
        before,
        finite=stats.finite,
        alarms=raised,
        halting=frozenset(run.config.halt_on),
        max_skips=run.config.max_skips,
        grad_norm=stats.grad_norm,
        limit=norm_limit(before, run.config.guard),
    )
    if verdict == "rollback":
        # An alarm is about the weights that met the batch: a checkpoint of exactly these is no way back, but that of the
        # warm-up, before which lies the untrained model.
        newest = max(batch.step - 1, run.position.first_train_step) if reason.startswith("alarm") else batch.step
        await roll_back(run, batch, reason, newest=newest)
        return
    run.advance(guard=after(run, batch, stats) if verdict == "go" else refused(before))
    if verdict == "skip":
        logger.warning("step skipped step=%d reason=%s", batch.step, reason)
        run.report.add("steps_skipped")
        await run.journal(Skip(run=run.name, token=run.lease.token, step=batch.step, reason=reason))
    if batch.phase == "train" and run.publication_due():
        with Stopwatch(run.report, "publish_wait_seconds"):
            await run.saving.finished()  # the version before is out, and this version is compared with its probe
        weights = await run.in_thread(take_weights, run.learner)
        if reason := await fault(run, weights):
            await roll_back(run, batch, reason, newest=batch.step)
        else:
            await write_and_publish_due(run, weights)


def condition(stats: StepStats) -> tuple[float | None, float | None]:
    """Entropy and mean reward of the step just done, None where it has none."""
    return stats.values.get("usual/entropy"), stats.reward


def mean_reward(items: Sequence[TrainItem]) -> float | None:
    rewards = [item.experience.reward for item in items if item.experience.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def after(run: Learning, batch: Batch, stats: StepStats) -> GuardState:
    """The guard's state after a step that changed the weights. The warm-up is no measure for later steps."""
    if batch.phase == "warmup":
        return GuardState()
    entropy, reward = condition(stats)
    before, config = run.position.guard, run.config.guard
    return passed(before, config, grad_norm=stats.grad_norm, entropy=entropy, reward=reward)


async def fault(run: Run, weights: HashedTensors) -> str:
    """Why the weights must not be published, "" for nothing: looked at before the checkpoint that would keep them."""
    before = run.published_probe if run.config.guard.probe_shift else None
    now = await run.in_thread(run.learner.probe, before.sequences) if before is not None else None
    return unhealthy(await run.in_thread(lambda: weights.not_finite), before, now, run.config.guard)


async def write_and_publish_due(run: Run, weights: HashedTensors | None = None) -> None:
    """Checkpoint before publication where both fall due, so that a version is never ahead of the state that a restart can
    reach; the store gets both during the next steps.

    weights: see `publish_now`.
    """
    if not run.publication_due():
        return
    await run.saving.finished()  # so that versions come out in order
    version = run.position.version + 1
    unwritten = await snapshot(run, version) if run.checkpoint_due() else None
    unpublished = await ready(run, version, weights)
    run.advance(version=version)

    async def write_and_publish() -> None:
        if unwritten is not None:
            await store(run, unwritten)
        await publish(run, unpublished)

    await run.saving.in_background(write_and_publish())


class Unpublished(msgspec.Struct, frozen=True):
    """A version in memory: the weights after `step`.

    version: its number. parent: the version before. step: last executed. weights: as they were then. probe: logprobs of a few
    sequences under them, None where nothing is probed. stats: of the newest step, shown with the version.
    """

    version: int
    parent: int
    step: int
    weights: HashedTensors
    probe: Probe | None
    stats: Mapping[str, float]


async def publish_now(run: Run, version: int, weights: HashedTensors | None = None) -> None:
    """Publish the learner's weights as `version` (or the next free number). weights: a copy of them, where one is made."""
    await publish(run, await ready(run, version, weights))


async def ready(run: Run, version: int, weights: HashedTensors | None) -> Unpublished:
    """The learner's weights as a version; no later step reaches it."""
    if weights is None:
        weights = await run.in_thread(take_weights, run.learner)
    probe = await run.in_thread(run.learner.probe, run.probe_sequences) if run.probe_sequences else None
    parent = min(run.position.version, version - 1)  # a checkpoint is of the version that a resume publishes
    run.supply.published_s = run.supply.intake.clock()
    return Unpublished(version, parent, run.position.step, weights, probe, dict(run.report.worth_showing))


async def publish(run: Run, ready_version: Unpublished) -> None:
    """Publish a version (or under the next free number)."""
    await wait_for_room(run)
    with Stopwatch(run.report, "publish_seconds"):
        got = await run.publisher.publish(
            ready_version.version,
            ready_version.weights,
            ready_version.probe,
            parent=ready_version.parent,
            step=ready_version.step,
            stats=ready_version.stats,
        )
    run.advance(version=got)
    run.published_probe = ready_version.probe
    run.report.add("policy_versions")
    run.report.set("last_version_timestamp_s", time.time())
    await remove_tensors(run)


async def roll_back(run: Run, batch: Batch, reason: str, *, newest: int) -> None:
    """Restore the weights of the newest checkpoint before step `newest` (of any, without one) as a new, higher
    version; the batches since it are quarantined.
    """
    await run.saving.finished()
    load, take = checkpoint.load_newest, take_from(run.learner)
    before = checkpoint.CheckpointPlace(newest, 0)
    state = await run.in_thread(load, run.store, run.name, before=before, take=take)
    state = state or await run.in_thread(load, run.store, run.name, take=take)
    if state is None:
        raise RuntimeError(f"step {batch.step}: {reason}, and there is no checkpoint to go back to")
    logger.error("rolling back from step=%d to step=%d reason=%s", batch.step, state.position.step, reason)
    run.report.add("rollbacks")
    await restore_learner(run, state)
    run.advance(guard=state.position.guard)
    record = Rollback(
        run=run.name,
        token=run.lease.token,
        from_step=state.position.step + 1,
        to_step=batch.step,
        restored_version=state.position.version,
        version=run.position.version + run.position.warmed_up,
        reason=reason,
    )
    await run.journal(record)
    await finish_rollback(run, record)


async def finish_rollback(run: Run, record: Rollback) -> None:
    """Complete a rollback after the weights are restored: remove checkpoints of undone steps, write a
    checkpoint and, after the warm-up, publish the version.
    """
    run.report.state = f"rolled back to step {record.from_step - 1}: {record.reason}"
    run.advance(guard=rolled_back(run.position.guard))
    quarantined = range(record.from_step, record.to_step)
    places = await run.in_thread(checkpoint.places, run.store, run.name)
    await run.in_thread(
        checkpoint.remove, run.store, run.name, [place for place in places if place.step in quarantined]
    )
    await write_checkpoint(run, record.version)
    if run.position.warmed_up:  # a version of the warm-up would open sampling before its end
        await publish_now(run, record.version)


Prepare = Callable[[Pending], Awaitable[list[TrainItem]]]


async def repeat(
    run: Learning,
    todo: Iterable[Pending | Rollback],
    *,
    prepare: Prepare,
    begin_training: Callable[[], Awaitable[None]],
) -> AsyncGenerator[tuple[Pending | Rollback, StepStats | None], None]:
    """Yield each entry after it was done, with the statistics of its step, None where no step was executed.

    prepare: returns the items of a batch; called for every batch in turn. begin_training: ends the warm-up.
    """
    for entry in todo:
        if isinstance(entry, Rollback):
            run.advance(step=entry.to_step, guard=rolled_back(run.position.guard))
            yield entry, None
            continue
        if entry.batch.phase == "train" and not run.position.warmed_up:
            await begin_training()
        items = await prepare(entry)
        stats = None
        if entry.fate in ("trained", "open"):
            limit = norm_limit(run.position.guard, run.config.guard) if entry.fate == "open" else ANY_FINITE
            stats = await execute(run, entry.batch, items, max_grad_norm=limit)
        if entry.fate == "trained" and stats is not None:
            run.advance(guard=after(run, entry.batch, stats))
        elif entry.fate == "skipped":
            run.advance(step=entry.batch.step, guard=refused(run.position.guard))
        yield entry, stats
