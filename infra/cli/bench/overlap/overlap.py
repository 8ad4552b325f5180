"""Sampling and learning at the same time: the whole loop beside its own synchronous mode, under log-normal answer lengths.

Master, explorer, stages and trainer are the product's, with its settings; who waits for whom they decide. The engine and the
learner are fakes that take a given time (`overlap_sides`), one as much as the other on average, so that neither can hide behind
the other. All of it runs on a log in memory in virtual time: hours in seconds, and exactly the same each time.

    busier     share of the time that the busier side works; what is left of 1 is what the other made it wait
    faster     times as many steps an hour as the synchronous mode: staleness 0, so each step waits for the samples of the
               newest version, and these for the step
    engine, learner   what share of the time each works, and what it waits for in the rest
    waves      answers of a step by the engine's places. With one wave a step takes as long as an answer on average: the longest
               take several steps, and the bound makes both sides wait for them; with four they take less than one

Before a figure is given, the journal has to say that every step had all of its groups, and each answer came once.
"""

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from infra.cli.bench.overlap.plan import SYNCHRONOUS, OverlapCase, OverlapPlan
from infra.cli.bench.overlap.virtual_time import OneThreadTime, VirtualTime

if TYPE_CHECKING:
    from infra.log.log import Log

Say = Callable[[str], None]


class Played(msgspec.Struct, frozen=True):
    """One run. wall_s: of the steps measured. shares: of that time, by what a side did. too_old: share of the answers drawn of
    which no token was young enough to be trained on.
    """

    wall_s: float
    shares: dict[str, float]
    too_old: float


def run(plan: OverlapPlan | None = None, say: Say = print) -> dict[str, float]:
    """Means over the seeds. Raises RuntimeError where a run was not what it should be."""
    plan = plan or OverlapPlan()
    figures: dict[str, float] = {}
    for sigma, waves in itertools.product(plan.sigmas, plan.waves):
        pairs = []
        for seed in plan.seeds:
            pairs.append(
                [
                    played(plan, OverlapCase(sigma, waves, staleness, seed))
                    for staleness in (plan.staleness, SYNCHRONOUS)
                ]
            )
            say(f"overlap: sigma {sigma:g}, waves {waves}, seed {seed}")
        figures |= {f"sigma_{sigma:g}_waves_{waves}_{name}": value for name, value in figures_of(pairs).items()}
    return figures


def figures_of(pairs: list[list[Played]]) -> dict[str, float]:
    """Of one case. pairs: the loop and its synchronous mode, by seed."""
    loops, alone = [one for one, _ in pairs], [other for _, other in pairs]
    busy = ("engine_busy", "learner_busy")
    mean = statistics.fmean
    names = sorted(
        {name for one in loops for name in one.shares}, key=lambda name: (name.split("_")[0], name not in busy, name)
    )
    return {
        "busier": mean(max(one.shares[name] for name in busy) for one in loops),
        "faster": mean(other.wall_s / one.wall_s for one, other in pairs),
        **{name: mean(one.shares.get(name, 0.0) for one in loops) for name in names},
        **{f"synchronous_{name}": mean(one.shares[name] for one in alone) for name in busy},
        "answers_too_old": mean(one.too_old for one in loops),
    }


def played(plan: OverlapPlan, case: OverlapCase) -> Played:
    """One run in virtual time."""
    with tempfile.TemporaryDirectory() as name, asyncio.Runner(loop_factory=OneThreadTime) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTime)
        return runner.run(_played(plan, case, loop, Path(name)))


def lengths(plan: OverlapPlan, case: OverlapCase) -> Iterator[int]:
    """Tokens of one answer after the other."""
    random = np.random.default_rng(case.seed)
    middle = np.log(plan.mean) - case.sigma**2 / 2
    while True:
        yield int(np.clip(round(random.lognormal(middle, case.sigma)), 3, plan.longest * plan.mean))


async def _played(plan: OverlapPlan, case: OverlapCase, loop: VirtualTime, folder: Path) -> Played:
    from infra.cli.bench.overlap.roles import OverlapLoop

    roles = await OverlapLoop.of(plan, case, loop, folder)
    marks = await roles.run(lengths(plan, case))
    before, after = marks[plan.first], marks[plan.first + plan.steps]
    passed = {name: seconds - before.seconds.get(name, 0.0) for name, seconds in after.seconds.items()}
    wall_s = after.at_s - before.at_s
    too_old = await _too_old(roles.log, plan)
    return Played(wall_s, {name: seconds / wall_s for name, seconds in passed.items()}, too_old)


async def _too_old(log: "Log", plan: OverlapPlan) -> float:
    """Share of the answers. Raises RuntimeError where the journal does not say what it should."""
    from schemas import Batch, topics

    seen: set[str] = set()
    num_old = 0
    async with aclosing(log.read_all(topics.BATCHES)) as messages:
        async for message in messages:
            if not isinstance(batch := message.value, Batch):
                continue
            drawn = [item.id for item in (*batch.items, *batch.dropped)]
            if len(drawn) != plan.groups * plan.size:
                raise RuntimeError(f"step {batch.step}: got {len(drawn)} answers, expected {plan.groups * plan.size}")
            if len({*drawn} - seen) != len(drawn):
                raise RuntimeError(f"step {batch.step}: got an answer twice")
            seen.update(drawn)
            num_old += len(batch.dropped)
    return num_old / len(seen)
