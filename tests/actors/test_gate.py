"""The gate: a candidate becomes stable by evals and people, stays it by people, and nothing is decided twice."""

import asyncio
from random import Random

import httpx
import pytest
from msgspec.structs import replace

from actors.config import CanaryConfig, EvalSuite, GateConfig, GateSuite, MasterConfig, PeopleConfig
from actors.gateway.config import CanaryShare
from actors.gateway.http.canary import SILENT_S, Canary
from actors.master.gate.gate import Gate
from actors.master.plan import Plan
from infra.observe.metrics import Metrics
from infra.roles.process import MISSING_S
from schemas import Answered, Client, Closure, Directive, EvalResult, PolicyEvent, Progress
from schemas.fields import CANARY_MISSING, Channel, PolicyEventKind
from tests.actors.rig import BLOCK_MS, MASTER, PACING, crowd, decisions, rated, running
from tests.simulator.virtual_loop import VirtualLoop

CONFIG = GateConfig(suites={"dev": GateSuite(at_least=0.5, max_drop=0.02), "safety": GateSuite(at_least=0.9)})
CANARY = CanaryConfig(max_duration="2d", watch="1d")
STABLE, TRIAL = 3, 5
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
MANY = 200  # people


def new_gate(config: GateConfig = CONFIG) -> Gate:
    return Gate(config, policy="main")


def result(version: int, suite: str, share: float, policy: str = "main") -> EvalResult:
    """Results on a thousand tasks: the first `share` of them are right."""
    right = round(1000 * share)
    return EvalResult(
        policy=policy, version=version, suite=suite, num_tasks=1000, num_correct=right,
        right=(1,) * right + (0,) * (1000 - right), tasks="9f",
    )  # fmt: skip


def judged(gate: Gate, version: int, dev: float, safety: float = 1.0) -> list[bool]:
    gate.result(result(version, "dev", dev))
    gate.result(result(version, "safety", safety))
    return [event.event == "promoted" for event in decisions(gate)]


def event(kind: PolicyEventKind, version: int, owner: str = "ann", **more: object) -> PolicyEvent:
    fields: dict[str, object] = {"channel": "stable"} | more
    return PolicyEvent(event=kind, policy="main", version=version, owner=owner, **fields)  # type: ignore[arg-type]


def test_a_candidate_waits_for_every_suite() -> None:
    gate = new_gate()
    gate.result(result(3, "dev", 0.8))
    assert decisions(gate) == []
    gate.result(result(3, "safety", 0.95))
    (verdict,) = decisions(gate)
    assert verdict.event == "promoted" and verdict.stats == {"dev": 0.8, "safety": 0.95}
    assert gate.stable.version == 3


def test_a_candidate_below_the_bar_or_shown_to_be_worse_than_the_stable_one_is_held_with_the_reason() -> None:
    gate = new_gate()
    assert judged(gate, 3, 0.8) == [True]
    assert judged(gate, 5, 0.4) == [False]
    assert judged(gate, 7, 0.75) == [False], "five points worse than version 3"
    assert judged(gate, 9, 0.78) == [True], "two points worse is max_drop"
    assert judged(gate, 11, 0.9, safety=0.7) == [False]
    gate.result(result(13, "dev", 0.6)), gate.result(result(13, "safety", 1.0))
    (verdict,) = decisions(gate)
    assert verdict.reason == "dev: 0.600, the stable version 9 has 0.780" and verdict.stats["stable/dev"] == 0.78
    gate.result(result(15, "dev", 0.4)), gate.result(result(15, "safety", 0.7))
    (verdict,) = decisions(gate)
    assert verdict.reason == "dev: 0.400, expected at least 0.5; safety: 0.700, expected at least 0.9"


def test_of_several_candidates_the_newest_is_weighed_and_older_ones_are_left_out() -> None:
    gate = new_gate()
    for version in (3, 5):
        gate.result(result(version, "dev", 0.8)), gate.result(result(version, "safety", 1.0))
    assert [verdict.version for verdict in decisions(gate)] == [5]
    assert decisions(gate) == [] and judged(gate, 4, 0.99) == []


