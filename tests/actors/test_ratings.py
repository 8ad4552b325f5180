"""What is known of how versions served: every answer once, as it stands, in whatever order it is told."""

from random import Random

from actors.ratings import Ratings, Tally
from schemas import Answered, Closure, Progress


def closed(group: str, reward: float | None, revision: int = 0, *, version: int = 5, trial: int = -1) -> Closure:
    lane = "human" if revision > 1 else "live"
    return Closure(
        group=group, outcome="buffered", lane=lane, mean_reward=reward, revision=revision, version=version, trial=trial
    )


def reported(answers: int, failed: int = 0, *, instance: str = "serve/1/a", version: int = 5) -> Progress:
    told = Answered(version=version, answers=answers, failed=failed, refused=1)
    return Progress(role="serve", instance=instance, answered=(told,))


def after(*closures: Closure) -> Ratings:
    ratings = Ratings()
    for closure in closures:
        ratings.closure(closure)
    return ratings


def test_a_revised_rating_counts_as_it_stands_and_a_withdrawn_one_not_at_all() -> None:
    down = closed("g", 0.0)
    assert after(down).of_version(5) == Tally(rated=1, bad=1)
    assert after(down, closed("g", 1.0, 1)).of_version(5) == Tally(rated=1)
    assert after(down, closed("g", None, 1)).of_version(5) == Tally()
    assert after(down, closed("g", None, 1), closed("g", 0.2, 2)).of_version(5) == Tally(rated=1, bad=1)
    assert after(closed("g", None), closed("g", 0.0, 1)).of_version(5) == Tally(rated=1, bad=1), "rated late"


def test_a_closure_that_comes_twice_counts_once() -> None:
    once = [closed("g", 0.0), closed("g", 1.0, 1), closed("h", 0.0)]
    assert after(*once, *once).of_version(5) == after(*once).of_version(5) == Tally(rated=2, bad=1)


def test_only_production_answers_count() -> None:
    usual = Closure(group="t.0", outcome="buffered", lane="usual", mean_reward=0.0, version=5)
    edited = Closure(group="e", outcome="buffered", lane="human", mean_reward=0.0, version=5, revision=1)
    assert after(usual, edited, closed("x", 0.0, version=-1)).of_version(5) == Tally()


def test_what_a_gateway_reports_is_counted_once_and_gateways_add_up() -> None:
    ratings = Ratings()
    for told in (reported(10), reported(30, 2), reported(20, 1), reported(5, instance="serve/1/b")):
        ratings.progress(told)
    assert ratings.of_version(5) == Tally(answers=35, failed=2, refused=2)


def test_the_order_of_reports_and_of_different_answers_changes_no_count() -> None:
    told = [closed(f"g{number}", number % 3 / 2, trial=7) for number in range(20)]
    reports = [reported(number) for number in range(10)]
    counted = set()
    for seed in range(20):
        mixed: list[Closure | Progress] = [*told, *reports]
        Random(seed).shuffle(mixed)
        ratings = Ratings()
        for one in mixed:
            ratings.closure(one) if isinstance(one, Closure) else ratings.progress(one)
        counted.add((repr(ratings.of_version(5)), repr(ratings.of_arm(5, 7))))
    assert len(counted) == 1


def test_the_sides_of_a_trial_are_kept_apart_and_in_the_order_of_their_ratings() -> None:
    sides = [
        closed("a", 0.0, trial=7),
        closed("b", 1.0, version=7, trial=7),
        closed("c", 1.0, trial=7),
        closed("d", 0.0),
    ]
    ratings = after(*sides, closed("a", 1.0, 1, trial=7), closed("e", 0.0, trial=7))
    assert ratings.of_arm(5, 7) == Tally(rated=3, bad=1) and ratings.of_arm(7, 7) == Tally(rated=1)
    assert ratings.in_order(5, 7) == [False, False, True]
    ratings.closure(closed("c", None, 1, trial=7))
    assert ratings.in_order(5, 7) == [False, True]


def test_what_nothing_is_compared_with_any_more_is_forgotten_and_what_comes_next_is_not() -> None:
    ratings = after(closed("a", 0.0, version=3), closed("b", 0.0, version=5), closed("c", 0.0, version=9))
    ratings.progress(reported(4, version=3))
    ratings.forget({4, 5})
    assert [ratings.of_version(version).rated for version in (3, 5, 9)] == [0, 1, 1]
    assert ratings.of_version(3).answers == 0
