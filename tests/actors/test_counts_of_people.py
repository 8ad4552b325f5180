"""What guard and trial make of counts, at their edges: who is counted, where evidence begins, and what is reported."""

import math

import pytest

from actors.config import CanaryConfig, GateGuardConfig, PeopleConfig
from actors.master.gate.evidence import against, log_odds_ratio, log_share_ratio, wilson
from actors.master.gate.guard import (
    HOUR_MS,
    LEAST_ANSWERS,
    NUM_TESTS,
    NUM_TRIAL_TESTS,
    RESTLESS,
    WINDOW_HOURS,
    Before,
    Breach,
    Fault,
    GuardedRate,
    GuardEvidence,
    Hour,
    before_of,
    breach,
    compared,
    evidence_text,
    failures,
    harmed,
    hours_of,
    is_worse,
    odds_of,
    unrest,
)  # fmt: skip
from actors.master.gate.ratings import Ratings, Tally, Voice, Voices
from actors.master.gate.trial import (
    LEAST_OF_BLOCK,
    PeopleBlock,
    TrialEvidence,
    TrialResult,
    blocks_of,
    decided,
    evidence_of,
    lets_through,
    merged,
    outcome,
    turns_away,
    weighed,
)  # fmt: skip
from tests.actors.rated import rated

GUARD, CANARY = GateGuardConfig(), CanaryConfig()
PEOPLE = PeopleConfig(mature="1h", tenant_share=0.5)
BOUND = math.log(4 / GUARD.alpha)


def test_alpha_is_shared_by_the_tests_there_are() -> None:
    assert (NUM_TESTS, NUM_TRIAL_TESTS, LEAST_ANSWERS, LEAST_OF_BLOCK, RESTLESS, WINDOW_HOURS) == (4, 3, 5, 8, 2.5, 6)
    assert HOUR_MS == 60 * 60 * 1000
    assert turns_away(CANARY) == math.log(3 / CANARY.alpha) and lets_through(CANARY) == -math.log(CANARY.beta)


def test_nothing_heard_is_nothing() -> None:
    assert GuardEvidence() == GuardEvidence(0, 0, 0, 0, 0.0, 0.0, 0.0) and TrialEvidence() == TrialEvidence(
        0, 0, 0, 0, 0.0, 0.0
    )
    assert PeopleBlock("a", 1) == PeopleBlock("a", 1, 0, 0, 0, 0) and TrialResult("") == TrialResult("", "", {})


def test_people_are_worse_off_from_the_bound_on_by_either_way_of_comparing() -> None:
    for heard in (GuardEvidence(same_hour=BOUND), GuardEvidence(whatever_hour=BOUND)):
        assert is_worse(GUARD, heard) is True
    assert is_worse(GUARD, GuardEvidence(same_hour=BOUND - 1e-9, whatever_hour=BOUND - 1e-9)) is False


def test_a_version_gives_way_to_one_before_it_that_is_another_and_there() -> None:
    bad = GuardEvidence(people=9, bad=8, people_before=7, bad_before=1, same_hour=BOUND)
    for versions in ((-1, 3), (5, -1), (5, 5)):
        assert breach(GUARD, PEOPLE, versions, bad, {}, {}) is None
    found = breach(GUARD, PEOPLE, (1, 0), bad, {}, {})
    assert found is not None and (found.version, found.before) == (1, 0)
    assert found.reason == evidence_text(bad) == "rated down by 8 of 9 people, 1 of 7 before"
    assert found.numbers["guard/people"] == 9.0 and found.numbers["guard/same_hour"] == BOUND
    assert breach(GUARD, PEOPLE, (0, 1), bad, {}, {}) is not None
    new, old = {"": Tally(100, failed=40)}, {"": Tally(100, failed=1)}
    assert breach(GUARD, PEOPLE, (5, 3), GuardEvidence(), {"": Tally(100, failed=3)}, old) is None
    assert breach(GUARD, PEOPLE, (5, 3), GuardEvidence(), new, old) == Breach(
        5, 3, "failed 40 of 100 times, version 3 1 of 100", fault_of(new, old).numbers
    )


def fault_of(new: dict[str, Tally], old: dict[str, Tally], least: int = 50, share: float = 1.0) -> Fault:
    found = harmed(failures(0.05), BOUND, least, share, new, old)
    assert found is not None
    return found


