"""The gate: a candidate becomes stable by its evals alone, and nothing is decided twice."""

import pytest

from actors.config import EvalSuite, GateConfig, GateGuardConfig, GateSuite, MasterConfig
from actors.master.gate.gate import REMEMBERED, Gate, policy_event
from schemas import Answered, Directive, EvalResult, PolicyEvent, Progress
from tests.actors.acting import decisions

CONFIG = GateConfig(suites={"dev": GateSuite(at_least=0.5, max_drop=0.02), "safety": GateSuite(at_least=0.9)})


def gate(config: GateConfig = CONFIG) -> Gate:
    return Gate(config, policy="main")


def result(version: int, suite: str, share: float, policy: str = "main") -> EvalResult:
    """Of a thousand tasks the first so many are right."""
    right = round(1000 * share)
    return EvalResult(
        policy=policy, version=version, suite=suite, num_tasks=1000, num_correct=right,
        right=(1,) * right + (0,) * (1000 - right), tasks="9f",
    )  # fmt: skip


def judged(one: Gate, version: int, dev: float, safety: float = 1.0) -> list[bool]:
    one.result(result(version, "dev", dev))
    one.result(result(version, "safety", safety))
    return [verdict.passed for verdict in decisions(one)]


def test_a_candidate_waits_for_every_suite() -> None:
    one = gate()
    one.result(result(3, "dev", 0.8))
    assert decisions(one) == []
    one.result(result(3, "safety", 0.95))
    (verdict,) = decisions(one)
    assert verdict.passed and verdict.numbers == {"dev": 0.8, "safety": 0.95}
    assert one.stable.version == 3


def test_a_candidate_below_the_bar_or_worse_than_the_stable_one_is_held_with_the_reason() -> None:
    one = gate()
    assert judged(one, 3, 0.8) == [True]
    assert judged(one, 5, 0.4) == [False]
    assert judged(one, 7, 0.77) == [False], "three points worse than version 3"
    assert judged(one, 9, 0.79) == [True], "one point worse is within max_drop"
    assert judged(one, 11, 0.9, safety=0.7) == [False]
    assert one.stable.version == 9
    one.result(result(13, "dev", 0.6))
    one.result(result(13, "safety", 1.0))
    (verdict,) = decisions(one)
    assert verdict.reason == "dev: 0.600, the stable version 9 has 0.790"
    assert verdict.numbers["stable/dev"] == 0.79
    one.result(result(15, "dev", 0.4)), one.result(result(15, "safety", 0.7))
    (verdict,) = decisions(one)
    assert verdict.reason == "dev: 0.400, expected at least 0.5; safety: 0.700, expected at least 0.9"


def test_a_first_candidate_may_be_just_as_good_as_the_bar_and_is_held_below_it() -> None:
    one = gate()
    assert judged(one, 0, 0.499) == [False] and one.stable.version == -1
    assert judged(one, 1, 0.5, safety=0.9) == [True] and one.stable.version == 1


def test_of_several_candidates_the_newest_is_weighed_and_older_ones_are_left_out() -> None:
    one = gate()
    for version in (3, 5):
        one.result(result(version, "dev", 0.8))
        one.result(result(version, "safety", 1.0))
    assert [verdict.version for verdict in decisions(one)] == [5]
    assert decisions(one) == []
    assert judged(one, 4, 0.99) == []


def test_a_restart_weighs_no_version_again_that_was_held() -> None:
    one = gate()
    one.result(result(3, "dev", 0.4)), one.result(result(3, "safety", 1.0))
    (verdict,) = decisions(one)
    again = gate()
    again.event(policy_event(verdict, "main", 0))
    assert judged(again, 3, 0.4) == [] and judged(again, 4, 0.8) == [True]


def test_a_restart_decides_nothing_twice_in_whatever_order_the_topics_are_read() -> None:
    one = gate()
    one.result(result(3, "dev", 0.8))
    one.result(result(3, "safety", 1.0))
    (verdict,) = decisions(one)
    event = policy_event(verdict, "main", 0)
    for events_first in (True, False):
        again = gate()
        if events_first:
            again.event(event)
        again.result(result(3, "dev", 0.8))
        again.result(result(3, "safety", 1.0))
        again.event(event)
        assert decisions(again) == [] and again.stable.version == 3
        assert judged(again, 5, 0.77) == [False], "the stable version's own result is remembered"


def test_a_version_somebody_promoted_by_hand_is_the_one_to_compare_with() -> None:
    one = gate()
    assert judged(one, 3, 0.9) == [True]
    assert judged(one, 5, 0.7) == [False]
    one.event(PolicyEvent(event="rolled_back", policy="main", version=2, channel="stable"))
    assert judged(one, 7, 0.7) == [True], "of version 2 nothing is known but the bar"


