"""Waiting for a draw: the loop sleeps until the buffer changes, or until a straggler's time is up.

Guarantee: groups dropped at the draw are reported to the master at once, so that it does not wait for them.
"""

import asyncio
import logging
import math
from collections.abc import Sequence

from infra.settings.config import duration_s
from schemas import Drawn, Lane, topics
from trainer.batch.assemble import step_seed
from trainer.buffer.draw import Candidate, Draw, draw_in_order, unfit, worth_waiting_for
from trainer.buffer.draw_priority import draw_by_priority
from trainer.buffer.draw_share import ShareLimits
from trainer.buffer.draw_spread import draw_spread
from trainer.buffer.intake import Intake
from trainer.config import LaneConfig
from trainer.loop.report import Stopwatch
from trainer.loop.saving import write_checkpoint
from trainer.loop.state import Run

logger = logging.getLogger(__name__)

PACED: Lane = "usual"
NO_SIGNAL = "no advantage in the step"
TOO_MANY = "too many waiting"
QUIET_S = 2.0  # nothing has arrived for so long: what is missing at the end of a run is late


async def next_draw(run: Run, stop: asyncio.Event) -> Draw | None:
    """What the next step trains on; None when asked to stop, or to forget a user first."""
    with Stopwatch(run.report, "idle_seconds"):
        while not stop.is_set() and not must_forget(run):
            if run.intake.paused:
                await while_paused(run, stop)
                continue
            run.intake.changed.clear()
            draw = decide(run, now_s=run.intake.clock())
            if draw.dropped:
                await drop(run, draw)
            if not draw.wait:
                if not await drop_lost(run, draw):
                    run.report.set("held_back", draw.held_back)
                    run.report.add("experiences_held_back", draw.held_back)
                    return draw
                continue
            try:
                async with asyncio.timeout(0.25):
                    await run.intake.changed.wait()
            except TimeoutError:
                continue
    return None


async def while_paused(run: Run, stop: asyncio.Event) -> None:
    """Wait until an operator lets learning go on, or until asked to stop; what arrives meanwhile is kept."""
    state, run.report.state = run.report.state, "paused"
    logger.info("paused step=%d", run.position.step)
    while run.intake.paused and not stop.is_set() and not must_forget(run):
        run.intake.changed.clear()
        try:
            async with asyncio.timeout(0.25):
                await run.intake.changed.wait()
        except TimeoutError:
            continue
    run.report.state = state


def decide(run: Run, *, now_s: float) -> Draw:
    """The draw from the buffer as it is now: the paced lane decides, the others follow in proportion."""
    lanes = run.config.lanes
    taken: list[Candidate] = []
    dropped: list[tuple[Candidate, str]] = []
    held_back = 0
    if PACED in lanes:
        draw = paced(run, now_s)
        dropped += draw.dropped
        if draw.wait and not lanes[PACED].optional:
            return Draw(dropped=tuple(dropped), wait=True)
        taken += draw.taken
    num_paced = sum(one.num_experiences for one in taken)
    paced_step = PACED in lanes and num_paced > 0
    if not paced_step and is_early(run, now_s):
        return Draw(dropped=tuple(dropped), wait=True)
    for lane, config in lanes.items():
        if lane == PACED or config.weight == 0.0:
            continue
        wanted = round(num_paced * share_of(config, lanes[PACED])) if paced_step else run.floor.pacing.groups_per_step
        if wanted == 0:
            continue
        candidates = run.intake.buffer.candidates(lane)
        crowd = max(0, len(candidates) - config.max_waiting)
        dropped += [(one, TOO_MANY) for one in candidates[:crowd]]
        candidates = candidates[crowd:]
        unusable = unfit_of(run, lane, candidates)
        dropped += unusable
        refused = {one.offset for one, _ in unusable}
        usable = [one for one in candidates if one.offset not in refused] if refused else candidates
        least = 1 if paced_step or run.intake.draining else config.least
        if sum(one.num_experiences for one in usable) < least:
            usable = []
        draw = drawn_from(
            usable,
            config,
            num_experiences=wanted,
            seed=step_seed(run.seed, run.position.step + 1),
            by_tokens=run.objectives[lane].mean == "tokens",
            least=least,
        )
        if draw.wait and not config.optional and not paced_step:
            return Draw(dropped=tuple(dropped), wait=True)
        taken += draw.taken
        held_back += draw.held_back
    if taken and not any(teaches(run, one) for one in taken):
        return Draw(dropped=(*dropped, *((one, NO_SIGNAL) for one in taken)), wait=True)
    return Draw(taken=tuple(taken), dropped=tuple(dropped), wait=not taken, held_back=held_back)


def is_early(run: Run, now_s: float) -> bool:
    """Whether a step without the paced lane would follow the last version too soon."""
    return not run.intake.draining and now_s - run.published_s < duration_s(run.config.version_every)


def teaches(run: Run, one: Candidate) -> bool:
    """Whether a lane's loss can have a gradient from a group."""
    objective = run.objectives[one.lane]
    pulls = objective.critic or objective.reference or objective.entropy > 0
    return one.has_signal or pulls or not objective.advantage