def test_a_version_that_the_trainer_took_back_is_neither_promoted_nor_tried_on() -> None:
    config = MasterConfig(evals=(EvalSuite(suite="dev"),), gate=GateConfig(suites={"dev": GateSuite()}))
    weighed, tried_on = (Plan(config, PACING, policy="main") for _ in range(2))
    tried_on.policy(event("promoted", STABLE), 0), tried_on.policy(event("promoted", TRIAL, channel="canary"), 1)
    for plan in (weighed, tried_on):
        plan.policy(event("published", TRIAL, manifest="m", channel="candidate", token=1), 2)
        plan.policy(event("orphaned", TRIAL, channel="candidate", token=1), 3)
        plan.result(result(TRIAL, "dev", 0.9))
    assert weighed.decide().channels == ()
    (ended,) = tried_on.decide().channels
    assert (ended.event, ended.version, ended.reason) == ("held", TRIAL, "the trainer took it back")


def test_an_overtaken_trainer_takes_no_version_back() -> None:
    config = MasterConfig(evals=(EvalSuite(suite="dev"),), gate=GateConfig(suites={"dev": GateSuite()}))
    plan = Plan(config, PACING, policy="main")
    plan.policy(event("published", 3, manifest="m", channel="candidate", token=0), 1)
    plan.policy(event("lease", 0, channel="candidate"), 2)
    plan.policy(event("published", 4, manifest="m", channel="candidate", token=2), 3)
    plan.policy(event("orphaned", 3, channel="candidate", token=0), 4)
    plan.result(result(3, "dev", 0.9))
    assert [verdict.version for verdict in plan.decide().channels] == [3]


def test_the_run_is_compared_with_the_versions_that_passed_and_with_no_other() -> None:
    gate = new_gate(GateConfig(suites={"dev": GateSuite(window=1)}, canary=CanaryConfig(watch="")))
    assert judged(gate, 3, 0.8) == judged(gate, 5, 0.8) == [True], "5 is on trial"
    for version in range(7, 20):
        assert judged(gate, version, 0.95) == [], "nothing is decided meanwhile"
    gate.event(event("promoted", 5, owner="canary"))
    assert judged(gate, 21, 0.8) == [True]
    back = new_gate(GateConfig(suites={"dev": GateSuite(window=1, total_drop=0.01)}))
    assert judged(back, 3, 0.9) == judged(back, 5, 0.9) == [True]
    for _ in ("made", "read"):
        back.event(event("rolled_back", 3, owner="watch"))
    assert judged(back, 7, 0.885) == [False], "version 3 passed"
    back.event(event("promoted", 5)), back.event(event("promoted", 2))
    assert judged(back, 9, 0.885) == [True], "ann went back to version 2, so version 5 does not count"


def test_a_restart_decides_nothing_twice_in_whatever_order_the_topics_are_read() -> None:
    gate = new_gate()
    gate.result(result(3, "dev", 0.8)), gate.result(result(3, "safety", 1.0))
    (verdict,) = decisions(gate)
    for events_first in (True, False):
        again = new_gate()
        if events_first:
            again.event(verdict)
        again.result(result(3, "dev", 0.8)), again.result(result(3, "safety", 1.0))
        again.event(verdict)
        assert decisions(again) == [] and again.stable.version == 3
        assert judged(again, 5, 0.75) == [False], "the stable version's own result is remembered"
        assert judged(again, 5, 0.8) == [], "held once"


def test_a_candidate_is_compared_with_the_version_that_somebody_went_back_to() -> None:
    gate = new_gate()
    for version, dev in ((3, 0.7), (5, 0.8), (7, 0.9)):
        assert judged(gate, version, dev) == [True]
    gate.event(event("pinned", 3))
    assert judged(gate, 9, 0.6) == [False] and judged(gate, 11, 0.7) == [True]
    gate.event(event("rolled_back", 2))
    assert judged(gate, 13, 0.6) == [True], "nothing is known of version 2 but the bar"


