"""A canary's trial: what is worse is turned away, what is no worse is let through, seldom the other way round."""

import math
from random import Random

import pytest

from actors.config import CanaryConfig, GateConfig, GateGuardConfig, GateSuite, PeopleConfig
from actors.master.gate.gate import Gate, GateDecision, policy_event
from actors.master.gate.guard import Breach
from actors.master.gate.ratings import Tally
from actors.master.gate.trial import PeopleBlock, decided, evidence_of, merged, outcome, weighed
from schemas import Answered, Client, Closure, EvalResult, PolicyEvent, Progress
from tests.actors.acting import decisions
from tests.actors.rated import BLOCK_MS, crowd, rated

CONFIG = CanaryConfig()
PEOPLE = PeopleConfig(mature="1h")
STABLE, TRIAL = 3, 5
LATER_MS = 2 * 3_600_000


def gate(canary: CanaryConfig | None = CONFIG) -> Gate:
    return Gate(
        GateConfig(suites={"dev": GateSuite()}, guard=GateGuardConfig(), canary=canary, people=PEOPLE), policy="main"
    )


def weighed_by(one: Gate, version: int) -> list[GateDecision]:
    one.result(EvalResult(policy="main", version=version, suite="dev", num_tasks=100, num_correct=80))
    return decisions(one)


def begun(canary: CanaryConfig | None = CONFIG) -> Gate:
    one = gate(canary)
    weighed_by(one, STABLE), weighed_by(one, TRIAL)
    return one


def say(one: Gate, people: int, canary_down: int, stable_down: int = 0, **more: object) -> list[Closure]:
    """So many people on each side, and so many complaints."""
    said = [
        *crowd("old", STABLE, people, stable_down, trial=TRIAL, **more),
        *crowd("new", TRIAL, people, canary_down, trial=TRIAL, **more),
    ]
    for closure in said:
        one.closure(closure, closure.answered_ms)
    return said


def passes(one: Gate, at_ms: int = LATER_MS) -> list[GateDecision]:
    """What is decided at a time."""
    one.progress(Progress(role="master", instance="master/1"), at_ms)
    return decisions(one)


def drifting(random: Random, odds: float) -> list[PeopleBlock]:
    """2,000 people an hour for two days, of whom one in twenty complains, and at the end one in five; a tenth tries it."""
    blocks = []
    for index in range(288):
        usual = 0.05 + 0.15 * index / 288
        worse = odds * usual / (1 + (odds - 1) * usual)
        new_bad, old_bad = (sum(random.random() < p for _ in range(n)) for p, n in ((worse, 4), (usual, 36)))
        blocks.append(PeopleBlock("acme", index * BLOCK_MS, 4, new_bad, 36, old_bad))
    return blocks


def ends(blocks: list[PeopleBlock]) -> str:
    """What is decided first, however often one looks."""
    evidence = weighed(CONFIG, PEOPLE, merged(blocks), several=False)
    return next((ended for one in evidence if (ended := decided(CONFIG, *one))), "")


def test_a_version_that_is_no_worse_is_turned_away_less_often_than_alpha_though_complaints_rise() -> None:
    endings = [ends(drifting(Random(seed), 1.0)) for seed in range(100)]
    assert endings.count("failed") <= 1 and endings.count("") <= 1


def test_a_version_whose_odds_are_twice_as_high_is_turned_away_and_seldom_let_through_though_complaints_rise() -> None:
    endings = [ends(drifting(Random(seed), 2.0)) for seed in range(100)]
    assert endings.count("failed") >= 85 and endings.count("passed") <= 10


def test_what_is_let_through_is_let_through_by_evidence_alone_however_many_spoke() -> None:
    """As many complaints as between equal and twice the odds: nothing is decided by 400 people of each side."""
    heard = evidence_of(CONFIG, PEOPLE, [PeopleBlock("acme", 0, 400, 48, 400, 36)], several=False)
    assert math.log(CONFIG.beta) < heard.favour and heard.against < math.log(3 / CONFIG.alpha)
    assert outcome(CONFIG, PEOPLE, heard, {}, {}, 0).ended == ""


def test_a_master_that_was_away_decides_as_one_that_looked_at_every_block() -> None:
    bad, good = (
        [PeopleBlock("a", n, 9, 9, 9, 0) for n in range(3)],
        [PeopleBlock("a", 3 + n, 9, 0, 9, 9) for n in range(9)],
    )
    heard = evidence_of(CONFIG, PEOPLE, [*bad, *good], several=False)
    assert decided(CONFIG, heard.against, heard.favour) == ends([*bad, *good]) == "failed"


