"""The production guard: it takes back what people like less, seldom anything else, and decides alike after a restart."""

import math
from collections.abc import Iterable
from random import Random

import pytest

from actors.config import GateConfig, GateGuardConfig, GateSuite, PeopleConfig
from actors.master.gate.evidence import log_odds_ratio, log_share_ratio, wilson
from actors.master.gate.gate import Gate, policy_event
from actors.master.gate.guard import RESTLESS, GuardEvidence, Hour, before_of, breach, compared, odds_of, unrest
from actors.master.gate.ratings import Tally
from schemas import Answered, Client, Closure, EvalResult, PolicyEvent, Progress
from tests.actors.acting import breaches, decisions
from tests.actors.rated import crowd, rated

CONFIG = GateGuardConfig()
PEOPLE = PeopleConfig(mature="1h")
DAY_MS, HOUR_MS = 86_400_000, 3_600_000
PROMOTED_MS = 3 * DAY_MS
LATER_MS = PROMOTED_MS + 3 * HOUR_MS


def hours(random: Random, start: int, end: int, swing: float = 0.0, odds: float = 1.0, rise: float = 0.0) -> list[Hour]:
    """100 people an hour, of whom a tenth complains: more or fewer over the day, and more from the last day on."""
    found = []
    for hour in range(start, end):
        usual = 0.1 + swing * math.sin(2 * math.pi * hour / 24) + rise * max(0, hour - 48) / 24
        worse = odds * usual / (1 + (odds - 1) * usual)
        found.append(Hour("acme", hour, 100, sum(random.random() < worse for _ in range(100))))
    return found


def rolled_back(seed: int, *, swing: float = 0.0, odds: float = 1.0, rise: float = 0.0, end: int = 120) -> bool:
    """Whether the guard, looking every hour until `end`, ever takes a version back; three days before it are known."""
    random = Random(seed)
    before = before_of(hours(random, 0, 72, swing, 1.0, rise))
    new = hours(random, 72, end, swing, odds, rise)
    return any(
        breach(CONFIG, PEOPLE, (5, 3), compared(CONFIG, PEOPLE, new[:end], before, several=False), {}, {}) is not None
        for end in range(1, len(new) + 1)
    )


@pytest.mark.parametrize("swing", [0.0, 0.05, 0.08])
def test_a_version_as_good_as_before_is_taken_back_less_often_than_alpha_whatever_the_hour(swing: float) -> None:
    assert sum(rolled_back(seed, swing=swing) for seed in range(60)) <= 1


@pytest.mark.parametrize("swing", [0.0, 0.08])
def test_a_version_of_twice_the_odds_is_taken_back_within_two_days(swing: float) -> None:
    assert sum(rolled_back(seed, swing=swing, odds=2.0) for seed in range(30)) >= 27


def test_where_the_days_before_differ_it_keeps_customers_where_they_are() -> None:
    assert sum(rolled_back(seed, rise=0.08, end=96) for seed in range(60)) <= 1
    assert sum(unrest(hours(Random(seed), 0, 72, rise=0.08)) >= RESTLESS for seed in range(60)) >= 50
    assert sum(unrest(hours(Random(seed), 0, 72, swing=0.08)) >= RESTLESS for seed in range(60)) <= 5


def test_harm_is_twice_the_odds_or_a_tenth_more_whichever_is_less() -> None:
    assert odds_of(CONFIG, 0.02) == 2.0 and odds_of(CONFIG, 0.4) == pytest.approx(1.5)


def test_much_harm_is_found_without_knowing_the_hour() -> None:
    """One day before is known, of which one in ten complained, and now it is nine in ten."""
    before = before_of([Hour("acme", 5, 60, 6)])
    heard = compared(CONFIG, PEOPLE, [Hour("acme", 14, 30, 27)], before, several=False)
    assert heard.same_hour == 0.0 and breach(CONFIG, PEOPLE, (5, 3), heard, {}, {}) is not None
    swings = compared(CONFIG, PEOPLE, [Hour("acme", 14, 1000, 200)], before, several=False)
    assert breach(CONFIG, PEOPLE, (5, 3), swings, {}, {}) is None, "within what may be of itself"