def test_small_drops_do_not_add_up_until_somebody_promotes_by_hand() -> None:
    gate = new_gate()
    shares = [0.9 - 0.003 * number for number in range(60)]
    verdicts = [judged(gate, version, share)[0] for version, share in enumerate(shares)]
    assert verdicts[:8] == [True] * 8 and not any(verdicts[16:])
    assert shares[gate.stable.version] > 0.85
    gate.event(event("promoted", 59))
    assert judged(gate, 61, shares[59]) == [True], "ann has looked at it"


def test_a_pin_decides_about_no_candidate() -> None:
    gate = new_gate()
    assert judged(gate, 3, 0.8) == [True]
    gate.event(event("pinned", 50))
    gate.event(event("promoted", 60, channel="candidate"))
    assert judged(gate, 5, 0.9) == [True], "neither version 50 nor 60 was weighed"


def test_no_candidate_is_tried_on_while_a_version_is_pinned_and_the_newest_is_after_it() -> None:
    gate = people_gate()
    gate.event(event("pinned", STABLE))
    assert evaluated(gate, TRIAL) == [] and gate.stable.served("canary") == STABLE
    gate.event(event("pinned", -1))
    assert [(found.version, found.channel) for found in evaluated(gate, 7)] == [(7, "canary")]


def test_a_master_that_begins_leaves_out_what_an_overtaken_one_decided_and_decides_anew() -> None:
    gate = Gate(CONFIG, policy="main", token=9)
    for offset in (4, 9):
        gate.directive(Directive(order="lease"), offset)
    gate.event(event("promoted", 3, owner="gate", token=4))
    assert gate.stable.version == -1
    gate.result(result(3, "dev", 0.8)), gate.result(result(3, "safety", 1.0))
    (verdict,) = decisions(gate)
    assert verdict.token == 9 and gate.stable.version == 3


def people_gate(canary: CanaryConfig | None = CANARY, tenant_share: float = 0.5) -> Gate:
    people = PeopleConfig(rating_window="1h", tenant_share=tenant_share)
    return new_gate(GateConfig(suites={"dev": GateSuite()}, canary=canary, people=people))


def evaluated(gate: Gate, version: int) -> list[PolicyEvent]:
    gate.result(EvalResult(policy="main", version=version, suite="dev", num_tasks=100, num_correct=80))
    return decisions(gate)


def tried(canary: CanaryConfig | None = CANARY, tenant_share: float = 0.5) -> Gate:
    """A gate with a version on trial."""
    gate = people_gate(canary, tenant_share)
    evaluated(gate, STABLE), evaluated(gate, TRIAL)
    return gate


def watched(canary: CanaryConfig = CANARY) -> Gate:
    """A gate that promoted version 5 by hand, with version 3 beside it."""
    gate = people_gate(canary)
    for version in (STABLE, TRIAL):
        gate.event(event("promoted", version), 0)
    (began,) = decisions(gate)
    assert (began.event, began.version, began.channel, began.owner) == ("promoted", STABLE, "canary", "watch")
    return gate


def say(
    gate: Gate,
    new_down: int,
    old_down: int = 0,
    *,
    trial: int = TRIAL,
    people: int = 40,
    blocks: int = 20,
    tenant: str = "acme",
) -> list[Closure]:  # fmt: skip
    """In each block so many people of either version, and so many complaints."""
    said = [
        closure
        for block in range(blocks)
        for version, down in ((TRIAL, new_down), (STABLE, old_down))
        for closure in crowd(
            f"{tenant}{block}/", version, people, down, trial=trial, at_ms=block * BLOCK_MS, tenant=tenant
        )
    ]
    for closure in said:
        gate.closure(closure, closure.answered_ms)
    return said


