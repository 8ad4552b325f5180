"""Where an assumption of the gate's tests fails, the master says so, and what to do."""

from random import Random

import msgspec
import pytest

from actors.config import CanaryConfig, GateConfig, GateGuardConfig, PeopleConfig
from actors.master.gate.people import MANY, MAX_GONE, People, few_people, late_ratings
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


@pytest.mark.parametrize("version", [5, 0])
def test_a_trial_by_few_people_is_an_alarm(version: int) -> None:
    said = [rated(f"s{number % 12}", version, 1.0, trial=version, number=number) for number in range(MANY)]
    (alarm,) = alarms(people(), said, stable=Stable(version=3, promoted=3, trial=version))
    assert alarm.startswith(f"trial of version {version}: {MANY} ratings are of 12 people") and "rater" in alarm


def test_delays_that_make_many_words_too_late_are_an_alarm_that_says_which() -> None:
    said = [*crowd("a", 3, MANY, 0), *crowd("b", 3, MANY, MANY, late_ms=2 * HOUR_MS)]
    (alarm,) = alarms(people(), said)
    assert alarm.startswith(f"{MANY} of {MANY} complaints and 0 of {MANY} words of praise come later than")


@pytest.mark.parametrize("version", [5, 0])
def test_a_rate_that_changes_by_itself_is_an_alarm(version: int) -> None:
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
    one.moved(Stable(), Stable(version=version), 3 * DAY_MS)
    (alarm,) = alarms(one, said, 4 * DAY_MS, Stable(version=version, promoted=version))
    assert alarm.startswith("what people say of the stable versions changes by itself from day to day")


def test_one_tenant_that_is_almost_everybody_is_an_alarm_unless_it_may_decide_alone() -> None:
    said = [*crowd("a", 3, MANY, 0), *crowd("b", 3, 10, 0, tenant="dev")]
    (alarm,) = alarms(people(), said)
    assert alarm.startswith(f"{MANY} of {MANY + 10} people heard are of tenant ") and "tenant_share = 1" in alarm
    assert alarms(people(share=1.0), said) == []


@pytest.mark.parametrize(("most", "others", "is_alarm"), [(160, 40, True), (159, 41, False), (160, 39, False)])
def test_one_tenant_is_almost_everybody_from_four_in_five_of_enough_people_on(
    most: int, others: int, is_alarm: bool
) -> None:
    said = [*crowd("a", 3, most, 0), *crowd("b", 3, others, 0, tenant="dev")]
    assert len(alarms(people(), said)) == is_alarm


def test_delays_and_crowds_are_alarms_from_their_bounds_on() -> None:
    assert late_ratings([]) == [] == late_ratings([[0, 0, 0, 0]])
    assert late_ratings([[0, 159, 0, 40]]) == [], "199 ratings are few"
    assert late_ratings([[100, 61, 20, 19]]) == [], "39 of 200 are few"
    assert len(late_ratings([[100, 60, 20, 20]])) == len(late_ratings([[60, 60, 20, 0], [40, 0, 0, 20]])) == 1
    for ratings, persons, is_alarm in ((200, 40, True), (199, 10, False), (200, 41, False), (1000, 200, True)):
        voices = Voices()
        voices.counts = [ratings // 2, ratings - ratings // 2, 5000, 5000]
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


def test_without_the_guard_the_stable_version_is_not_compared_with_the_days_before() -> None:
    one = People(GateConfig(canary=CanaryConfig(), people=PeopleConfig(mature="1h")))
    assert alarms(one, list(crowd("a", 3, MANY, MANY))) == []


def test_whether_there_are_several_tenants_is_the_same_for_all_that_is_decided_in_a_block() -> None:
    one = people()
    assert alarms(one, list(crowd("a", 3, MANY, 0))) == []
    for closure in crowd("b", 3, 10, 0, tenant="dev"):
        one.closure(closure, 0)
    assert one.alarms(Stable(version=3, promoted=3)) == [], "another question, in the same block"
    assert len(alarms(one, [], 10 * DAY_MS + HOUR_MS)) == 1


def test_answers_are_weighed_in_blocks_of_the_time_that_is_set() -> None:
    """Of ten minutes, when the hour after an answer is over."""
    one, block_ms = people(), 600_000
    for at_ms in (block_ms - 1, block_ms):
        one.closure(rated(f"p{at_ms}", 5, 1.0, at_ms=at_ms, trial=5), at_ms)
    for time_ms, heard in ((block_ms - 1, 0), (block_ms, 1), (2 * block_ms - 1, 1), (2 * block_ms, 2)):
        one.progress(Progress(role="master", instance="master/1"), HOUR_MS + time_ms)
        assert one.of_trial(5, 3).people == heard


def test_the_time_is_that_of_the_newest_record_and_a_record_without_a_time_is_of_that_time() -> None:
    one = people()
    one.closure(rated("a", 5, 1.0, trial=5), 10 * DAY_MS)
    one.closure(msgspec.structs.replace(rated("b", 5, 1.0, trial=5), answered_ms=-1))
    assert one.of_trial(5, 3).people == 1, "the second answer is too young to count"
    one.closure(rated("c", 5, 1.0, trial=5), 11 * DAY_MS)
    assert one.of_trial(5, 3).people == 3


def test_versions_taken_back_say_nothing_of_what_is_usual_until_customers_come_back_to_them() -> None:
    """The oldest of more than so many are forgotten, and count again."""
    one, first = people(), Stable(version=0)
    one.moved(Stable(), first, 0)
    for version in range(1, MAX_GONE + 2):
        one.moved(first, Stable(version=version), DAY_MS)
        one.moved(Stable(version=version), first, DAY_MS)
    for version, count in ((1, 1), (2, 10), (MAX_GONE + 1, 100)):
        for closure in crowd("a", version, count, 0, at_ms=HOUR_MS):
            one.closure(closure, HOUR_MS)
    one.moved(first, Stable(version=200), 2 * DAY_MS)
    assert one.of_stable(200).people_before == 1
    one.moved(Stable(version=200), Stable(version=MAX_GONE + 1), 3 * DAY_MS)
    one.moved(Stable(version=MAX_GONE + 1), Stable(version=300), 4 * DAY_MS)
    assert one.of_stable(300).people_before == 101
