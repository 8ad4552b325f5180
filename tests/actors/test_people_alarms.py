"""Where an assumption of the gate's tests fails, the master says so, and what to do."""

from random import Random

from actors.config import CanaryConfig, GateConfig, GateGuardConfig, PeopleConfig
from actors.master.gate.people import MANY, People, few_people, late_words
from actors.master.gate.ratings import Voice, Voices
from infra.policies.channel import Stable
from schemas import Answered, Closure, Progress
from tests.actors.rated import crowd, rated

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
ON_TRIAL = Stable(version=3, promoted=3, trial=5)


def people(share: float = 0.5) -> People:
    return People(
        GateConfig(guard=GateGuardConfig(), canary=CanaryConfig(), people=PeopleConfig(mature="1h", tenant_share=share))
    )


def alarms(one: People, said: list[Closure], at_ms: int = 10 * DAY_MS, stable: Stable = ON_TRIAL) -> list[str]:
    for closure in said:
        one.closure(closure, closure.answered_ms)
    one.progress(Progress(role="master", instance="master/1"), at_ms)
    return one.alarms(stable)


def test_nothing_is_said_where_all_is_well() -> None:
    assert alarms(people(), list(crowd("a", 5, MANY, 20, trial=5))) == []


def test_a_trial_by_few_people_is_an_alarm() -> None:
    said = [rated(f"s{number % 12}", 5, 1.0, trial=5, number=number) for number in range(MANY)]
    (alarm,) = alarms(people(), said)
    assert alarm.startswith(f"trial of version 5: {MANY} ratings are of 12 people") and "rater" in alarm


def test_delays_that_make_many_words_too_late_are_an_alarm_that_says_which() -> None:
    said = [*crowd("a", 3, MANY, 0), *crowd("b", 3, MANY, MANY, late_ms=2 * HOUR_MS)]
    (alarm,) = alarms(people(), said)
    assert alarm.startswith(f"{MANY} of {MANY} complaints and 0 of {MANY} words of praise come later than")


def test_a_rate_that_changes_by_itself_is_an_alarm() -> None:
    random, one = Random(0), people()
    said = [
        rated(
            f"p{number}",
            3,
            float(random.random() > (0.05 if day < 2 else 0.2)),
            at_ms=day * DAY_MS + number % 24 * HOUR_MS,
        )
        for day in range(3)
        for number in range(1000 * day, 1000 * day + 1000)
    ]
    one.moved(Stable(), Stable(version=5), 3 * DAY_MS)
    (alarm,) = alarms(one, said, 4 * DAY_MS, Stable(version=5, promoted=5))
    assert alarm.startswith("what people say of the stable versions changes by itself from day to day")


def test_one_tenant_that_is_almost_everybody_is_an_alarm_unless_it_may_decide_alone() -> None:
    said = [*crowd("a", 3, MANY, 0), *crowd("b", 3, 10, 0, tenant="dev")]
    (alarm,) = alarms(people(), said)
    assert alarm.startswith(f"{MANY} of {MANY + 10} people heard are of tenant ") and "tenant_share = 1" in alarm
    assert alarms(people(share=1.0), said) == []


def test_delays_and_crowds_are_alarms_from_their_bounds_on() -> None:
    assert late_words([]) == [] == late_words([[0, 0, 0, 0]])
    assert late_words([[0, 159, 0, 40]]) == [], "199 ratings are few"
    assert late_words([[100, 61, 20, 19]]) == [], "39 of 200 are few"
    assert len(late_words([[100, 60, 20, 20]])) == len(late_words([[60, 60, 20, 0], [40, 0, 0, 20]])) == 1
    for ratings, persons, is_alarm in ((200, 40, True), (199, 10, False), (200, 41, False), (1000, 200, True)):
        voices = Voices()
        voices.said = [ratings // 2, ratings - ratings // 2, 5000, 5000]
        for number in range(persons):
            voices.speak(str(number), Voice(0, "g", "acme", (5, 5), False))
        assert bool(few_people(5, voices)) is is_alarm


def test_people_are_weighed_once_in_a_block_of_time_and_anew_in_the_next() -> None:
    one = people()
    for closure in [*crowd("a", 5, 30, 5, trial=5), *crowd("b", 3, 30, 5, trial=5)]:
        one.closure(closure, 0)
    one.progress(Progress(role="master", instance="master/1"), 10 * DAY_MS)
    first, stable = one.of_trial(5, 3), one.of_stable(3)
    assert (
        (first.people, first.people_stable) == (30, 30) and one.of_trial(5, 3) is first and one.of_stable(3) is stable
    )
    told = one.alarms(ON_TRIAL)
    assert one.alarms(ON_TRIAL) is told
    for closure in crowd("c", 5, 10, 5, trial=5):
        one.closure(closure, 0)
    assert one.of_trial(5, 3) is first
    one.progress(Progress(role="master", instance="master/1"), 10 * DAY_MS + HOUR_MS)
    assert one.of_trial(5, 3).people == 40 and one.alarms(ON_TRIAL) is not told
    assert one.of_trial(5, 4).people_stable == 0


def test_a_version_is_watched_to_the_last_moment_and_compared_with_the_first_version_too() -> None:
    week_ms = 7 * DAY_MS
    for after_ms, before, is_found in ((week_ms, 0, True), (week_ms + 1, 0, False), (week_ms, -1, False)):
        one = people()
        one.moved(Stable(), Stable(version=0), 0)
        one.moved(Stable(version=0), Stable(version=5), DAY_MS)
        tallies = (
            Answered(version=5, answers=200, failed=90), Answered(version=0, answers=200, failed=1),
        )  # fmt: skip
        one.progress(Progress(role="serve", instance="serve/1", answered=tallies), DAY_MS + after_ms)
        assert (one.breached(5, before) is not None) is is_found


def test_a_trial_is_as_old_as_it_is_since_it_began_and_not_since_another_move() -> None:
    week_ms = 7 * DAY_MS
    one = people()
    one.moved(Stable(version=3), Stable(version=3, trial=5), 2 * DAY_MS)
    one.moved(Stable(version=3, trial=5), Stable(version=3, trial=5, pinned=True), 4 * DAY_MS)
    for at_ms, ended in ((2 * DAY_MS + week_ms - 1, ""), (2 * DAY_MS + week_ms, "failed")):
        one.progress(Progress(role="master", instance="master/1"), at_ms)
        assert one.tried(ON_TRIAL).ended == ended


def test_where_no_rule_ends_a_trial_nobody_asks_how_many_people_it_has() -> None:
    one = People(GateConfig(guard=GateGuardConfig(), people=PeopleConfig(mature="1h")))
    said = [rated(f"s{number % 12}", 5, 1.0, trial=5, number=number) for number in range(MANY)]
    assert alarms(one, said) == []
