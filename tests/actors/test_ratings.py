"""What is known of how versions served: every person once, as they stand, in whatever order it is told."""

from random import Random

import pytest
from msgspec.structs import replace

from actors.config import PeopleConfig
from actors.master.gate.ratings import (
    DAY_MS,
    LEAST_OF_TENANT,
    MAX_ANSWERS,
    MAX_DAYS,
    MAX_TRIALS,
    MAX_VOICES,
    RatedAnswer,
    Ratings,
    Tally,
    Voice,
    Voices,
    person_of,
    place_of_person,
    ratings_of,
)  # fmt: skip
from schemas import Answered, Client, Closure, Progress, Rating
from schemas.names import rater_of
from tests.actors.rated import group_of, rated

CONFIG = PeopleConfig(mature="1h")


def after(*closures: Closure, config: PeopleConfig = CONFIG) -> Ratings:
    ratings = Ratings(config)
    for closure in closures:
        ratings.closure(closure, closure.answered_ms)
    return ratings


def heard(ratings: Ratings, day: int = 0) -> list[tuple[int, bool | None]]:
    """Version and verdict of everybody heard on a day."""
    days = ratings.of_days()
    return sorted((voice.arm[0], voice.bad) for voice in days[day]) if day in days else []


def test_a_revised_rating_counts_as_it_stands_and_one_taken_back_not_at_all() -> None:
    down = rated("ann", 5, 0.0)
    assert heard(after(down)) == [(5, True)]
    assert heard(after(down, rated("ann", 5, 1.0, revision=1))) == [(5, False)]
    assert heard(after(down, rated("ann", 5, revision=1))) == []
    assert heard(after(down, rated("ann", 5, revision=1), rated("ann", 5, 0.2, revision=2))) == [(5, True)]
    assert heard(after(rated("ann", 5), rated("ann", 5, 0.0, revision=1))) == [(5, True)], "rated late"
    assert heard(after(down, rated("ann", 5, 1.0, revision=1), down)) == [(5, False)], "an older one comes again"


def test_a_closure_that_comes_twice_counts_once_and_only_production_answers_count() -> None:
    once = [rated("ann", 5, 0.0), rated("ann", 5, 1.0, revision=1), rated("bob", 5, 0.0)]
    assert heard(after(*once, *once)) == heard(after(*once)) == [(5, False), (5, True)]
    usual = Closure(group="t.0", outcome="buffered", lane="usual", mean_reward=0.0, version=5)
    assert heard(after(usual, rated("x", -1, 0.0), rated("y", 5, 0.0, revision=1))) == []


def test_of_one_person_one_word_a_day_counts_that_of_the_first_answer_whichever_version_gave_it() -> None:
    many = [rated("ann", 5, 0.0, number=number, at_ms=1000 * number) for number in range(20)]
    assert heard(after(*many, rated("bob", 5, 1.0))) == [(5, False), (5, True)]
    named = [rated(f"s{number}", 5 + number, 0.0, rater="ann", at_ms=1000 * number) for number in range(20)]
    assert heard(after(*named)) == heard(after(*named[::-1])) == [(5, True)], "a rater is one in all sessions"
    assert heard(after(*named, rated("s", 5, 0.0, rater="ann", tenant="globex"))) == [(5, True)] * 2
    for nobody in (rater_of("key", "abcd"), rater_of("answer", "hr-s.0")):
        unnamed = [rated(f"s{n % 3}", 5, 0.0, rater=nobody, number=n) for n in range(20)]
        assert heard(after(*unnamed)) == [(5, True)] * 3, "a session is a person where the rater is none"
    assert heard(after(*many, rated("ann", 6, 0.0, number=99, at_ms=DAY_MS)), day=1) == [(6, True)]


def test_what_comes_later_than_its_time_counts_for_nothing_whether_good_or_bad() -> None:
    hour_ms = 3_600_000
    assert heard(after(rated("ann", 5, 0.0, late_ms=hour_ms), rated("bob", 5, 1.0, late_ms=hour_ms))) != []
    late = after(rated("ann", 5, 0.0, late_ms=hour_ms + 1), rated("bob", 5, 1.0, late_ms=hour_ms + 1))
    assert heard(late) == [] and late.of_days()[0].counts == [0, 0, 1, 1]
    replaced = after(rated("ann", 5, 0.0), rated("ann", 5, 1.0, late_ms=2 * hour_ms, revision=1))
    assert heard(replaced) == [(5, True)], "as it stood when its time was over"