def test_what_happens_too_often_is_told_with_its_numbers() -> None:
    new, old = {"": Tally(100, failed=1, refused=40)}, {"": Tally(200, failed=1, refused=2)}
    usual = wilson(2, 200)[1]
    assert failures(0.05) == (GuardedRate("failed", 0.05), GuardedRate("refused", 0.05))
    assert fault_of(new, old) == Fault(
        "refused 40 of 100 times", "2 of 200",
        {"guard/answers": 100.0, "guard/refused": 40.0, "guard/before/answers": 200.0, "guard/before/refused": 2.0,
         "guard/log_ratio": log_share_ratio(40, 100, usual, usual + 0.05), "guard/before/highest": usual},
    )  # fmt: skip
    assert fault_of({"": Tally(100, 40, 40)}, old).reason.startswith("failed"), "the first of them"


def test_of_too_few_answers_before_nothing_is_said() -> None:
    new = {"": Tally(100, failed=90)}
    assert harmed(failures(0.05), BOUND, 50, 1.0, new, {"": Tally(49)}) is None
    assert harmed(failures(0.05), BOUND, 50, 1.0, new, {"": Tally(50)}) is not None
    assert harmed(failures(0.05), BOUND, 50, 1.0, {}, {"": Tally(50)}) is None


def test_evidence_counts_from_the_bound_on() -> None:
    new, old = {"": Tally(20, failed=9)}, {"": Tally(100, failed=1)}
    usual = wilson(1, 100)[1]
    bound = log_share_ratio(9, 20, usual, usual + 0.05)
    assert harmed(failures(0.05), bound, 50, 1.0, new, old) is not None
    assert harmed(failures(0.05), bound + 1e-9, 50, 1.0, new, old) is None


@pytest.mark.parametrize(
    ("other", "is_found"), [({"b": Tally(4)}, True), ({"b": Tally(5)}, False), ({}, True)]
)  # fmt: skip
def test_one_client_decides_alone_only_where_no_other_has_answers(other: dict[str, Tally], is_found: bool) -> None:
    new, old = {"a": Tally(100, failed=60)}, {"a": Tally(100, failed=1)}
    for now, before in ((new | other, old), (new, old | other)):
        assert (harmed(failures(0.05), BOUND, 50, 0.5, now, before) is not None) is is_found


def voice(version: int, at_ms: int, bad: bool, trial: int = -1, tenant: str = "a") -> Voice:
    return Voice(at_ms, "g", tenant, (version, trial), bad)


def test_people_are_counted_by_tenant_and_hour_before_and_after_a_promotion() -> None:
    ratings = Ratings(PEOPLE)
    for number, (version, at_ms, value, trial) in enumerate(
        [
            (3, 0, 0.0, -1), (3, HOUR_MS - 1, 1.0, -1), (4, HOUR_MS, 0.0, -1), (7, 0, 0.0, -1), (9, 0, 0.0, 9),
            (3, 0, 0.0, 9), (5, 0, 1.0, -1), (5, 2 * HOUR_MS, 0.0, -1), (3, 2 * HOUR_MS, 0.0, -1),
            (5, 3 * HOUR_MS - 1, 1.0, 9), (5, 3 * HOUR_MS, 0.0, -1),
        ]
    ):  # fmt: skip
        closure = rated(f"p{number}", version, value, at_ms=at_ms, trial=trial)
        ratings.closure(closure, at_ms)
    new, old = hours_of(ratings, 5, 2 * HOUR_MS, 3 * HOUR_MS, gone={7})
    assert [(one.hour, one.people, one.bad) for one in new] == [(2, 2, 1)]
    assert [(one.hour, one.people, one.bad) for one in old] == [(0, 4, 2), (1, 1, 1)]
    assert [(one.people, one.bad) for one in hours_of(ratings, 5, 2 * HOUR_MS, 3 * HOUR_MS)[1]] == [(5, 3), (1, 1)]


def test_the_days_before_are_told_by_hour_of_the_day() -> None:
    hours = [Hour("a", 5, 10, 1), Hour("a", 29, 20, 3), Hour("b", 5, 1, 1), Hour("a", 6, 4, 0)]
    assert before_of(hours) == Before(35, 5, 2, unrest(hours), {("a", 5): (30, 4), ("b", 5): (1, 1), ("a", 6): (4, 0)})