def served(
    gate: Gate, failed: int, *, trial: int = TRIAL, blocks: int = 20, tenants: int = 1, past: tuple[Answered, ...] = ()
) -> None:
    """In each block forty sessions of either version, and how many of the new one's fail. past: counts that do not grow."""
    for block in range(1, blocks + 1):
        told = tuple(
            Answered(
                version=version, trial=trial, answers=40 * block,
                clients=tuple(
                    Client(client=f"t{number}", sessions=40 * block, failed=bad * block if number == 0 or tenants < 3 else 0)
                    for number in range(tenants)
                ),
            )
            for version, bad in ((TRIAL, failed), (STABLE, 0))
        )  # fmt: skip
        gate.progress(Progress(role="serve", instance="serve/1", answered=(*past, *told)), block * BLOCK_MS)


def at(gate: Gate, at_ms: int) -> list[PolicyEvent]:
    """Decisions at a time."""
    gate.progress(Progress(role="master", instance="master/1"), at_ms)
    return decisions(gate)


LATER_MS = 21 * BLOCK_MS + HOUR_MS


def test_a_version_that_passes_its_evals_is_tried_and_then_served_with_the_numbers_in_the_event() -> None:
    gate = people_gate()
    (first,) = evaluated(gate, STABLE)
    assert first.channel == "stable", "there is nothing to compare the first version with"
    (trial,) = evaluated(gate, TRIAL)
    assert (trial.channel, trial.owner, gate.stable.version, gate.stable.trial) == ("canary", "gate", STABLE, TRIAL)
    assert evaluated(gate, 7) == [], "one trial at a time"
    say(gate, 2, 4), served(gate, 0)
    (passed,) = at(gate, LATER_MS)
    assert (passed.event, passed.version, passed.channel, passed.owner) == ("promoted", TRIAL, "stable", "canary")
    assert passed.reason.startswith(
        "not worse: rated down 40 of 800, failed 0 of 800, refused 0 of 800; version 3 80 of 800"
    )
    assert passed.stats["rated down/not worse"] >= 1.0 > passed.stats["rated down/worse"]
    assert (passed.stats["rated down"], passed.stats["stable/rated down"]) == (0.05, 0.1)
    (watch,) = decisions(gate)
    assert (watch.owner, watch.version, gate.stable.version, gate.stable.trial) == ("watch", STABLE, TRIAL, STABLE)


def test_a_canary_that_people_like_less_is_turned_away_and_not_tried_again() -> None:
    gate = tried()
    say(gate, 25)
    (held,) = at(gate, LATER_MS)
    assert (held.event, held.version, held.channel, held.owner) == ("held", TRIAL, "stable", "canary")
    assert held.reason.startswith("worse by more than the margin: rated down 500 of 800")
    assert (gate.stable.version, gate.stable.trial) == (STABLE, -1) and evaluated(gate, TRIAL) == []


@pytest.mark.parametrize(
    ("new_down", "old_down", "ends"), [(25, 0, "rolled_back"), (4, 4, "promoted"), (4, 25, "promoted")]
)
def test_a_watch_takes_back_a_worse_version_and_ends_where_it_is_not(new_down: int, old_down: int, ends: str) -> None:
    gate = watched()
    said = say(gate, new_down, old_down, trial=STABLE, people=80)
    served(gate, 0, trial=STABLE)
    (ended,) = at(gate, LATER_MS)
    assert (ended.event, ended.owner) == (ends, "watch")
    assert gate.stable.version == (STABLE if ends == "rolled_back" else TRIAL) and gate.stable.trial == -1
    for closure in said:
        gate.closure(closure, LATER_MS)
    assert at(gate, 2 * LATER_MS) == [], "decided once"


def test_a_watch_of_which_nothing_is_shown_ends_in_its_time_and_the_version_stays() -> None:
    gate = watched()
    assert at(gate, DAY_MS - 1) == [] and evaluated(gate, 7) == []
    (ended, *_) = at(gate, DAY_MS)
    assert (ended.version, ended.channel) == (TRIAL, "canary") and ended.reason.startswith("undecided after 1d")
    assert gate.stable.version == TRIAL and [found.version for found in decisions(gate)] == [7], "the next one's turn"