def test_what_is_a_complaint_is_said_on_the_scale_of_its_source() -> None:
    config = PeopleConfig(bad_below=0.5, bad_below_of={"stars": 3.0})
    stars = rated("ann", 5, 2.0)
    stars = replace(stars, ratings=tuple(replace(one, source="stars") for one in stars.ratings or ()))
    assert heard(after(stars, config=config)) == [(5, True)]
    assert heard(after(rated("bob", 5, 2.0), config=config)) == [(5, False)]


def test_in_logs_without_ratings_what_was_credited_stands_for_them() -> None:
    old = Closure(group="s.7-0", outcome="buffered", lane="live", mean_reward=0.2, version=5)
    ratings = Ratings(CONFIG)
    ratings.closure(old, 1000)
    ratings.closure(replace(old, group="s.7-1", mean_reward=None), 2000)
    assert heard(ratings) == [(5, True)]


def test_four_sessions_of_ten_turns_praised_once_each_are_four_people_and_no_complaint() -> None:
    turns = [
        replace(rated(f"s{session}", 5, *([1.0] if turn == 9 else []), number=turn), mean_reward=0.9 ** (9 - turn))
        for session in range(4)
        for turn in range(10)
    ]
    assert heard(after(*turns)) == [(5, False)] * 4


def test_the_order_of_records_about_different_answers_changes_nothing() -> None:
    told = [
        rated(f"s{n % 7}", 5, n % 3 / 2, number=n, at_ms=n * 50_000, rater="r" * (n % 2), trial=7) for n in range(60)
    ]
    counted = set()
    for seed in range(20):
        Random(seed).shuffle(told)
        ratings = after(*told)
        counted.add(repr(sorted((voice.group, voice.bad) for voice in ratings.of_trial(7))) + repr(heard(ratings)))
    assert len(counted) == 1


def test_people_beyond_the_bound_are_chosen_by_a_hash_the_same_in_any_order() -> None:
    told = [rated(f"s{number}", 5, 1.0, trial=7) for number in range(MAX_VOICES + 500)]
    one, other = after(*told), after(*told[::-1])
    kept = {voice.group for voice in one.of_trial(7)}
    assert MAX_VOICES / 3 < len(kept) <= MAX_VOICES and kept == {voice.group for voice in other.of_trial(7)}


def test_as_many_people_as_the_bound_are_all_kept() -> None:
    ratings = after(*(rated(f"s{number}", 5, 1.0, trial=7) for number in range(MAX_VOICES)))
    assert len(list(ratings.of_trial(7))) == MAX_VOICES


def test_the_newest_days_and_trials_are_kept() -> None:
    told = [rated(f"s{day}", 5, 1.0, trial=day, at_ms=day * DAY_MS) for day in range(MAX_DAYS + 5)]
    ratings = after(*told, rated("late", 5, 1.0, trial=0))
    assert sorted(ratings.of_days()) == list(range(5, MAX_DAYS + 5))
    assert [len(list(ratings.of_trial(trial))) for trial in range(MAX_DAYS + 5)][-MAX_TRIALS:] == [1] * MAX_TRIALS
    assert not list(ratings.of_trial(0))


def reported(
    answers: int, failed: int = 0, *, instance: str = "serve/1/a", version: int = 5, **more: object
) -> Progress:
    told = Answered(version=version, answers=answers, failed=failed, refused=1, **more)  # type: ignore[arg-type]
    return Progress(role="serve", instance=instance, answered=(told,))


def test_what_a_gateway_reports_is_counted_once_and_gateways_add_up() -> None:
    ratings = Ratings()
    for told in (reported(10), reported(30, 2), reported(20, 1), reported(5, instance="serve/1/b")):
        ratings.progress(told)
    assert ratings.of_version(5) == {"": Tally(answers=35, failed=2, refused=2)}
    clients = (Client(client="a", sessions=7, failed=1), Client(client="b", sessions=2, refused=1))
    ratings.progress(reported(40, 5, clients=clients))
    assert ratings.of_version(5) == {
        "": Tally(answers=5, refused=1), "a": Tally(answers=7, failed=1), "b": Tally(answers=2, refused=1),
    }  # fmt: skip
    ratings.forget({6})
    assert ratings.of_version(5) == {}