def test_unrest_is_pearsons_statistic_of_each_quarter_of_each_day() -> None:
    hours = [Hour("a", 5, 100, 10), Hour("a", 29, 100, 30), Hour("a", 13, 100, 20), Hour("a", 37, 100, 20)]
    spread = 100 * 0.2 * 0.8 * 0.5
    expected = (2 * (100 / spread - 1) + 2 * (0 - 1)) / math.sqrt(4 * 2.0 * 2 / 1)
    assert unrest(hours) == pytest.approx(expected)
    apart = [Hour("a", 4, 100, 10), Hour("a", 28, 100, 30), Hour("b", 5, 100, 20), Hour("b", 29, 100, 20)]
    assert unrest(apart) == pytest.approx(2 * (100 / (2 * spread) - 1) / math.sqrt(2 * 2.0 * 2 / 1)), "one quarter"
    three = [*hours[:2], Hour("a", 53, 100, 20)]
    spread = 100 * 0.2 * 0.8 * 2 / 3
    assert unrest(three) == pytest.approx((200 / spread - 3) / math.sqrt(3 * 2.0 * 3 / 2))
    assert unrest([]) == unrest(hours[:1]) == unrest([Hour("a", 5, 100, 0), Hour("a", 29, 100, 0)]) == 0.0
    assert unrest([Hour("a", 5, 4, 1), Hour("a", 29, 4, 1)]) == 0.0, "too few to say anything"


def test_a_day_has_24_hours_in_four_quarters_wherever_it_begins() -> None:
    first = unrest([Hour("a", 5, 100, 10), Hour("a", 29, 100, 30)])
    assert first > 0
    for hour in (0, 6, 12, 18, 23):
        assert unrest([Hour("a", hour, 100, 10), Hour("a", hour + 24, 100, 30)]) == first
    late, early = (
        [Hour("a", at, 100, 10), Hour("a", at + 24, 100, 30), Hour("b", at + 1, 100, 20), Hour("b", at + 25, 100, 20)]
        for at in (22, 4)
    )
    assert unrest(late) == unrest(early)
    for hours, days in (((0, 23), 1), ((23, 24), 2), ((0, 24, 47, 48), 3)):
        assert before_of([Hour("a", hour, 100, 10) for hour in hours]).days == days


def test_a_client_that_was_served_before_is_one_of_several_though_it_asks_little_now() -> None:
    new = {"a": Tally(answers=100, failed=30), "b": Tally(answers=LEAST_ANSWERS - 1)}
    old = {"a": Tally(answers=900, failed=1), "b": Tally(answers=LEAST_ANSWERS)}
    given = failures(GUARD.more_failed), BOUND, GUARD.least, 0.5
    assert harmed(*given, new, old) is None, "a alone takes no version from b"
    assert harmed(*given, {"a": new["a"]}, {"a": old["a"]}) is not None


def test_too_many_times_the_odds_is_the_lesser_of_the_two_settings() -> None:
    assert odds_of(GUARD, 0.0) == 2.0 and odds_of(GUARD, 0.5) == pytest.approx(1.5)
    assert odds_of(GateGuardConfig(harm=0.001), 0.0) == 2.0
    assert odds_of(GateGuardConfig(odds=1e9), 0.0) == pytest.approx(0.1 / 0.9 / 1e-6, rel=1e-5)
    assert odds_of(GateGuardConfig(odds=1e9), 0.95) == pytest.approx((1 - 1e-6) / 1e-6 * 0.05 / 0.95)


DAYS = [Hour("a", 5, 40, 4), Hour("a", 29, 40, 4), Hour("b", 6, 20, 2)]


def test_what_people_say_is_compared_with_the_same_hour_and_with_the_highest_there_may_be() -> None:
    new = [Hour("a", 53, 10, 5), Hour("a", 54, 3, 3), Hour("b", 54, 5, 1), Hour("b", 55, 2, 2)]
    before = before_of(DAYS)
    assert before.people == 100 and before.unrest < RESTLESS
    heard = compared(GUARD, PEOPLE, new, before, several=False)
    odds = odds_of(GUARD, 0.1)
    same = log_odds_ratio(10, 5, 80, 8, odds) + log_odds_ratio(5, 1, 20, 2, odds)
    highest = wilson(10, 100)[1] + GUARD.swing
    gross = sum(log_share_ratio(one.bad, one.people, highest, highest + GUARD.harm) for one in new)
    assert heard == GuardEvidence(20, 11, 100, 10, pytest.approx(same), pytest.approx(gross), before.unrest)
    parts = [
        sum(log_share_ratio(one.bad, one.people, highest, highest + GUARD.harm) for one in new if one.tenant == tenant)
        for tenant in "ab"
    ]
    shared = compared(GUARD, PEOPLE, [Hour("a", 53, 100, 90), *new[2:]], before, several=True)
    hours = [Hour("a", 53, 30, 29), Hour("a", 54, 9, 8), Hour("b", 53, 8, 1)]
    both = before_of([*DAYS, Hour("a", 6, 20, 2), Hour("b", 5, 40, 4)])
    odds_there = odds_of(GUARD, both.bad / both.people)
    parts_there = [
        log_odds_ratio(30, 29, 80, 8, odds_there) + log_odds_ratio(9, 8, 20, 2, odds_there),
        log_odds_ratio(8, 1, 40, 4, odds_there),
    ]
    assert compared(GUARD, PEOPLE, hours, both, several=True).same_hour == pytest.approx(
        against(parts_there, BOUND, 0.5)
    )
    assert shared.whatever_hour == pytest.approx(
        against([log_share_ratio(90, 100, highest, highest + GUARD.harm), parts[1]], BOUND, 0.5)
    )


