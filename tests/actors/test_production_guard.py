"""The production guard: it takes back what people like less, seldom anything else, and decides alike after a restart."""

from random import Random

from actors.config import GateConfig, GateSuite, GuardConfig
from actors.gate import Gate, breach_event, verdict_event
from actors.guard import Guard, Tally, highest_share, log_ratio
from schemas import Closure, EvalResult, PolicyEvent

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


def guard_with(**tallies: tuple[int, int]) -> Guard:
    guard = Guard(CONFIG)
    guard.tallies = {int(name.removeprefix("v")): Tally(rated, bad) for name, (rated, bad) in tallies.items()}
    return guard


def rolled_back_after(random: Random, share: float, num_answers: int) -> int | None:
    """How many answers of a version rated down with chance `share` the guard needs, the one before at 0.2 of 400."""
    guard = guard_with(v3=(400, 80))
    for number in range(num_answers):
        guard.closure(answer(5, float(random.random() >= share)))
        if guard.breach(5, 3) is not None:
            return number + 1
    return None


def test_a_version_people_like_less_is_taken_back_soon() -> None:
    found = [rolled_back_after(Random(seed), 0.5, 500) for seed in range(50)]
    assert None not in found and sorted(found)[25] <= 60  # type: ignore[type-var]


def test_a_version_as_good_as_the_one_before_is_taken_back_less_often_than_alpha_however_often_one_looks() -> None:
    """400 versions of 300 answers, looked at after each: 4 false alarms are expected at alpha = 0.01 at the very most."""
    alarms = [rolled_back_after(Random(seed), 0.2, 300) is not None for seed in range(400)]
    assert sum(alarms) <= 4


def test_nothing_is_decided_before_enough_is_known_of_the_version_before() -> None:
    assert guard_with(v3=(49, 0), v5=(40, 40)).breach(5, 3) is None
    assert guard_with(v3=(50, 0), v5=(40, 40)).breach(5, 3) is not None
    assert guard_with(v5=(40, 40)).breach(5, -1) is None


def test_only_what_was_said_of_production_answers_counts_and_once() -> None:
    guard = Guard(CONFIG)
    for one in (answer(5, 0.0, revision=1), answer(5, None), answer(5, 0.0, lane="usual"), answer(-1, 0.0)):
        guard.closure(one)
    assert guard.tallies == {}


def test_the_ratio_is_the_textbooks() -> None:
    """3 of 4 rated down: (0.5 / 0.2)^3 * (0.5 / 0.8); Wilson's upper end for 0 of 50 is z^2 / (n + z^2)."""
    assert abs(log_ratio(Tally(4, 3), 0.2, 0.3) - 2.2788685663767296) < 1e-12
    assert abs(highest_share(Tally(50, 0)) - 1.96**2 / (50 + 1.96**2)) < 1e-12


def gate() -> Gate:
    return Gate(GateConfig(suites={"dev": GateSuite()}, guard=CONFIG), policy="main")


def passed(one: Gate, version: int) -> PolicyEvent:
    one.result(EvalResult(policy="main", version=version, suite="dev", num_tasks=100, num_correct=80))
    (verdict,) = one.verdicts()
    assert verdict.passed
    return verdict_event(verdict, "main")


def complaints(one: Gate) -> list[Closure]:
    said = [answer(3, 1.0, number) for number in range(100)] + [answer(5, 0.0, number) for number in range(20)]
    for closure in said:
        one.closure(closure)
    return said


def test_customers_go_back_to_the_version_before_with_the_numbers_in_the_event() -> None:
    one = gate()
    passed(one, 3), passed(one, 5)
    complaints(one)
    (breach,) = one.breaches()
    event = breach_event(breach, "main")
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
    events += [breach_event(breach, "main") for breach in one.breaches()]
    for closures_first in (True, False):
        again = gate()
        for closure in said if closures_first else ():
            again.closure(closure)
        for event in events:
            again.event(event)
        for closure in () if closures_first else said:
            again.closure(closure)
        assert again.breaches() == [] and again.stable.version == 3


def test_a_pinned_version_is_left_to_whoever_pinned_it() -> None:
    one = gate()
    passed(one, 3), passed(one, 5)
    one.event(PolicyEvent(event="pinned", policy="main", version=5, channel="stable"))
    complaints(one)
    assert one.breaches() == []