def test_a_version_that_fails_or_refuses_more_often_is_taken_back_whatever_its_ratings() -> None:
    before = {"": Tally(answers=2000, failed=2, refused=40)}
    fails, refuses = {"": Tally(answers=300, failed=30)}, {"": Tally(answers=300, refused=60)}
    for new, words in ((fails, "failed 30 of 300 times"), (refuses, "refused 60 of 300 times")):
        found = breach(CONFIG, PEOPLE, (5, 3), GuardEvidence(), new, before)
        assert found is not None and found.reason.startswith(words)
        assert found.numbers["guard/answers"] == 300.0 and found.numbers["guard/before/answers"] == 2000.0
    assert (
        breach(CONFIG, PEOPLE, (5, 3), GuardEvidence(), {"": Tally(answers=300, failed=1, refused=6)}, before) is None
    )


def test_nothing_is_decided_before_enough_is_known_of_the_versions_before() -> None:
    new = [Hour("acme", 30, 40, 40)]
    for people, decided in ((49, False), (50, True)):
        heard = compared(CONFIG, PEOPLE, new, before_of([Hour("acme", 5, people, 0)]), several=False)
        assert (breach(CONFIG, PEOPLE, (5, 3), heard, {}, {}) is not None) is decided
    assert breach(CONFIG, PEOPLE, (5, -1), heard, {}, {}) is None


def test_the_ratios_are_the_textbooks() -> None:
    """3 of 4: (0.5 / 0.2)^3 * (0.5 / 0.8). Wilson's upper end for 0 of 50: z^2 / (n + z^2). An urn of two bad in four, of
    which two are the new one's: it has 0, 1 or 2 with chances 1, 4 and 1 of 6, and at odds of 2 with 1, 8 and 4 of 13.
    """
    assert math.isclose(log_share_ratio(3, 4, 0.2, 0.5), 2.2788685663767296)
    assert math.isclose(wilson(0, 50)[1], 1.96**2 / (50 + 1.96**2))
    chances = [(0, 1 / 6, 1 / 13), (1, 4 / 6, 8 / 13), (2, 1 / 6, 4 / 13)]
    for bad, even, worse in chances:
        assert math.isclose(log_odds_ratio(2, bad, 2, 2 - bad, 2.0), math.log(worse / even))


def gate() -> Gate:
    return Gate(GateConfig(suites={"dev": GateSuite()}, guard=CONFIG, people=PEOPLE), policy="main")


def passed(one: Gate, version: int, at_ms: int = PROMOTED_MS) -> PolicyEvent:
    one.progress(Progress(role="master", instance="master/1"), at_ms)
    one.result(EvalResult(policy="main", version=version, suite="dev", num_tasks=100, num_correct=80))
    (verdict,) = decisions(one)
    assert verdict.passed
    return policy_event(verdict, "main", 0)


def heard(one: Gate, said: Iterable[Closure], at_ms: int = LATER_MS) -> list[Closure]:
    """Give it what is said, and the time."""
    told = list(said)
    for closure in told:
        one.closure(closure, closure.answered_ms)
    one.progress(Progress(role="master", instance="master/1"), at_ms)
    return told


def promoted() -> tuple[Gate, list[PolicyEvent], list[Closure]]:
    """Version 5 after version 3, which people liked for days."""
    one = gate()
    events = [passed(one, 3, 0)]
    said = heard(one, crowd("then", 3, 100, 5, at_ms=2 * DAY_MS), PROMOTED_MS)
    return one, [*events, passed(one, 5)], said


def complaints(people: int = 30, **more: object) -> list[Closure]:
    return list(crowd("now", 5, people, people, at_ms=PROMOTED_MS + HOUR_MS, **more))


def test_customers_go_back_to_the_version_before_with_the_numbers_in_the_event() -> None:
    one, _, _ = promoted()
    heard(one, complaints(), PROMOTED_MS + HOUR_MS)
    assert breaches(one) == [], "their time is not over"
    heard(one, ())
    (found,) = breaches(one)
    event = policy_event(found, "main", 0)
    assert (event.event, event.version, event.channel, event.owner) == ("rolled_back", 3, "stable", "guard")
    assert one.stable.version == 3
    assert event.reason == "rated down by 30 of 30 people, 5 of 100 before"
    assert event.stats["guard/bad"] == 30.0 and event.stats["guard/whatever_hour"] >= math.log(4 / CONFIG.alpha)
    assert breaches(one) == [], "said once"
    one.result(EvalResult(policy="main", version=5, suite="dev", num_tasks=100, num_correct=99))
    assert decisions(one) == [], "a version taken back is not weighed again"
    one.result(EvalResult(policy="main", version=7, suite="dev", num_tasks=100, num_correct=60))
    assert [verdict.passed for verdict in decisions(one)] == [False], "compared with the version they went back to"