def test_a_tenant_gives_its_share_of_what_decides_over_all_hours_together() -> None:
    """Of either hour it is less than half of the bound, of both together more."""
    before = before_of([*DAYS, Hour("a", 6, 20, 2), Hour("b", 5, 40, 4)])
    new = [Hour("a", 53, 30, 9), Hour("a", 54, 9, 6)]
    each = [compared(GUARD, PEOPLE, [hour], before, several=True).same_hour for hour in new]
    assert max(each) < 0.5 * BOUND < sum(each)
    assert compared(GUARD, PEOPLE, new, before, several=True).same_hour == pytest.approx(0.5 * BOUND)


def test_nothing_is_compared_with_too_little_or_with_days_that_differ() -> None:
    new = [Hour("a", 53, 10, 9)]
    little = before_of([Hour("a", 5, 49, 4)])
    assert compared(GUARD, PEOPLE, new, little, several=False) == GuardEvidence(10, 9, 49, 4)
    assert compared(GUARD, PEOPLE, [], before_of(DAYS), several=False).whatever_hour == 0.0
    one_day = before_of([Hour("a", 5, 50, 4)])
    alone = compared(GUARD, PEOPLE, new, one_day, several=False)
    assert alone.same_hour == 0.0 and alone.whatever_hour > 0
    restless = before_of([Hour("a", 5, 100, 1), Hour("a", 29, 100, 60)])
    assert restless.unrest >= RESTLESS
    assert compared(GUARD, PEOPLE, new, restless, several=False).same_hour == 0.0
    everybody = before_of([Hour("a", 5, 60, 57), Hour("a", 29, 60, 57)])
    assert compared(GUARD, PEOPLE, new, everybody, several=False).whatever_hour == 0.0, "nothing is higher than all"
    most = before_of([Hour("a", 5, 1000, 850)])
    all_now = [Hour("a", 53, 500, 500)]
    assert compared(GUARD, PEOPLE, all_now, most, several=False).whatever_hour == 0.0, "nor by a tenth than nine in ten"


# Trials.


def test_people_of_a_trial_are_of_both_sides_of_their_tenant_and_block_before_a_time() -> None:
    voices = Voices()
    for number, one in enumerate(
        [
            voice(5, 0, True, 5), voice(5, 9, False, 5), voice(3, 9, True, 5), voice(3, 10, False, 5),
            voice(4, 1, True, 5), voice(5, 1, True, -1), voice(3, 20, True, 5), voice(5, 1, True, 5, "b"),
        ]
    ):  # fmt: skip
        voices.speak(f"p{number}", one)
    assert blocks_of(voices, 5, 3, 10, 20) == [
        PeopleBlock("a", 0, 2, 1, 1, 1), PeopleBlock("b", 0, 1, 1, 0, 0), PeopleBlock("a", 10, 0, 0, 1, 0)
    ]  # fmt: skip
    assert blocks_of(voices, 5, 3, 10, 21)[-1] == PeopleBlock("a", 20, 0, 0, 1, 1)
    back = Voices()
    for name in "ba":
        back.speak(name, voice(5, 0, True, 5, name))
    assert [one.tenant for one in blocks_of(back, 5, 3, 10, 20)] == ["a", "b"]


