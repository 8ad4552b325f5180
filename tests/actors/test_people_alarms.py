"""Where an assumption of the gate's tests fails, the master says so, and what to do."""

from random import Random

from actors.config import CanaryConfig, GateConfig, GuardConfig, PeopleConfig
from actors.people import MANY, People
from infra.weights.channel import Stable
from schemas import Closure, Progress
from tests.actors.rated import crowd, rated

DAY_MS, HOUR_MS = 86_400_000, 3_600_000
ON_TRIAL = Stable(version=3, promoted=3, trial=5)


def people(share: float = 0.5) -> People:
    return People(
        GateConfig(guard=GuardConfig(), canary=CanaryConfig(), people=PeopleConfig(mature="1h", tenant_share=share))
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