@pytest.mark.parametrize("tenants", [1, 2])
def test_there_are_several_tenants_where_people_of_several_are_heard(tenants: int) -> None:
    told = [rated(f"s{number}", 5, 1.0, tenant=f"t{number % tenants}") for number in range(10)]
    assert after(*told, rated("stray", 5, 1.0, tenant="dev")).several() == (tenants > 1)


def test_bounds_and_beginnings() -> None:
    assert (MAX_ANSWERS, MAX_TRIALS, MAX_DAYS, MAX_VOICES, LEAST_OF_TENANT) == (100_000, 4, 10, 10_000, 5)
    assert DAY_MS == 24 * 60 * 60 * 1000
    assert Tally() == Tally(0, 0, 0) and RatedAnswer((1, -1), 5) == RatedAnswer((1, -1), 5, -1, (), (0, 0, 0, 0))
    assert list(Voices()) == [] and Voices().counts == [0, 0, 0, 0]
    assert Ratings().mature_ms == 0 and Ratings(CONFIG).mature_ms == 3_600_000


def test_who_a_person_is_and_where_a_hash_puts_them_is_the_same_in_every_release() -> None:
    assert place_of_person("ann") == 10176691957563388837
    group = group_of("s")
    named = Rating(source="user", value=1.0, rater="ann", time_ms=0)
    assert person_of(group, named).endswith("/ann") and person_of(group, named) != "/ann"
    assert person_of(group, replace(named, rater="")) == group.partition(".")[0]
    assert person_of("task.0", replace(named, rater="")) == "task.0"


def test_in_old_logs_a_rating_is_as_old_as_its_answer() -> None:
    old = Closure(group="s.7-0", outcome="buffered", lane="live", mean_reward=0.2, version=5)
    assert ratings_of(old, 77) == (Rating(source="", value=0.2, time_ms=77),)
    assert ratings_of(replace(old, ratings=()), 77) == () == ratings_of(replace(old, mean_reward=None), 77)


def test_an_answer_was_given_when_its_record_says_or_else_when_it_was_logged() -> None:
    for answered_ms, day in ((0, 0), (2 * DAY_MS, 2), (-1, 3)):
        ratings = Ratings(CONFIG)
        said = () if answered_ms < 0 else rated("ann", 5, 0.0, at_ms=answered_ms).ratings
        if answered_ms < 0:
            said = rated("ann", 5, 0.0, at_ms=3 * DAY_MS).ratings
        ratings.closure(replace(rated("ann", 5, 0.0), answered_ms=answered_ms, ratings=said), 3 * DAY_MS)
        assert list(ratings.of_days()) == [day]


def test_the_first_version_and_a_trial_of_it_are_counted_too() -> None:
    ratings = after(rated("ann", 0, 0.0, trial=0))
    assert heard(ratings) == [(0, True)] and [voice.arm for voice in ratings.of_trial(0)] == [(0, 0)]
    assert after(rated("ann", 5, 0.0)).of_trial(-1) is not None and not list(after(rated("ann", 5, 0.0)).of_trial(-1))


def test_the_word_on_an_answer_older_than_the_last_ones_stands_as_it_is() -> None:
    ratings = after(rated("first", 5, 0.0))
    bare = replace(rated("x", 5), ratings=())
    for number in range(MAX_ANSWERS - 1):
        ratings.closure(replace(bare, group=f"{number}.0"), 0)
    ratings.closure(rated("first", 5, 1.0, revision=1), 0)
    assert heard(ratings) == [(5, False)], "it is among the last"
    ratings.closure(replace(bare, group="one-more.0"), 0)
    ratings.closure(rated("first", 5, 0.0, revision=2), 0)
    assert heard(ratings) == [(5, False)]


def test_of_two_answers_of_one_time_the_first_by_name_counts() -> None:
    words = [Voice(5, group, "acme", (5, -1), bad) for group, bad in (("b", True), ("a", False), ("c", True))]
    for order in (words, words[::-1]):
        voices = Voices()
        for word in order:
            voices.speak("ann", word)
        assert [voice.group for voice in voices] == ["a"]