def test_blocks_of_too_few_people_wait_for_the_next_of_their_tenant() -> None:
    few = [
        PeopleBlock("a", 0, 1, 1, 2),
        PeopleBlock("b", 0, 0, 0, 9),
        PeopleBlock("a", 1, 0, 0, 5),
        PeopleBlock("b", 1, 2),
        PeopleBlock("a", 2, 1),
    ]
    assert merged(few) == [PeopleBlock("a", 1, 1, 1, 7), PeopleBlock("b", 1, 2, 0, 9)]


def test_what_passes_the_suites_is_tried_first_and_then_served_with_the_numbers_in_the_event() -> None:
    one = gate()
    (first,) = weighed_by(one, STABLE)
    assert first.channel == "stable", "there is nothing to compare the first version with"
    (trial,) = weighed_by(one, TRIAL)
    assert (trial.channel, trial.owner, one.stable.version, one.stable.trial) == ("canary", "gate", STABLE, TRIAL)
    assert weighed_by(one, 7) == [], "one trial at a time"
    say(one, 100, 5, stable_down=20)
    assert passes(one, 3_600_000) == [], "their time is not over"
    (passed,) = passes(one)
    event = policy_event(passed, "main", 0)
    assert (event.event, event.version, event.channel, event.owner) == ("promoted", TRIAL, "stable", "canary")
    assert event.reason == "rated down by 5 of 100 people, the stable version by 20 of 100"
    assert event.stats["trial/favour"] < math.log(CONFIG.beta)
    assert (one.stable.version, one.stable.trial) == (TRIAL, -1)
    assert [verdict.version for verdict in decisions(one)] == [7], "the next one's turn"


def test_a_canary_people_like_less_is_taken_back_and_not_tried_again() -> None:
    one = begun()
    say(one, 60, 40)
    (held,) = passes(one)
    event = policy_event(held, "main", 0)
    assert (event.event, event.version, event.channel, event.owner) == ("held", TRIAL, "stable", "canary")
    assert event.reason == "rated down by 40 of 60 people, the stable version by 0 of 60"
    assert event.stats["trial/against"] > math.log(3 / CONFIG.alpha)
    assert (one.stable.version, one.stable.trial) == (STABLE, -1)
    assert weighed_by(one, TRIAL) == []


def test_twenty_answers_of_one_person_end_no_trial() -> None:
    for rater in ("", "ann"):
        one = begun()
        say(one, 20, 2, stable_down=2)
        for number in range(20):
            session = f"s{number}" if rater else "s"
            one.closure(rated(session, TRIAL, 0.0, trial=TRIAL, rater=rater, number=number), 0)
            one.closure(rated(f"{session}/", STABLE, 1.0, trial=TRIAL, rater=rater, number=number), 0)
        assert passes(one) == [] and one.stable.trial == TRIAL


@pytest.mark.parametrize(("share", "verdicts"), [(0.5, []), (1.0, [False])])
def test_the_people_of_one_tenant_end_no_trial_where_there_are_several_and_none_may_decide_alone(
    share: float, verdicts: list[bool]
) -> None:
    people = PeopleConfig(mature="1h", tenant_share=share)
    one = Gate(GateConfig(suites={"dev": GateSuite()}, canary=CONFIG, people=people), policy="main")
    weighed_by(one, STABLE), weighed_by(one, TRIAL)
    say(one, 20, 2, stable_down=2)
    say(one, 40, 40, tenant="globex")
    assert [verdict.passed for verdict in passes(one)] == verdicts


def test_withdrawn_complaints_end_no_trial() -> None:
    one = begun()
    say(one, 60, 40)
    for number in range(40):
        one.closure(rated(f"new{TRIAL}-{number}", TRIAL, 1.0, trial=TRIAL, revision=1), 0)
    assert all(verdict.passed for verdict in passes(one))


def test_a_trial_that_stays_undecided_ends_at_its_longest_and_so_does_one_that_nobody_rates() -> None:
    for people in (0, 10):
        one = begun()
        say(one, people, 1, stable_down=1)
        assert passes(one, 7 * 86_400_000 - 1) == []
        (held,) = passes(one, 7 * 86_400_000)
        assert not held.passed and held.reason.startswith("undecided after 7d: rated down by ")


def arms(failed: int, clients: tuple[Client, ...] = ()) -> Progress:
    told = (
        Answered(version=TRIAL, trial=TRIAL, answers=100, failed=failed, clients=clients),
        Answered(version=STABLE, trial=TRIAL, answers=900),
    )
    return Progress(role="serve", instance="serve/1", answered=told)