def test_a_restart_takes_back_nothing_twice_in_whatever_order_the_topics_are_read() -> None:
    one, events, said = promoted()
    said += heard(one, complaints())
    events += [policy_event(found, "main", 0) for found in breaches(one)]
    assert [event.event for event in events] == ["promoted", "promoted", "rolled_back"]
    for closures_first in (True, False):
        again = gate()
        heard(again, said if closures_first else ())
        for event, at_ms in zip(events, (0, PROMOTED_MS, LATER_MS), strict=True):
            again.event(event, at_ms)
        heard(again, () if closures_first else said)
        assert breaches(again) == [] and again.stable.version == 3


def test_one_raters_thumbs_down_take_no_fresh_version_back() -> None:
    for rater in ("ann", ""):
        one, _, _ = promoted()
        for number in range(200):
            session = f"s{number}" if rater else "s"
            answer = rated(session, 5, 0.0, at_ms=PROMOTED_MS + HOUR_MS, rater=rater, number=number)
            one.closure(answer, answer.answered_ms)
        heard(one, ())
        assert breaches(one) == []


def test_the_people_of_one_tenant_take_nothing_back_where_there_are_several() -> None:
    one, _, _ = promoted()
    heard(one, complaints(tenant="globex"))
    assert breaches(one) == []
    heard(one, crowd("too", 5, 20, 20, at_ms=PROMOTED_MS + HOUR_MS), LATER_MS + HOUR_MS)
    assert len(breaches(one)) == 1


def test_a_rating_that_is_withdrawn_takes_nobody_back() -> None:
    one, _, _ = promoted()
    heard(one, complaints())
    heard(one, [rated(f"now5-{number}", 5, at_ms=PROMOTED_MS + HOUR_MS, revision=1) for number in range(28)])
    assert breaches(one) == [], "2 of 2 stand, which is too few to say anything"


def served(version: int, answers: int, clients: tuple[Client, ...] = (), **more: int) -> Progress:
    told = Answered(version=version, answers=answers, clients=clients, **more)
    return Progress(role="serve", instance=f"serve/{version}", answered=(told,))


def test_what_gateways_report_takes_customers_back_too() -> None:
    one, _, _ = promoted()
    one.progress(served(3, 900, failed=1))
    one.progress(served(5, 200, failed=40))
    (found,) = breaches(one)
    assert (found.version, found.before) == (5, 3) and found.reason == "failed 40 of 200 times, version 3 1 of 900"


def test_refusals_to_one_client_take_nothing_back_and_refusals_to_all_do() -> None:
    usual = tuple(Client(client=name, sessions=450, refused=2) for name in "ab")
    for refused, number in (((45, 0), 0), ((4, 0), 0), ((20, 20), 1)):
        one, _, _ = promoted()
        one.progress(served(3, 900, usual))
        clients = tuple(
            Client(client=name, sessions=100, refused=many) for name, many in zip("ab", refused, strict=True)
        )
        one.progress(served(5, 200, clients))
        assert len(breaches(one)) == number


def test_a_pinned_version_is_left_to_whoever_pinned_it() -> None:
    one, _, _ = promoted()
    one.event(PolicyEvent(event="pinned", policy="main", version=5, channel="stable"), PROMOTED_MS)
    heard(one, complaints())
    assert breaches(one) == []


def test_a_version_is_watched_for_its_time() -> None:
    one, _, _ = promoted()
    heard(one, complaints(), PROMOTED_MS + 8 * DAY_MS)
    assert breaches(one) == []


def test_a_version_taken_back_says_nothing_of_what_is_usual() -> None:
    one, _, _ = promoted()
    heard(one, complaints())
    assert len(breaches(one)) == 1
    known = one.people.of_stable(3)
    assert (known.people_before, known.bad_before) == (100, 5), "version 5's 30 complaints are not among them"


def test_where_the_version_gone_back_to_is_rated_down_as_much_it_is_an_alarm() -> None:
    """Complaints rise from the hour of the promotion on: it is taken for the version's doing, and then it goes on."""
    one, _, _ = promoted()
    heard(one, complaints())
    assert len(breaches(one)) == 1 and one.alarms() == []
    heard(one, crowd("after", 3, 40, 40, at_ms=LATER_MS + HOUR_MS), LATER_MS + 4 * HOUR_MS)
    (alarm,) = one.alarms()
    assert breaches(one) == [] and alarm.startswith("version 3 is rated down by 40 of 40 people, 5 of 100 before")