def test_a_block_is_weighed_where_both_sides_are_there_and_there_are_enough() -> None:
    assert merged([PeopleBlock("a", 0, 1, 0, 7, 1)]) == [PeopleBlock("a", 0, 1, 0, 7, 1)]
    assert (
        merged([PeopleBlock("a", 0, 1, 0, 6, 1)])
        == merged([PeopleBlock("a", 0, 8)])
        == merged([PeopleBlock("a", 0, 0, 0, 8)])
        == []
    )
    three = [
        PeopleBlock("a", 0, 1, 1, 2, 1),
        PeopleBlock("a", 1, 2, 1, 0, 0),
        PeopleBlock("a", 2, 3, 2, 4, 3),
        PeopleBlock("a", 3, 8, 1, 9, 2),
    ]
    assert merged(three) == [PeopleBlock("a", 2, 6, 4, 6, 4), PeopleBlock("a", 3, 8, 1, 9, 2)]


def test_evidence_adds_up_by_tenant_and_none_gives_more_than_its_share() -> None:
    blocks = [PeopleBlock("a", 0, 20, 18, 20, 2), PeopleBlock("b", 0, 9, 1, 9, 1), PeopleBlock("a", 1, 5, 0, 5, 4)]
    logs = [log_odds_ratio(one.new, one.new_bad, one.old, one.old_bad, CANARY.odds) for one in blocks]
    alone = list(weighed(CANARY, PEOPLE, blocks, several=False))
    for at, (worse, favour) in enumerate(alone, 1):
        assert worse == favour == pytest.approx(sum(logs[:at]))
    several = list(weighed(CANARY, PEOPLE, blocks, several=True))[-1]
    parts = [logs[0] + logs[2], logs[1]]
    assert several[0] == pytest.approx(against(parts, turns_away(CANARY), 0.5))
    assert several[1] == pytest.approx(-against([-one for one in parts], lets_through(CANARY), 0.5))


def test_a_trial_is_decided_from_its_bounds_on() -> None:
    away, through = turns_away(CANARY), lets_through(CANARY)
    assert decided(CANARY, away, 0.0) == "failed" and decided(CANARY, away - 1e-9, 0.0) == ""
    assert decided(CANARY, 0.0, -through) == "passed" and decided(CANARY, 0.0, 1e-9 - through) == ""
    assert decided(CANARY, away, -through) == "failed"


def test_what_is_heard_stops_where_it_decides() -> None:
    blocks = [PeopleBlock("a", 0, 30, 28, 30, 1), PeopleBlock("a", 1, 30, 0, 30, 30)]
    heard = evidence_of(CANARY, PEOPLE, blocks, several=False)
    first = log_odds_ratio(30, 28, 30, 1, CANARY.odds)
    assert first >= turns_away(CANARY) and heard == TrialEvidence(60, 28, 60, 31, first, first)


def test_how_a_trial_stands_is_told_with_its_numbers() -> None:
    heard = TrialEvidence(10, 5, 20, 2, turns_away(CANARY), 0.0)
    words = "rated down by 5 of 10 people, the stable version by 2 of 20"
    numbers = {
        "trial/people": 10.0, "trial/bad": 5.0, "trial/people_stable": 20.0, "trial/bad_stable": 2.0,
        "trial/against": turns_away(CANARY), "trial/favour": 0.0,
    }  # fmt: skip
    assert outcome(CANARY, PEOPLE, heard, {}, {}, 0) == TrialResult("failed", words, numbers)
    liked = TrialEvidence(10, 5, 20, 2, 0.0, -lets_through(CANARY))
    assert outcome(CANARY, PEOPLE, liked, {}, {}, 0).ended == "passed"
    assert outcome(CANARY, PEOPLE, liked, {}, {}, 0).reason == words
    new, old = {"": Tally(100, failed=40)}, {"": Tally(100, failed=1)}
    assert outcome(CANARY, PEOPLE, liked, {"": Tally(100, failed=3)}, old, 0).ended == "passed"
    fails = outcome(CANARY, PEOPLE, liked, new, old, 0)
    assert (fails.ended, fails.reason) == ("failed", "failed 40 of 100 times, the stable version 1 of 100")
    assert fails.numbers["trial/people"] == 10.0 and fails.numbers["guard/answers"] == 100.0
    week_ms = 7 * 24 * HOUR_MS
    assert outcome(CANARY, PEOPLE, TrialEvidence(), {}, {}, week_ms - 1) == TrialResult("")
    assert outcome(CANARY, PEOPLE, TrialEvidence(), {}, {}, week_ms).reason == (
        "undecided after 7d: rated down by 0 of 0 people, the stable version by 0 of 0"
    )
    assert outcome(CANARY, PEOPLE, TrialEvidence(), {}, {}, week_ms).ended == "failed"
