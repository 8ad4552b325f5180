"""A canary's trial: what is worse is turned away, what is no worse is let through, seldom the other way round."""

import math
from random import Random

import pytest

from actors.config import CanaryConfig, GateConfig, GateSuite, GuardConfig
from actors.gate import Gate, Verdict, verdict_event
from actors.ratings import Ratings
from actors.trial import Outcome, log_odds, outcome, pairs
from schemas import Answered, Closure, EvalResult, PolicyEvent, Progress

CONFIG = CanaryConfig()
STABLE, TRIAL = 3, 5


def rated(number: int, version: int, down: bool, revision: int = 0, trial: int = TRIAL) -> Closure:
    return Closure(
        group=f"g{version}-{number}", outcome="buffered", lane="live", mean_reward=0.0 if down else 1.0,
        version=version, trial=trial, revision=revision,
    )  # fmt: skip


def tried(random: Random, canary: float, stable: float, share: float = 0.2) -> Outcome:
    """A trial by 6,000 rated answers at most, looked at after every one of the canary's."""
    ratings = Ratings()
    for number in range(6000):
        drawn = random.random() < share
        version = TRIAL if drawn else STABLE
        ratings.closure(rated(number, version, random.random() < (canary if drawn else stable)))
        if drawn and (found := outcome(CONFIG, ratings, TRIAL, STABLE)).ended:
            return found
    return Outcome("")


def test_a_version_that_is_no_worse_is_turned_away_less_often_than_alpha_however_often_one_looks() -> None:
    endings = [tried(Random(seed), 0.2, 0.2).ended for seed in range(60)]
    assert endings.count("failed") <= 2 and endings.count("") == 0


def test_a_version_whose_odds_are_much_worse_is_let_through_less_often_than_beta() -> None:
    """0.4 against 0.2: odds 2.7 times as high, where 2 is looked for."""
    endings = [tried(Random(seed), 0.4, 0.2).ended for seed in range(60)]
    assert endings.count("failed") >= 55 and endings.count("") == 0


def test_a_version_nobody_complains_of_is_let_through_after_enough_ratings() -> None:
    found = tried(Random(1), 0.0, 0.0)
    assert found.ended == "passed" and found.numbers["canary/rated"] == CONFIG.enough


def test_only_pairs_that_differ_speak_and_the_ratio_is_the_textbooks() -> None:
    """q = 2/3: three worse and one better give (4/3)^3 * (2/3)."""
    assert pairs([True, True, False, False, True], [True, False, True, False]) == (1, 1)
    assert math.isclose(log_odds(3, 1, 2.0), 3 * math.log(4 / 3) + math.log(2 / 3))


def test_a_canary_that_fails_is_turned_away_without_a_single_rating() -> None:
    ratings = Ratings()
    arms = (
        Answered(version=TRIAL, trial=TRIAL, answers=100, failed=25),
        Answered(version=STABLE, trial=TRIAL, answers=900),
    )
    ratings.progress(Progress(role="serve", instance="serve/1", answered=arms))
    found = outcome(CONFIG, ratings, TRIAL, STABLE)
    assert found.ended == "failed" and found.reason == "failed 25 of 100 times, version 3 0 of 900"


def gate(canary: CanaryConfig | None = CONFIG) -> Gate:
    return Gate(GateConfig(suites={"dev": GateSuite()}, guard=GuardConfig(), canary=canary), policy="main")


def weighed(one: Gate, version: int) -> list[Verdict]:
    one.result(EvalResult(policy="main", version=version, suite="dev", num_tasks=100, num_correct=80))
    return one.verdicts()


def say(one: Gate, num: int, canary_down: int, trial: int = TRIAL) -> list[Closure]:
    """So many rated answers of each side, the canary's with so many complaints."""
    said = [rated(number, STABLE, False, trial=trial) for number in range(num)]
    said += [rated(number, trial, number < canary_down, trial=trial) for number in range(num)]
    for closure in said:
        one.closure(closure)
    return said


