"""Evals pinned to a version."""

from itertools import combinations

import pytest
from msgspec.structs import replace

from actors.config import EvalSuite
from actors.master.evaluation import VERSION_PASSED, EvalBook, eval_group, interval, pass_at, verdict
from schemas import Closure, Experience, Issued, Message, Score, Span, make_experience
from schemas.ids import experience_id

SUITES = (EvalSuite(suite="held-out", every=10, tasks=3),)


def book() -> EvalBook:
    return EvalBook(SUITES, policy="main")


def issue(evals: EvalBook, version: int, num: int = 3, *, attempt: int = 0, at: float = 0.0) -> None:
    for index in range(num):
        group = eval_group("held-out", version, index)
        evals.issued(
            Issued(group=group, attempt=attempt, num_episodes=1, max_tokens=5, suite="held-out", version=version), at
        )
    evals.complete("held-out", version, num)


def answer(
    version: int, index: int, score: float | None = 1.0, *, sampled_by: int | None = None, episode: int = 0
) -> Experience:
    group = eval_group("held-out", version, index)
    return make_experience(
        tokens=[1, 2, 3],
        logprobs=[-0.1, -0.2],
        messages=(Message(role="user", content="1+1="),),
        id=experience_id(group, 0, episode),
        group=group,
        episode=episode,
        group_size=episode + 1,
        suite="held-out",
        spans=(Span(start=1, stop=3, version=version if sampled_by is None else sampled_by),),
        scores=() if score is None else (Score(name="exact", value=score),),
    )


def test_an_episode_whose_environment_gave_rewards_turn_by_turn_is_right_by_their_sum() -> None:
    turns = (Score(name="exact", value=0.4, at=1), Score(name="exact", value=0.7, at=2), Score(name="odd", value=-5.0))
    assert verdict(replace(answer(10, 0), scores=turns), "exact") == pytest.approx(1.1)
    assert verdict(replace(answer(10, 0), scores=(*turns, Score(name="exact", value=0.0))), "exact") == 0.0
    assert verdict(answer(10, 0, None), "exact") == 0.0


def test_a_result_counts_correct_answers_of_all_tasks() -> None:
    evals = book()
    issue(evals, 10)
    for index, score in enumerate((1.0, 0.0, None)):
        assert not evals.ready()
        evals.scored(answer(10, index, score))
    (result,) = evals.ready()
    assert (result.num_tasks, result.num_correct, result.version, result.suite) == (3, 1, 10, "held-out")
    assert result.accuracy == pytest.approx(1 / 3)


def test_a_result_is_made_once_also_after_a_restart() -> None:
    evals = book()
    issue(evals, 10)
    for index in range(3):
        evals.scored(answer(10, index))
    (result,) = evals.ready()
    evals.published(result)
    assert not evals.ready()
    again = book()
    issue(again, 10)
    for index in range(3):
        again.scored(answer(10, index))
    again.published(result)
    again.scored(answer(10, 0))
    assert not again.ready()
    assert not again.incomplete()


def test_a_token_of_another_version_makes_the_request_missed() -> None:
    evals = book()
    issue(evals, 10)
    evals.scored(answer(10, 0))
    evals.scored(answer(10, 1, sampled_by=11))
    evals.scored(answer(10, 2))
    assert not evals.ready()
    assert evals.requests["held-out", 10].missed


def test_a_failed_sample_is_wrong_whatever_its_score_but_for_one_of_an_older_attempt() -> None:
    evals, failed = book(), replace(answer(10, 0), failure="the environment is down", spans=())
    issue(evals, 10, 1, attempt=1)
    evals.scored(failed)
    assert not evals.ready()
    evals.scored(replace(failed, attempt=1))
    assert [result.num_correct for result in evals.ready()] == [0]


def test_a_dropped_answer_counts_as_wrong_and_a_passed_version_as_missed() -> None:
    evals = book()
    issue(evals, 10, 2)
    evals.scored(answer(10, 0))
    evals.closed(Closure(group=eval_group("held-out", 10, 1), outcome="dropped", reason="too long"))
    assert [result.num_correct for result in evals.ready()] == [1]
    issue(evals, 20, 2)
    evals.closed(Closure(group=eval_group("held-out", 20, 1), outcome="dropped", reason=VERSION_PASSED))
    assert evals.requests["held-out", 20].missed


def test_versions_are_asked_for_ahead_and_never_twice() -> None:
    evals = book()
    assert evals.due(newest=0, first_version=1, lead=2) == [("held-out", 0), ("held-out", 1)]
    issue(evals, 0)
    issue(evals, 1)
    assert evals.due(newest=1, first_version=1, lead=2) == []
    assert evals.due(newest=7, first_version=1, lead=2) == []
    assert evals.due(newest=8, first_version=1, lead=2) == [("held-out", 10)]
    issue(evals, 10)
    assert evals.due(newest=10, first_version=1, lead=2) == []


def test_only_tasks_nobody_answered_are_overdue_and_only_once_their_version_is_there() -> None:
    evals = book()
    issue(evals, 10, at=1.0)
    evals.scored(answer(10, 1))
    assert evals.overdue(100.0, 5.0, newest=9) == []
    ((request, indexes),) = evals.overdue(100.0, 5.0, newest=10)
    assert (request.version, indexes) == (10, [0, 2])


def test_several_samples_of_a_task_give_pass_at_k_once_all_are_there() -> None:
    evals = EvalBook((EvalSuite(suite="held-out", tasks=2, samples=4, temperature=1.0),), policy="main")
    issue(evals, 10, 2)
    for index, right in enumerate((1, 0)):
        for episode in range(4):
            assert not evals.ready()
            evals.scored(answer(10, index, 1.0 if episode < right else 0.0, episode=episode))
    (result,) = evals.ready()
    assert (result.num_tasks, result.num_samples, result.num_correct, result.accuracy) == (2, 4, 1, 0.125)
    # one right of four: pass@2 is 1 - C(3,2)/C(4,2) = 1/2, pass@4 is 1; the other task has none
    assert result.pass_at == pytest.approx({"1": 0.125, "2": 0.25, "4": 0.5})


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer() -> None:
    for num_samples, right, k in ((5, 2, 3), (6, 1, 2), (4, 4, 1), (4, 0, 4)):
        answers = [index < right for index in range(num_samples)]
        draws = list(combinations(answers, k))
        assert pass_at(k, [right], num_samples) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_answers_to_one_task_do_not_narrow_the_interval_as_independent_ones_would() -> None:
    assert interval([8, 0, 8, 0], 8) == pytest.approx(interval([1, 0, 1, 0], 1)), "worth one answer each"
