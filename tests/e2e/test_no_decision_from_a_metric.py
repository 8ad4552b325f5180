"""What roles count and call their state is for people: renamed, missing or absurd, it changes no decision of anybody."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from actors.master.plan import Plan
from infra.ledger.account import Draining, drain
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Pacing
from schemas import MasterState, PolicyEvent, Progress
from schemas.fields import Life, MasterPhase
from schemas.topics import POLICIES, REPORTS
from tests.actors.rig import MASTER, until
from trainer.buffer.buffer import Buffer
from trainer.buffer.intake import Intake
from trainer.loop.supply import is_rest

ABSURD = {"outstanding_groups": 1e6, "drain_offset": 1e6, "is_canary": 1.0, "trial_version": 7.0, "tokens": -1.0}
NUMBERS: dict[str, dict[str, float]] = {
    "as they are": {"outstanding_groups": 2.0, "max_outstanding_groups": 8.0},
    "missing": {},
    "renamed": {"groups_out": 2.0, "groups_out_at_most": 8.0},
    "absurd": ABSURD,
    "zero": dict.fromkeys(ABSURD, 0.0),
}
STATES = ("issuing", "draining", "done", "serving", "stopped", "")
PHASES: tuple[MasterPhase, ...] = ("warming up", "issuing", "draining", "drained", "evaluating", "done", "paused")

pytestmark = pytest.mark.parametrize("state", STATES)
with_numbers = pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)


def said(numbers: dict[str, float], state: str, role: str = "master") -> Callable[..., Progress]:
    def of(**fields: object) -> Progress:
        return Progress(role=role, instance=role, counters=numbers, gauges=numbers, state=state, **fields)  # type: ignore[arg-type]

    return of


def rests(report: Callable[..., Progress]) -> Iterator[tuple[bool, bool]]:
    """What the trainer makes of each phase with 2 groups outstanding: may a lane alone take fewer, is a step smaller."""
    intake = Intake(Buffer({"usual": 1}), buffer_next=0, progress_next=0, clock=lambda: 0.0)
    for phase in PHASES:
        intake.take_report(report(master=MasterState(state=phase, outstanding=2)))
        yield intake.draining, is_rest(intake, 2, 0.0)
        intake.take_report(report())  # of an older master: says nothing


@with_numbers
def test_which_steps_may_be_smaller_follows_from_what_the_master_says_in_its_own_field(
    numbers: dict[str, float], state: str
) -> None:
    smaller = ("draining", "drained", "evaluating", "done")
    assert list(rests(said(numbers, state))) == [(phase in smaller, phase in smaller) for phase in PHASES]


@with_numbers
async def test_a_drain_ends_with_the_masters_own_word_and_not_with_its_gauges(
    numbers: dict[str, float], state: str
) -> None:
    report = said(numbers, state)
    seen: list[Draining] = []
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    draining = asyncio.create_task(drain(log, "t", "ann", 60.0, seen.append))
    async for _ in log.read_all(POLICIES, until_end=False):
        break  # its word is in the log
    told: list[MasterState | None] = [
        MasterState(state="drained", drained_to=-1),  # it has not heard of the word
        None,
        MasterState(state="draining", outstanding=2, drained_to=0),
    ]
    await log.publish_all(REPORTS, [report(master=item) for item in told])
    await until(lambda: bool(seen))
    assert not draining.done()
    await log.publish(REPORTS, report(master=MasterState(state="drained", drained_to=0)))
    await draining
    assert seen[:2] == [Draining("draining", 2), Draining("drained", 0)]


@with_numbers
@pytest.mark.parametrize("life", ["starting", "working", "ended", None])
def test_time_in_which_groups_become_overdue_passes_while_explorers_work(
    life: Life | None, numbers: dict[str, float], state: str
) -> None:
    plan = Plan(MASTER, Pacing(), policy="main")
    for second in range(4):
        plan.progress(said(numbers, state, "explore")(life=life), 1000 * second)
    assert plan.active_s == (3.0 if life in ("working", None) else 0.0)


@with_numbers
@pytest.mark.parametrize("is_canary", [True, False, None])
def test_a_canary_is_who_says_so(is_canary: bool | None, numbers: dict[str, float], state: str) -> None:
    plan = Plan(MASTER, Pacing(), policy="main")
    for offset, (version, channel) in enumerate(((3, "stable"), (5, "canary"))):
        event = PolicyEvent(event="promoted", policy="main", version=version, channel=channel)  # type: ignore[arg-type]
        plan.policy(event, offset)
    for second in range(60):
        plan.tick(1000 * second)
        plan.progress(said(numbers, state, "serve")(is_canary=is_canary), 1000 * second)
        plan.look_for_canary()
    assert (plan.canary.missing_s == 0.0) == (is_canary is True)