def drawn_from(
    candidates: Sequence[Candidate],
    config: LaneConfig,
    *,
    num_experiences: int,
    seed: int,
    by_tokens: bool = False,
    least: int = 1,
) -> Draw:
    """The draw of a lane that is not paced, as its settings say."""
    limits = ShareLimits(tenant=config.tenant_share, subject=config.subject_share, least=least)
    if config.draw == "priority":
        return draw_by_priority(
            candidates,
            num_experiences=num_experiences,
            max_uses=config.max_uses,
            seed=seed,
            correction=config.exponent,
            by_tokens=by_tokens,
            limits=limits,
        )
    return draw_spread(candidates, num_experiences=num_experiences, max_uses=config.max_uses, seed=seed, limits=limits)


def unfit_of(run: Run, lane: Lane, candidates: Sequence[Candidate]) -> list[tuple[Candidate, str]]:
    """What the lane's loss cannot learn from."""
    objective = run.objectives[lane]
    return unfit(candidates, ratio=objective.ratio, pairs=objective.mean == "pairs")


def share_of(config: LaneConfig, paced: LaneConfig) -> float:
    """Sequences of a lane per sequence of the paced one: as many as its loss weighs, so that both are as noisy.

    A paced lane that weighs nothing counts as what is left of 1.
    """
    return config.share or config.weight / (paced.weight or max(0.0, 1.0 - config.weight) or 1.0)


def paced(run: Run, now_s: float) -> Draw:
    """The draw of the paced lane, waiting for a group about to pass the bound as long as `straggler_s` allows."""
    pacing = run.floor.pacing
    version = run.position.version
    candidates = run.intake.buffer.candidates(PACED)
    unusable = unfit_of(run, PACED, candidates)
    refused = {one.offset for one, _ in unusable}
    usable = [one for one in candidates if one.offset not in refused]
    given_up = {number: since for number, since in run.given_up.items() if now_s - since > pacing.straggler_s}
    absent, hold_for = run.intake.absent(), None
    while (number := worth_waiting_for(
        absent, usable, version=version, max_staleness=pacing.max_staleness, given_up=given_up
    )) is not None:  # fmt: skip
        hold_for = number if hold_for is None else hold_for
        given_up[number] = run.given_up.setdefault(number, now_s)  # all that are missing now wait at the same time
    rest = len(usable) if is_rest(run.intake, len(usable), now_s) else math.inf
    draw = draw_in_order(
        usable,
        num_groups=int(min(pacing.groups_per_step, rest)),
        version=version,
        max_staleness=pacing.max_staleness,
        hold_for=hold_for,
    )
    return Draw(taken=draw.taken, dropped=(*unusable, *draw.dropped), wait=draw.wait)


def is_rest(intake: Intake, num_groups: int, now_s: float) -> bool:
    """Whether the groups at hand make a smaller step: no more are issued, and all of them are here or the others are late.

    Late ones are issued again by the master and make a step of their own when they come.
    """
    if not intake.draining or not num_groups:
        return False
    return intake.outstanding_groups <= num_groups or now_s - intake.arrived_s >= QUIET_S


def must_forget(run: Run) -> bool:
    """Whether the data of a forgotten user is to be dropped now; during the warm-up it waits for its end."""
    return run.position.warmed_up and run.intake.must_forget


async def let_go(run: Run) -> None:
    """Drop all that waits here and can no longer be opened, and make a checkpoint that knows nothing of it."""
    run.intake.forget_at_s = math.inf
    buffer = run.intake.buffer
    held = [one for lane in run.config.lanes for one in buffer.candidates(lane)]
    lost = await asyncio.to_thread(buffer.lost, held)
    logger.info("forgetting groups=%d", len(lost))
    if lost:
        await drop(run, Draw(dropped=tuple(lost)))
    await run.written()
    if run.saved_step < run.position.step:
        await write_checkpoint(run, run.position.version)


async def drop_lost(run: Run, draw: Draw) -> bool:
    """Drop what was forgotten since it arrived; True where it was in the draw, which then has to be made anew."""
    lost = await asyncio.to_thread(run.intake.buffer.lost, draw.taken)
    if lost:
        await drop(run, Draw(dropped=tuple(lost)))
    return bool(lost)


async def drop(run: Run, draw: Draw) -> None:
    """Forget the dropped groups, count them by reason, and tell the master."""
    for one, reason in draw.dropped:
        run.intake.buffer.discard(one.offset, one.lane)
        run.report.add("dropped", one.num_experiences, reason=reason)
    await tell_dropped(run, {one.group: reason for one, reason in draw.dropped})


async def tell_dropped(run: Run, dropped: dict[str, str]) -> None:
    """Tell the master and the audit which groups will never be trained, and why."""
    drawn = Drawn(
        token=run.lease.token,
        step=run.position.step + 1,
        version=run.position.version,
        groups=(),
        dropped=dropped,
    )
    await run.log.publish(topics.PROGRESS, drawn)