def test_a_version_is_compared_with_the_older_one_that_somebody_went_back_to() -> None:
    one = gate()
    for version, dev in ((3, 0.7), (5, 0.8), (7, 0.9)):
        assert judged(one, version, dev) == [True]
    one.event(PolicyEvent(event="pinned", policy="main", version=3, channel="stable"))
    assert judged(one, 9, 0.6) == [False]
    assert judged(one, 11, 0.7) == [True]


def test_small_drops_do_not_add_up_until_somebody_says_that_all_is_well() -> None:
    one = gate()
    shares = [0.9 - 0.003 * number for number in range(60)]
    verdicts = [judged(one, version, share)[0] for version, share in enumerate(shares)]
    assert verdicts[:8] == [True] * 8 and not any(verdicts[15:])
    assert one.stable.version == sum(verdicts) - 1 and shares[one.stable.version] > 0.855
    one.event(PolicyEvent(event="promoted", policy="main", version=59, channel="stable", owner="ann"))
    assert judged(one, 61, shares[59]) == [True], "ann has looked at it"


def test_without_suites_the_gate_decides_nothing() -> None:
    one = gate(GateConfig())
    one.result(result(3, "dev", 1.0))
    assert decisions(one) == []


def test_results_of_another_policy_are_not_its_business() -> None:
    one = gate(GateConfig(suites={"dev": GateSuite()}))
    one.result(result(3, "dev", 1.0, policy="reward-model"))
    assert decisions(one) == []


def test_a_gate_on_a_suite_that_is_never_run_is_a_settings_error() -> None:
    with pytest.raises(ValueError, match="safety"):
        MasterConfig(gate=GateConfig(suites={"safety": GateSuite()}), evals=(EvalSuite(suite="dev"),))


def test_a_pin_decides_about_no_candidate() -> None:
    one = gate()
    assert judged(one, 3, 0.8) == [True]
    one.event(PolicyEvent(event="pinned", policy="main", version=50, channel="stable", owner="ann"))
    one.event(PolicyEvent(event="promoted", policy="main", version=60, channel="candidate", owner="ann"))
    assert judged(one, 5, 0.9) == [True], "neither version 50 nor 60 was weighed"


def test_the_run_is_compared_with_the_best_of_it_from_the_first_version_on_or_from_one_promoted_by_hand() -> None:
    """Each candidate is two points worse than the one before, which is within max_drop; two steps are too many."""
    one = gate(GateConfig(suites={"dev": GateSuite(max_drop=0.02, total_drop=0.03, over=1)}))
    found = [result(version, "dev", 0.9 - 0.02 * version) for version in range(6)]
    for version, passes in ((0, True), (1, True), (2, False)):
        one.result(found[version])
        assert [verdict.passed for verdict in decisions(one)] == [passes]
    one.event(PolicyEvent(event="promoted", policy="main", version=2, channel="stable", owner="ann"))
    for version, passes in ((3, True), (4, False)):
        one.result(found[version])
        assert [verdict.passed for verdict in decisions(one)] == [passes]


@pytest.mark.parametrize(("version", "is_known"), [(0, True), (9, False), (10, True)])
def test_results_are_kept_of_the_stable_version_and_of_so_many_that_were_weighed_last(
    version: int, is_known: bool
) -> None:
    """Of 0 to 1010, and 1000 are remembered beside what is served and what was weighed just now."""
    one = gate(GateConfig(suites={"dev": GateSuite()}))
    one.event(PolicyEvent(event="pinned", policy="main", version=0, channel="stable", owner="ann"))
    newest = REMEMBERED + 10
    found = {number: EvalResult(policy="main", version=number, suite="dev", num_tasks=10, num_correct=9)
             for number in range(newest + 2)}  # fmt: skip
    for number in range(newest + 1):
        one.result(found[number])
    assert [verdict.version for verdict in decisions(one)] == [newest]
    one.event(PolicyEvent(event="pinned", policy="main", version=version, channel="stable", owner="ann"))
    one.result(found[newest + 1])
    (verdict,) = decisions(one)
    assert ("stable/dev" in verdict.numbers) is is_known


def test_what_was_served_is_kept_of_the_stable_version_and_the_one_before_it() -> None:
    one = gate(GateConfig(suites=CONFIG.suites, guard=GateGuardConfig()))
    told = tuple(Answered(version=version, answers=9) for version in (3, 5, 7))
    one.progress(Progress(role="serve", instance="serve/1", answered=told))
    for version in (3, 5, 7):
        assert judged(one, version, 0.8) == [True]
    assert [len(one.people.ratings.of_version(version)) for version in (3, 5, 7)] == [0, 1, 1]


def test_a_master_that_begins_leaves_out_what_an_overtaken_one_decided_and_decides_anew() -> None:
    one = Gate(CONFIG, policy="main", token=9)
    for offset in (4, 9):
        one.directive(Directive(order="lease"), offset)
    late = PolicyEvent(event="promoted", policy="main", version=3, token=4, channel="stable", owner="gate")
    one.event(late)
    assert one.stable.version == -1
    assert judged(one, 3, 0.8) == [True] and one.stable.version == 3
