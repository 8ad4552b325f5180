"""The production guard: it takes back what people like less, seldom anything else, and decides alike after a restart."""

from random import Random

from actors.config import GateConfig, GateSuite, GuardConfig
from actors.gate import Gate, breach_event, verdict_event
from actors.guard import breach, highest_share, log_ratio
from actors.ratings import Tally
from schemas import Answered, Closure, EvalResult, PolicyEvent, Progress

CONFIG = GuardConfig(harm=0.1, alpha=0.01, least=50)


def answer(version: int, reward: float | None, number: int = 0, revision: int = 0, lane: str = "live") -> Closure:
    return Closure(
        group=f"g{version}-{number}",
        outcome="buffered",
        lane=lane,
        mean_reward=reward,
        version=version,
        revision=revision,  # type: ignore[arg-type]
    )


def rolled_back_after(random: Random, share: float, num_answers: int) -> int | None:
    """How many answers of a version rated down with chance `share` the guard needs, the one before at 0.2 of 400."""
    before, tally = Tally(rated=400, bad=80), Tally()
    for number in range(num_answers):
        tally += Tally(rated=1, bad=random.random() < share)
        if breach(CONFIG, 5, tally, 3, before) is not None:
            return number + 1
    return None


def test_a_version_people_like_less_is_taken_back_soon() -> None:
    found = [rolled_back_after(Random(seed), 0.5, 500) for seed in range(50)]
    assert None not in found and sorted(found)[25] <= 60  # type: ignore[type-var]


def test_a_version_as_good_as_the_one_before_is_taken_back_less_often_than_alpha_however_often_one_looks() -> None:
    """400 versions of 300 answers, looked at after each: 4 false alarms are expected at alpha = 0.01 at the very most."""
    alarms = [rolled_back_after(Random(seed), 0.2, 300) is not None for seed in range(400)]
    assert sum(alarms) <= 4


def test_a_version_that_fails_or_refuses_more_often_is_taken_back_whatever_its_ratings() -> None:
    before = Tally(answers=2000, failed=2, refused=40)
    fails, refuses = Tally(answers=300, failed=30), Tally(answers=300, refused=60)
    for tally, words in ((fails, "failed 30 of 300 times"), (refuses, "refused 60 of 300 times")):
        found = breach(CONFIG, 5, tally, 3, before)
        assert found is not None and found.reason.startswith(words)
        assert found.numbers["guard/answers"] == 300.0 and found.numbers["guard/before/answers"] == 2000.0
    assert breach(CONFIG, 5, Tally(answers=300, failed=1, refused=6), 3, before) is None


def test_nothing_is_decided_before_enough_is_known_of_the_version_before() -> None:
    bad = Tally(rated=40, bad=40)
    assert breach(CONFIG, 5, bad, 3, Tally(rated=49)) is None
    assert breach(CONFIG, 5, bad, 3, Tally(rated=50)) is not None
    assert breach(CONFIG, 5, bad, -1, Tally()) is None


def test_the_ratio_is_the_textbooks() -> None:
    """3 of 4 rated down: (0.5 / 0.2)^3 * (0.5 / 0.8); Wilson's upper end for 0 of 50 is z^2 / (n + z^2)."""
    assert abs(log_ratio(3, 4, 0.2, 0.3) - 2.2788685663767296) < 1e-12
    assert abs(highest_share(0, 50) - 1.96**2 / (50 + 1.96**2)) < 1e-12


def gate() -> Gate:
    return Gate(GateConfig(suites={"dev": GateSuite()}, guard=CONFIG), policy="main")


def passed(one: Gate, version: int) -> PolicyEvent:
    one.result(EvalResult(policy="main", version=version, suite="dev", num_tasks=100, num_correct=80))
    (verdict,) = one.verdicts()
    assert verdict.passed
    return verdict_event(verdict, "main", 0)


def complaints(one: Gate) -> list[Closure]:
    said = [answer(3, 1.0, number) for number in range(100)] + [answer(5, 0.0, number) for number in range(20)]
    for closure in said:
        one.closure(closure)
    return said


def test_customers_go_back_to_the_version_before_with_the_numbers_in_the_event() -> None:
    one = gate()
    passed(one, 3), passed(one, 5)
    complaints(one)
    (found,) = one.breaches()
    event = breach_event(found, "main", 0)
    assert (event.event, event.version, event.owner, one.stable.version) == ("rolled_back", 3, "guard", 3)
    assert event.reason == "rated down 20 of 20 times, version 3 0 of 100"
    assert event.stats["guard/bad"] == 20.0 and event.stats["guard/log_ratio"] >= 4.6
    assert one.breaches() == [], "said once"
    one.result(EvalResult(policy="main", version=5, suite="dev", num_tasks=100, num_correct=99))
    assert one.verdicts() == [], "a version taken back is not weighed again"
    one.result(EvalResult(policy="main", version=7, suite="dev", num_tasks=100, num_correct=70))
    assert [verdict.passed for verdict in one.verdicts()] == [False], "compared with the version they went back to"


def test_a_restart_takes_back_nothing_twice_in_whatever_order_the_topics_are_read() -> None:
    one = gate()
    events = [passed(one, 3), passed(one, 5)]
    said = complaints(one)
    events += [breach_event(found, "main", 0) for found in one.breaches()]
    for closures_first in (True, False):
        again = gate()
        for closure in said if closures_first else ():
            again.closure(closure)
        for event in events:
            again.event(event)
        for closure in () if closures_first else said:
            again.closure(closure)
        assert again.breaches() == [] and again.stable.version == 3


def test_a_rating_that_is_withdrawn_takes_nobody_back() -> None:
    one = gate()
    passed(one, 3), passed(one, 5)
    said = [answer(3, 1.0, number) for number in range(100)] + [answer(5, 0.0, number) for number in range(10)]
    said += [answer(5, None, number, revision=1) for number in range(9)]
    said += [answer(5, 0.0, number) for number in range(10, 13)]
    for closure in said:
        one.closure(closure)
    assert one.breaches() == [], "4 of 4 stand, which is too few to say anything"


def test_what_gateways_report_takes_customers_back_too() -> None:
    one = gate()
    passed(one, 3), passed(one, 5)
    for told in (Answered(version=3, answers=900, failed=1), Answered(version=5, answers=200, failed=40)):
        one.progress(Progress(role="serve", instance="serve/1", answered=(told,)))
    (found,) = one.breaches()
    assert (found.version, found.before) == (5, 3) and found.reason == "failed 40 of 200 times, version 3 1 of 900"


def test_a_pinned_version_is_left_to_whoever_pinned_it() -> None:
    one = gate()
    passed(one, 3), passed(one, 5)
    one.event(PolicyEvent(event="pinned", policy="main", version=5, channel="stable"))
    complaints(one)
    assert one.breaches() == []