def test_what_passes_the_suites_is_tried_first_and_then_served_with_the_numbers_in_the_event() -> None:
    one = gate()
    (first,) = weighed(one, STABLE)
    assert first.channel == "stable", "there is nothing to compare the first version with"
    (begun,) = weighed(one, TRIAL)
    assert (begun.channel, begun.owner, one.stable.version, one.stable.trial) == ("canary", "gate", STABLE, TRIAL)
    assert weighed(one, 7) == [], "one trial at a time"
    say(one, CONFIG.enough, 0)
    (passed,) = one.verdicts()
    event = verdict_event(passed, "main", 0)
    assert (event.event, event.version, event.channel, event.owner) == ("promoted", TRIAL, "stable", "canary")
    assert event.reason == "rated down 0 of 400 times, version 3 0 of 400" and event.stats["pairs/worse"] == 0.0
    assert (one.stable.version, one.stable.trial) == (TRIAL, -1)
    assert [verdict.version for verdict in one.verdicts()] == [7], "the next one's turn"


def test_a_canary_people_like_less_is_taken_back_and_not_tried_again() -> None:
    one = gate()
    weighed(one, STABLE), weighed(one, TRIAL)
    say(one, 60, 40)
    (held,) = one.verdicts()
    event = verdict_event(held, "main", 0)
    assert (event.event, event.version, event.channel, event.owner) == ("held", TRIAL, "stable", "canary")
    assert event.reason == "rated down 40 of 60 times, version 3 0 of 60"
    assert event.stats["pairs/worse"] == 40.0 and event.stats["pairs/log_ratio"] > math.log(3 / CONFIG.alpha)
    assert (one.stable.version, one.stable.trial) == (STABLE, -1)
    assert weighed(one, TRIAL) == []


def test_withdrawn_complaints_end_no_trial() -> None:
    one = gate()
    weighed(one, STABLE), weighed(one, TRIAL)
    said = [rated(number, STABLE, False) for number in range(60)]
    said += [rated(number, TRIAL, number < 40) for number in range(60)]
    said += [rated(number, TRIAL, False, revision=1) for number in range(40)]
    for closure in said:
        one.closure(closure)
    assert one.verdicts() == [] and one.stable.trial == TRIAL


@pytest.mark.parametrize(("kind", "version"), [("promoted", 4), ("rolled_back", 2), ("pinned", 3)])
def test_a_move_by_hand_ends_the_trial(kind: str, version: int) -> None:
    one = gate()
    weighed(one, STABLE), weighed(one, TRIAL)
    one.event(PolicyEvent(event=kind, policy="main", version=version, channel="stable"))  # type: ignore[arg-type]
    say(one, 60, 60)
    assert (one.verdicts(), one.stable.version, one.stable.trial) == ([], version, -1)


def test_a_version_the_canary_cannot_load_is_not_waited_for() -> None:
    one = gate()
    weighed(one, STABLE), weighed(one, TRIAL)
    one.event(PolicyEvent(event="refused", policy="main", version=TRIAL, owner="serve/7", reason="damaged"))
    (held,) = one.verdicts()
    assert (held.passed, held.reason, one.stable.trial) == (False, "serve/7 refused it: damaged", -1)


def test_a_restart_decides_a_trial_alike_in_whatever_order_the_topics_are_read() -> None:
    one = gate()
    events = [verdict_event(verdict, "main", 0) for version in (STABLE, TRIAL) for verdict in weighed(one, version)]
    said = say(one, 30, 12)
    for closures_first in (True, False):
        again = gate()
        for closure in said if closures_first else ():
            again.closure(closure)
        for event in events:
            again.event(event)
        for closure in () if closures_first else said:
            again.closure(closure)
        assert again.stable.trial == TRIAL and again.verdicts() == one.verdicts() == []
        again.closure(rated(99, STABLE, False))
        more = [rated(number, TRIAL, True) for number in range(100, 130)]
        more += [rated(number, STABLE, False) for number in range(100, 130)]
        for closure in more:
            again.closure(closure)
        assert [verdict.passed for verdict in again.verdicts()] == [False]


def test_a_trial_begun_by_hand_without_a_rule_is_ended_by_hand() -> None:
    one = gate(canary=None)
    weighed(one, STABLE)
    one.event(PolicyEvent(event="promoted", policy="main", version=TRIAL, channel="canary"))
    say(one, 60, 60)
    assert one.verdicts() == [] and one.stable.trial == TRIAL
