"""The draw of a step from all lanes: the paced lane decides, the others follow in proportion.

The caller removes and drops groups.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from infra.settings.config import Pacing, duration_s
from schemas import Lane
from trainer.batch.assemble import PACED, step_seed
from trainer.buffer.draw import ShareLimits, draw_by_priority, draw_least_used, find_joins, parted, united
from trainer.buffer.intake import Intake
from trainer.buffer.pool import Candidate, Draw, Pool, draw_in_order, worth_waiting_for
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import Position
from trainer.losses.loss import Objective, open_objectives

NO_SIGNAL = "no advantage in the step"
TOO_MANY = "too many waiting"
QUIET_S = 2.0  # time without arrivals after which groups missing at the end of a run are late


@dataclass(kw_only=True)
class Supply:
    """The groups that wait to be trained, and the lanes' settings for drawing them.

    config: the trainer's. pacing: how far training may lag behind. intake: records read from the log. seed: of the draws.
    objectives: of the lanes, opened at the start. waited_since: issue number to the start of the wait for it, by the clock of
    the intake. published_s: when this process took the weights that it published last, by the same clock.
    """

    config: TrainerConfig
    pacing: Pacing
    intake: Intake
    seed: int
    objectives: dict[Lane, Objective] = field(init=False)
    waited_since: dict[int, float] = field(default_factory=dict)
    published_s: float = -math.inf

    def __post_init__(self) -> None:
        self.objectives = open_objectives(self.config.lanes)


def decide(supply: Supply, position: Position, *, now_s: float) -> Draw:
    """Draw from the present buffer: the paced lane decides, the others follow in proportion."""
    lanes = supply.config.lanes
    taken: list[Candidate] = []
    buffer = supply.intake.buffer
    dropped = [
        (candidate, TOO_MANY)
        for lane, config in lanes.items()
        if lane != PACED and (crowd := buffer.num_groups(lane) - config.max_waiting) > 0
        for candidate in buffer.pool(lane).chosen(slice(crowd))
    ]
    crowded = [candidate.offset for candidate, _ in dropped]
    held_back = 0
    if PACED in lanes:
        draw = paced(supply, position, now_s)
        dropped += draw.dropped
        if draw.wait and not lanes[PACED].optional:
            return Draw(dropped=tuple(dropped), wait=True)
        taken += draw.taken
    num_paced = sum(candidate.num_experiences for candidate in taken)
    paced_step = PACED in lanes and num_paced > 0
    too_soon = now_s - supply.published_s < duration_s(supply.config.publish_interval)
    if not paced_step and too_soon and not supply.intake.draining:
        return Draw(dropped=tuple(dropped), wait=True)
    for lane, config in lanes.items():
        if lane == PACED or config.weight == 0.0:
            continue
        least = 1 if paced_step or supply.intake.draining else supply.config.min_sequences(lane)
        alone = max(supply.pacing.groups_per_step, least)
        wanted = max(1, round(num_paced * lane_share(config, lanes[PACED]))) if paced_step else alone
        pool = buffer.drawable(lane)
        if crowded:
            pool = pool.chosen(~np.isin(pool.column("offset"), crowded))
        usable, unusable = split_fit(supply.objectives[lane], pool)
        dropped += unusable
        if usable.column("num_experiences").sum() < least:
            usable = usable.chosen(slice(0))
        draw = drawn_from(
            usable,
            config,
            num_experiences=wanted,
            seed=step_seed(supply.seed, position.step + 1),
            by_tokens=supply.objectives[lane].mean == "tokens",
            least=least,
        )
        if draw.wait and not config.optional and not paced_step:
            return Draw(dropped=tuple(dropped), wait=True)
        taken += draw.taken
        held_back += draw.held_back
    if taken and not any(teaches(supply, candidate) for candidate in taken):
        return Draw(dropped=(*dropped, *((candidate, NO_SIGNAL) for candidate in taken)), wait=True)
    return Draw(taken=tuple(taken), dropped=tuple(dropped), wait=not taken, held_back=held_back)


def teaches(supply: Supply, candidate: Candidate) -> bool:
    """True if a lane's loss can have a gradient from a group."""
    objective = supply.objectives[candidate.lane]
    pulls = objective.critic or objective.reference or objective.entropy > 0
    return candidate.has_signal or pulls or not objective.advantage


