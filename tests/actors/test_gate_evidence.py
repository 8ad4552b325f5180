"""Evidence of the gate: counts of what people say of each version."""

import pytest
from msgspec.structs import replace

from actors.config import PeopleConfig
from actors.master.gate.counts import MAX_ANSWERS, MAX_COMPARISONS, MAX_PEOPLE, Counts
from schemas import Answered, Client, Closure, Progress
from schemas.ids import fallback_rater
from tests.actors.rig import BLOCK_MS, rated

PEOPLE = PeopleConfig(rating_window="1h")
HOUR_MS = 3_600_000
ANN_DOWN = rated("ann", 5, 0.0, trial=7)


def after(*closures: Closure, config: PeopleConfig = PEOPLE) -> Counts:
    counts = Counts(config)
    for closure in closures:
        counts.closure(closure, closure.answered_ms)
    return counts


def heard(counts: Counts, trial: int = 7) -> dict[int, tuple[int, int]]:
    """People and complaints, by version."""
    found = {}
    for version, sums in counts.comparison(trial).rated.items():
        people, bad = (sum(row[column] for row in sums.values()) for column in (0, 1))
        if people:
            found[version] = (people, bad)
    return found


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([], {5: (1, 1)}),
        ([rated("ann", 5, 1.0, revision=1, trial=7)], {5: (1, 0)}),
        ([rated("ann", 5, revision=1, trial=7)], {}),
        ([rated("ann", 5, revision=1, trial=7), rated("ann", 5, 0.2, revision=2, trial=7)], {5: (1, 1)}),
        ([rated("ann", 5, 1.0, revision=1, trial=7), ANN_DOWN], {5: (1, 0)}),
        ([rated("ann", 5, 1.0, late_ms=2 * HOUR_MS, revision=1, trial=7)], {5: (1, 1)}),
        ([rated("ann", 5, 1.0, late_ms=2 * HOUR_MS, revision=1, trial=7), rated("ann", 5, revision=2, trial=7)], {}),
    ],
    ids=[
        "said",
        "revised",
        "taken back",
        "said again",
        "an older revision again",
        "revised too late",
        "then taken back",
    ],
)
def test_a_word_counts_as_it_stands_when_its_time_is_over(
    later: list[Closure], expected: dict[int, tuple[int, int]]
) -> None:
    assert heard(after(ANN_DOWN, *later)) == expected


def test_a_closure_that_comes_twice_counts_once_and_only_production_answers_count() -> None:
    once = [ANN_DOWN, rated("ann", 5, 1.0, revision=1, trial=7), rated("bob", 5, 0.0, trial=7)]
    assert heard(after(*once, *once)) == heard(after(*once)) == {5: (2, 1)}
    usual = Closure(group="t.0", outcome="buffered", lane="usual", mean_reward=0.0, version=5, trial=7)
    assert heard(after(usual, rated("x", -1, 0.0, trial=7), rated("y", 5, 0.0, revision=1, trial=7))) == {}


def test_of_one_person_the_word_on_the_first_answer_counts_whichever_version_gave_it() -> None:
    named = [rated(f"s{number}", 5 + number, 0.0, rater="ann", at_ms=1000 * number, trial=7) for number in range(20)]
    assert heard(after(*named)) == heard(after(*named[::-1])) == {5: (1, 1)}, "a rater is one person in all sessions"
    assert heard(after(*named, rated("s", 5, 0.0, rater="ann", tenant="globex", trial=7))) == {5: (2, 2)}
    for nobody in (fallback_rater("abcd"), ""):
        unnamed = [rated(f"s{number % 3}", 5, 0.0, rater=nobody, number=number, trial=7) for number in range(20)]
        assert heard(after(*unnamed)) == {5: (3, 3)}, "a session is a person where the rater is none"


def test_a_late_word_counts_for_nothing_whether_good_or_bad() -> None:
    in_time = after(rated("ann", 5, 0.0, late_ms=HOUR_MS, trial=7), rated("bob", 5, 1.0, late_ms=HOUR_MS, trial=7))
    assert heard(in_time) == {5: (2, 1)}
    late = after(*(rated(name, 5, value, late_ms=HOUR_MS + 1, trial=7) for name, value in (("ann", 0.0), ("bob", 1.0))))
    assert heard(late) == {}