def test_a_canary_that_fails_is_turned_away_without_a_single_rating() -> None:
    one = begun()
    one.progress(arms(25), 0)
    (held,) = decisions(one)
    assert not held.passed and held.reason == "failed 25 of 100 times, the stable version 0 of 900"


def test_answers_that_fail_one_client_alone_turn_no_canary_away() -> None:
    alone = (Client(client="a", sessions=40, failed=25), Client(client="b", sessions=60))
    both = (Client(client="a", sessions=40, failed=10), Client(client="b", sessions=60, failed=15))
    for clients, verdicts in ((alone, 0), (both, 1)):
        one = begun()
        one.progress(arms(25, clients), 0)
        assert len(decisions(one)) == verdicts


@pytest.mark.parametrize(("kind", "version"), [("promoted", 4), ("rolled_back", 2), ("pinned", 3)])
def test_a_move_by_hand_ends_the_trial(kind: str, version: int) -> None:
    one = begun()
    one.event(PolicyEvent(event=kind, policy="main", version=version, channel="stable"))  # type: ignore[arg-type]
    say(one, 60, 60)
    assert (passes(one), one.stable.version, one.stable.trial) == ([], version, -1)


def test_a_version_the_canary_cannot_load_is_not_waited_for() -> None:
    one = begun()
    one.event(PolicyEvent(event="refused", policy="main", version=TRIAL, owner="serve/7", reason="damaged"))
    (held,) = decisions(one)
    assert (held.passed, held.reason, one.stable.trial) == (False, "serve/7 refused it: damaged", -1)
    assert held.owner == "canary"


def test_a_restart_decides_a_trial_alike_in_whatever_order_the_topics_are_read() -> None:
    one = gate()
    events = [policy_event(verdict, "main", 0) for version in (STABLE, TRIAL) for verdict in weighed_by(one, version)]
    said = say(one, 30, 6, stable_down=4)
    assert passes(one) == []
    for closures_first in (True, False):
        again = gate()
        for closure in said if closures_first else ():
            again.closure(closure, closure.answered_ms)
        for event in events:
            again.event(event, 0)
        for closure in () if closures_first else said:
            again.closure(closure, closure.answered_ms)
        assert again.stable.trial == TRIAL and passes(again) == []
        for closure in [*crowd("more", TRIAL, 40, 40, trial=TRIAL), *crowd("more", STABLE, 40, 0, trial=TRIAL)]:
            again.closure(closure, 0)
        assert [verdict.passed for verdict in passes(again, LATER_MS + BLOCK_MS)] == [False]


def test_a_trial_of_the_first_version_ends_as_any_other() -> None:
    one = gate()
    weighed_by(one, STABLE)
    one.event(PolicyEvent(event="promoted", policy="main", version=0, channel="canary"))
    for closure in [*crowd("old", STABLE, 60, 0, trial=0), *crowd("new", 0, 60, 40, trial=0)]:
        one.closure(closure, 0)
    (held,) = passes(one)
    assert not held.passed and (one.stable.version, one.stable.trial) == (STABLE, -1)


def test_a_trial_begun_by_hand_without_a_rule_is_ended_by_hand() -> None:
    one = gate(canary=None)
    weighed_by(one, STABLE)
    one.event(PolicyEvent(event="promoted", policy="main", version=TRIAL, channel="canary"))
    say(one, 60, 60)
    assert passes(one) == [] and one.stable.trial == TRIAL


def test_a_tally_of_nobody_decides_nothing() -> None:
    assert (
        outcome(CONFIG, PEOPLE, evidence_of(CONFIG, PEOPLE, [], several=False), {}, {"": Tally(answers=900)}, 0).ended
        == ""
    )


def test_every_decision_is_published_under_the_lease_of_its_master() -> None:
    one = Gate(GateConfig(suites={"dev": GateSuite()}), policy="main", token=7)
    assert one.record(GateDecision(5, True, "", {})).token == 7 == one.record(Breach(5, 3, "", {})).token
    assert gate().record(GateDecision(5, True, "", {})).token == 0, "without a lease"


def test_a_refusal_of_one_trial_ends_no_later_one_and_the_first_version_may_be_the_stable_one() -> None:
    one = gate()
    weighed_by(one, 0)
    (trial,) = weighed_by(one, TRIAL)
    assert trial.channel == "canary"
    one.event(PolicyEvent(event="refused", policy="main", version=TRIAL, owner="serve/7", reason="damaged"))
    assert len(decisions(one)) == 1
    (again,) = weighed_by(one, 7)
    assert again.channel == "canary" and passes(one) == [] and one.stable.trial == 7