def drawn_from(
    pool: Pool, config: LaneConfig, *, num_experiences: int, seed: int, by_tokens: bool = False, least: int = 1
) -> Draw:
    """The draw of a lane that is not paced, as its settings say."""
    limits = ShareLimits(tenant=config.tenant_share, subject=config.subject_share, least=least)
    joins = find_joins(pool)
    units = united(pool, joins)
    if config.draw == "priority":
        draw = draw_by_priority(
            units,
            num_experiences=num_experiences,
            max_uses=config.max_uses,
            seed=seed,
            correction=config.exponent,
            by_tokens=by_tokens,
            limits=limits,
        )
    else:
        draw = draw_least_used(
            units, num_experiences=num_experiences, max_uses=config.max_uses, seed=seed, limits=limits
        )
    return parted(draw, joins)


def split_fit(objective: Objective, pool: Pool) -> tuple[Pool, list[tuple[Candidate, str]]]:
    """The groups that a lane's loss can learn from, and the others, each with a reason."""
    unusable: list[tuple[Candidate, str]] = []
    for reason, is_needed, column in (
        ("not a pair", objective.mean == "pairs", "is_pair"),
        ("no ratio", objective.ratio, "has_ratio"),
        ("no teacher", objective.teacher, "is_taught"),
        ("no reward", objective.critic, "has_reward"),
    ):
        if is_needed and not (fit_N := pool.column(column)).all():
            unusable += [(candidate, reason) for candidate in pool.chosen(~fit_N)]
            pool = pool.chosen(fit_N)
    return pool, unusable


def lane_share(config: LaneConfig, paced: LaneConfig) -> float:
    """Sequences of a lane per sequence of the paced lane: its share, or the ratio of the weights, so that both are as noisy.

    If the paced lane has weight 0, the divisor is 1 - the lane's weight, or 1 if that is not above 0.
    """
    return config.share or config.weight / (paced.weight or max(0.0, 1.0 - config.weight) or 1.0)


def paced(supply: Supply, position: Position, now_s: float) -> Draw:
    """The draw of the paced lane, waiting for a group about to pass the bound as long as `straggler_s` allows."""
    pacing = supply.pacing
    version = position.version
    fit, unusable = split_fit(supply.objectives[PACED], supply.intake.buffer.pool(PACED))
    usable = list(fit)
    for passed in [number for number in supply.waited_since if number < supply.intake.floor]:
        del supply.waited_since[passed]
    waited = supply.waited_since  # beyond straggler_s the floor passes a missing group
    supply.intake.closed.update(number for number, since_s in waited.items() if now_s - since_s > pacing.straggler_s)
    awaited = worth_waiting_for(supply.intake.absent(), usable, version=version, max_staleness=pacing.max_staleness)
    for number in awaited:  # all that are missing now wait at the same time
        waited.setdefault(number, now_s)
    rest = len(usable) if is_rest(supply.intake, len(usable), now_s) else math.inf
    draw = draw_in_order(
        usable,
        num_groups=int(min(pacing.groups_per_step, rest)),
        version=version,
        max_staleness=pacing.max_staleness,
        hold_for=awaited[0] if awaited else None,
    )
    return Draw(taken=draw.taken, dropped=(*unusable, *draw.dropped), wait=draw.wait)


def is_rest(intake: Intake, num_groups: int, now_s: float) -> bool:
    """True if the groups at hand make a smaller step: no more are issued, and all of them are here or the others are late.

    Late ones are issued again by the master and make a step of their own when they come.
    """
    if not intake.draining or not num_groups:
        return False
    return intake.outstanding_groups <= num_groups or now_s - intake.arrived_s >= QUIET_S