def test_what_was_taken_back_is_nobodys_word_and_no_place_is_kept_for_who_never_spoke() -> None:
    voices = Voices()
    voices.speak("ann", Voice(5, "a", "acme", (5, -1), None))
    voices.speak("bob", Voice(5, "a", "acme", (5, -1), True))
    voices.speak("bob", Voice(5, "a", "acme", (5, -1), None))
    assert list(voices) == []
    voices.speak("ann", Voice(9, "b", "acme", (5, -1), True))
    assert [voice.group for voice in voices] == ["b"]


def test_words_are_counted_as_good_or_bad_in_time_or_late_and_again_when_they_are_revised() -> None:
    hour_ms = 3_600_000
    ratings = after(rated("ann", 5, 0.0, 1.0, 1.0), rated("bob", 5, 0.0, late_ms=hour_ms + 1), rated("cid", 5, 0.5))
    assert ratings.of_days()[0].counts == [1, 3, 1, 0], "a rating at the threshold is no complaint"
    ratings.closure(rated("ann", 5, 1.0, late_ms=hour_ms + 1, revision=1), 0)
    assert ratings.of_days()[0].counts == [0, 1, 1, 1]


def test_of_two_words_of_one_person_about_an_answer_the_first_counts() -> None:
    assert heard(after(rated("ann", 5, 0.0, 1.0))) == [(5, True)]
    assert heard(after(rated("ann", 5, 1.0, 0.0))) == [(5, False)]


def test_who_spoke_in_time_and_again_too_late_counts_until_the_word_is_taken_back() -> None:
    late_ms = 2 * 3_600_000
    first, again = rated("ann", 5, 0.0), rated("ann", 5, 1.0, late_ms=late_ms, revision=1)
    assert heard(after(first, again, replace(again, revision=2))) == [(5, True)]
    assert heard(after(first, again, rated("ann", 5, revision=2))) == []


def test_there_are_several_tenants_from_five_people_on() -> None:
    def told(people: int) -> list[Closure]:
        return [
            rated(f"{name}{n}", 5, 1.0, tenant=name) for name, count in (("a", 9), ("b", people)) for n in range(count)
        ]

    assert after(*told(4)).several() is False and after(*told(5)).several() is True
    assert Ratings(CONFIG).several() is False


def test_the_oldest_day_is_let_go_for_a_newer_one_and_not_for_an_older_one() -> None:
    told = [rated(f"s{day}", 5, 1.0, at_ms=day * DAY_MS) for day in range(1, MAX_DAYS + 1)]
    ratings = after(*told)
    ratings.closure(rated("older", 5, 1.0, at_ms=0), 0)
    assert sorted(ratings.of_days()) == list(range(1, MAX_DAYS + 1))
    ratings.closure(rated("newer", 5, 1.0, at_ms=(MAX_DAYS + 1) * DAY_MS), 0)
    assert sorted(ratings.of_days()) == list(range(2, MAX_DAYS + 2))
    ratings.closure(rated("again", 5, 1.0, at_ms=2 * DAY_MS), 0)
    assert len(list(ratings.of_days()[2])) == 2


def test_what_gateways_served_is_told_by_version_and_by_arm_and_the_largest_report_counts() -> None:
    ratings = Ratings()
    for answers, version, trial in ((10, 5, 5), (20, 5, -1), (40, 3, 5), (30, 3, 5)):
        told = Answered(version=version, trial=trial, answers=answers, failed=1, refused=2)
        ratings.progress(Progress(role="serve", instance="one", answered=(told,)))
    same = Answered(version=3, trial=5, answers=40, failed=9, refused=9)
    ratings.progress(Progress(role="serve", instance="one", answered=(same,)))
    assert ratings.of_version(5) == {"": Tally(30, 2, 4)} and ratings.of_arm(5, 5) == {"": Tally(10, 1, 2)}
    assert ratings.of_arm(3, 5) == {"": Tally(40, 1, 2)} and ratings.of_arm(3, -1) == {}


def test_what_is_newer_than_anything_kept_is_not_forgotten() -> None:
    ratings = Ratings()
    for version in (3, 4, 5, 6, 7):
        ratings.progress(reported(10, version=version))
    ratings.forget({4, 6})
    assert [bool(ratings.of_version(version)) for version in (3, 4, 5, 6, 7)] == [False, True, False, True, True]
    ratings.forget(set())
    assert ratings.of_version(4)