def test_a_complaint_is_below_the_threshold_of_its_source() -> None:
    config = PeopleConfig(bad_below=0.5, bad_below_by_source={"stars": 3.0})
    two = rated("ann", 5, 2.0, trial=7)
    stars = replace(two, ratings=tuple(replace(rating, source="stars") for rating in two.ratings or ()))
    assert heard(after(stars, config=config)) == {5: (1, 1)} and heard(after(two, config=config)) == {5: (1, 0)}
    assert heard(after(rated("ann", 5, 0.5, trial=7))) == {5: (1, 0)}, "at the threshold"


def test_every_person_of_a_comparison_counts_and_the_oldest_is_forgotten_past_the_bound() -> None:
    counts = after(*(rated(f"s{number}", 5, 1.0, trial=7, at_ms=number) for number in range(MAX_PEOPLE + 1)))
    assert heard(counts) == {5: (MAX_PEOPLE + 1, 0)} and len(counts.comparison(7).words) == MAX_PEOPLE


def test_the_newest_comparisons_are_kept_and_the_word_on_an_answer_past_the_bound_stands() -> None:
    counts = after(*(rated("ann", 5, 1.0, number=trial, trial=trial) for trial in range(MAX_COMPARISONS + 1)))
    assert [bool(heard(counts, trial)) for trial in range(1, MAX_COMPARISONS + 1)] == [True] * MAX_COMPARISONS
    assert not heard(counts, 0)
    counts = after(rated("bob", 5, 1.0), ANN_DOWN)
    for trial in range(8, 8 + MAX_COMPARISONS):
        counts.closure(rated("ann", 5, 1.0, number=trial, trial=trial), 0, running=7)
    assert heard(counts, -1) and heard(counts, 7) and not heard(counts, 8), (
        "the running one stays, and the time without"
    )
    counts = after(ANN_DOWN)
    for number in range(MAX_ANSWERS):
        counts.closure(Closure(group=f"{number}.0", outcome="buffered", lane="live", version=5, ratings=()), 0)
    counts.closure(rated("ann", 5, 1.0, revision=1, trial=7), 0)
    assert heard(counts) == {5: (1, 1)}


def test_a_comparison_with_a_version_that_was_compared_before_begins_anew() -> None:
    counts = after(ANN_DOWN, rated("bob", 5, 0.0, at_ms=HOUR_MS, trial=7))
    counts.comparison(7).restart(HOUR_MS, counts.block(HOUR_MS))
    assert heard(counts) == {5: (1, 1)}
    counts.closure(rated("ann", 6, 1.0, at_ms=2 * HOUR_MS, trial=7, number=1), 2 * HOUR_MS)
    assert heard(counts) == {5: (1, 1), 6: (1, 0)}, "ann counts again"


def reported(instance: str, version: int, *clients: tuple[str, int, int, int], trial: int = 7) -> Progress:
    told = tuple(Client(client=name, sessions=a, failed=b, refused=c) for name, a, b, c in clients)
    answered = Answered(version=version, trial=trial, answers=99, clients=told)
    return Progress(role="serve", instance=instance, answered=(answered,))


def test_what_gateways_report_since_their_start_is_counted_once_in_its_block_and_gateways_add_up() -> None:
    counts = Counts(PEOPLE)
    for at_ms, told in (
        (0, reported("a", 5, ("acme", 10, 1, 0))),
        (1, reported("a", 5, ("acme", 10, 1, 0))),
        (BLOCK_MS, reported("a", 5, ("acme", 30, 2, 3), ("globex", 4, 0, 0))),
        (BLOCK_MS, reported("a", 5, ("acme", 20, 1, 2))),
        (BLOCK_MS, reported("b", 5, ("acme", 5, 0, 0))),
        (BLOCK_MS, reported("b", 3, ("acme", 7, 0, 0))),
    ):
        counts.progress(told, at_ms)
    assert counts.comparison(7).served == {
        5: {("acme", 0): [10, 1, 0], ("acme", 1): [25, 1, 3], ("globex", 1): [4, 0, 0]}, 3: {("acme", 1): [7, 0, 0]},
    }  # fmt: skip