def test_a_version_is_watched_after_each_promotion_but_the_first_and_not_after_a_pin_or_a_rollback() -> None:
    gate = people_gate()
    gate.event(event("promoted", STABLE))
    assert decisions(gate) == [], "there is no version before it"
    gate.event(event("promoted", TRIAL))
    gate.event(event("pinned", TRIAL))
    assert decisions(gate) == []
    gate.event(event("rolled_back", STABLE))
    assert decisions(gate) == []
    gate = people_gate(CanaryConfig(watch=""))
    gate.event(event("promoted", STABLE)), gate.event(event("promoted", TRIAL))
    assert decisions(gate) == []


@pytest.mark.parametrize(("undecided", "kind"), [("promote", "promoted"), ("hold", "held")])
def test_an_undecided_trial_ends_as_it_is_set_and_one_that_served_nobody_is_held(undecided: str, kind: str) -> None:
    canary = CanaryConfig(max_duration="2d", undecided=undecided)  # type: ignore[arg-type]
    gate = tried(canary)
    say(gate, 1, 1, blocks=1, people=10)
    assert at(gate, 2 * DAY_MS - 1) == []
    (ended,) = at(gate, 2 * DAY_MS)
    assert ended.event == kind and ended.reason.startswith("undecided after 2d: rated down 1 of 10")
    (nobody,) = at(tried(canary), 2 * DAY_MS)
    assert nobody.event == "held"


def test_twenty_answers_of_one_person_end_no_trial() -> None:
    for rater in ("", "ann"):
        gate = tried()
        say(gate, 4, 4, blocks=1)
        for number in range(200):
            session = f"s{number}" if rater else "s"
            gate.closure(
                rated(session, TRIAL, 0.0, trial=TRIAL, rater=rater, number=number, at_ms=number * BLOCK_MS), 0
            )
        assert at(gate, 250 * BLOCK_MS) == [] and gate.stable.trial == TRIAL


@pytest.mark.parametrize(("tenant_share", "ends"), [(0.5, []), (1.0, ["held"])])
def test_one_tenant_turns_no_canary_away_where_there_are_several_unless_it_may(
    tenant_share: float, ends: list[str]
) -> None:
    gate = tried(tenant_share=tenant_share)
    say(gate, 4, 4), say(gate, 40, tenant="globex")
    assert [ended.event for ended in at(gate, LATER_MS)] == ends


@pytest.mark.parametrize(("tenants", "ends"), [(1, ["held"]), (2, ["held"]), (3, [])])
def test_failures_turn_a_canary_away_without_a_rating_and_those_of_one_tenant_of_several_do_not(
    tenants: int, ends: list[str]
) -> None:
    gate = tried()
    served(gate, 10, tenants=tenants)
    assert [ended.event for ended in at(gate, 21 * BLOCK_MS)] == ends


def test_a_trial_is_decided_however_many_trials_its_gateways_served_before() -> None:
    gate = tried()
    counted = (Client(client="acme", sessions=9),)
    past = tuple(Answered(version=1, trial=trial, answers=9, clients=counted) for trial in (-1, 0, 1, 2, 4))
    served(gate, 10, past=past)
    assert [ended.event for ended in at(gate, 21 * BLOCK_MS)] == ["held"]


def test_an_engine_that_fails_once_turns_no_canary_away() -> None:
    gate = tried()
    served(gate, 30, blocks=1)
    assert at(gate, 2 * BLOCK_MS) == []


def test_withdrawn_complaints_end_no_trial() -> None:
    gate = tried()
    for closure in say(gate, 25):
        if closure.version == TRIAL:
            gate.closure(replace(closure, revision=1, ratings=()), 0)
    assert at(gate, LATER_MS) == []


@pytest.mark.parametrize(("kind", "version"), [("promoted", 4), ("rolled_back", 2), ("pinned", 3)])
def test_a_move_by_hand_ends_the_trial(kind: PolicyEventKind, version: int) -> None:
    gate = tried(CanaryConfig(watch=""))
    gate.event(event(kind, version))
    say(gate, 25)
    assert (at(gate, LATER_MS), gate.stable.version, gate.stable.trial) == ([], version, -1)


def refusal(version: int, *, is_canary: bool = True) -> Progress:
    return Progress(role="serve", instance="serve/7", is_canary=is_canary, refused={version: "damaged"})


def test_a_version_that_the_canary_cannot_load_is_not_waited_for() -> None:
    gate = tried()
    gate.progress(refusal(TRIAL, is_canary=False), 0)
    assert decisions(gate) == []
    gate.progress(refusal(TRIAL), 0)
    (held,) = decisions(gate)
    assert (held.event, held.owner, held.reason) == ("held", "canary", "serve/7 refused it: damaged")
    (again,) = evaluated(gate, 7)
    assert again.channel == "canary" and gate.stable.trial == 7 and at(gate, LATER_MS) == []
    gate = watched()
    gate.progress(refusal(STABLE), 0)
    (ended,) = decisions(gate)
    assert (ended.channel, ended.version, gate.stable.version, gate.stable.trial) == ("canary", TRIAL, TRIAL, -1)


def alarms_after(said: list[Closure], *, promoted: bool = False) -> list[str]:
    """Alarms once this was said, in a trial or after a promotion without a canary."""
    gate = people_gate(canary=None) if promoted else tried(CanaryConfig())
    if promoted:
        gate.event(event("promoted", STABLE)), gate.event(event("promoted", TRIAL))
    for closure in said:
        gate.closure(closure, closure.answered_ms)
    gate.progress(
        Progress(role="master", instance="master/1"), max(closure.answered_ms for closure in said) + 2 * HOUR_MS
    )
    return gate.alarms()


def test_complaints_that_rise_with_a_promotion_alarm_and_take_nothing_back_where_nothing_runs_beside_it() -> None:
    said = [*crowd("a", STABLE, MANY, 10), *crowd("b", TRIAL, MANY, 100)]
    (alarm,) = alarms_after(said, promoted=True)
    assert "100 of 200 times" in alarm and "headrace rollback 3" in alarm
    assert alarms_after([*crowd("a", STABLE, MANY, 10), *crowd("b", TRIAL, MANY, 16)], promoted=True) == []


def test_a_trial_that_no_canary_serves_is_an_alarm_within_its_time_until_one_is_heard_of_or_the_trial_ends() -> None:
    plan = Plan(MASTER, PACING, policy="main")

    def looked(at_s: float) -> bool:
        plan.tick(round(at_s * 1000))
        plan.look_for_canary()
        return plan.canary.missing_s > 0

    def moved(version: int, channel: Channel) -> None:
        plan.policy(PolicyEvent(event="promoted", policy="main", version=version, channel=channel), 0)

    moved(3, "stable")
    assert not looked(1) and not looked(2 * MISSING_S), "nothing is on trial"
    moved(5, "canary")
    assert not looked(100) and not looked(100 + MISSING_S / 2) and looked(101 + MISSING_S)
    plan.progress(Progress(role="serve", instance="serve/1", is_canary=True), 140_000)
    assert not looked(141)
    assert not looked(160) and looked(161 + MISSING_S), "it was heard of once, and never again"
    moved(5, "stable")
    assert not looked(200)


def test_a_share_of_sessions_without_a_canary_is_an_alarm_within_its_time_until_it_is_there() -> None:
    loop, metrics, there = VirtualLoop(Random(0)), Metrics("serve"), False

    async def handle(request: httpx.Request) -> httpx.Response:
        if not there:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, json={"channel": "canary"})

    async def check() -> None:
        nonlocal there
        canary = Canary(CanaryShare(url="http://canary"), metrics, transport=httpx.MockTransport(handle))
        async with running(asyncio.create_task(canary.watch())):
            for wait_s, is_missing in ((MISSING_S / 2, False), (MISSING_S + SILENT_S, True), (2.0, False)):
                await asyncio.sleep(wait_s)
                assert (metrics.gauges()[CANARY_MISSING] > 0) is is_missing
                there = is_missing
        await canary.close()

    loop.run_until_complete(check())
