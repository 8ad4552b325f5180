"""Ratings of closures: what people said of the answer itself, as it stands, apart from what is credited to it."""

from schemas import Closure, Rating
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from tests.streams.collect.collecting import DEADLINE_MS, FakePartition, answer, block, decisions, folded, said, tick
from tests.streams.collect.test_fold_turns import WINDOW_MS, group_of_turn, ref, turn

RULES = Rules(
    deadline_ms=DEADLINE_MS,
    keep_ms=10_000_000,
    sources={"csat": FeedbackRules(window_ms=WINDOW_MS, late="amend", discount=0.9)},
)
REF = "hr-a1b2.0.0-0-0"


def closures(inbox: FakePartition, rules: Rules = RULES) -> list[Closure]:
    return [decision.closure for decision in decisions(folded(inbox, rules))]


def newest(inbox: FakePartition, rules: Rules = RULES) -> dict[str, Closure]:
    return {closure.group: closure for closure in closures(inbox, rules)}


def values(closure: Closure) -> list[tuple[str, float]]:
    assert closure.ratings is not None
    return [(rating.rater, rating.value) for rating in closure.ratings]


def live(group: str = "a1b2.0") -> FakePartition:
    return FakePartition().extend([block(answer(group, 0, size=1, lane="live"))])


def test_four_sessions_of_ten_turns_praised_once_each_are_four_ratings_and_none_is_bad() -> None:
    inbox = FakePartition()
    for session in range(4):
        name = "bcdf" * 15 + "bcd" + "fhjq"[session]
        inbox.extend(turn(number, name) for number in range(10))
        inbox.append(said(f"hr-{group_of_turn(9, name)}.0-0-0", 1.0, rater="ann"))
    inbox.append(tick(), after_ms=WINDOW_MS)
    ended = newest(inbox)
    assert len(ended) == 40
    assert sum(closure.mean_reward is not None for closure in ended.values()) == 40, "all of them learn of it"
    rated = [rating for closure in ended.values() for rating in closure.ratings or ()]
    assert [rating.value for rating in rated] == [1.0] * 4


def test_a_revision_that_an_echo_alone_causes_leaves_the_ratings_as_they_were() -> None:
    inbox = FakePartition().extend([turn(0), turn(1), said(ref(0), 1.0, rater="ann"), said(ref(1), 0.0, rater="ann")])
    inbox.append(said(ref(1), 1.0, id="changed", rater="ann"))
    inbox.append(tick(), after_ms=WINDOW_MS)
    first = [closure for closure in closures(inbox) if closure.group == group_of_turn(0)]
    assert len(first) > 1 and first[-1].mean_reward != 1.0
    assert [values(closure) for closure in first] == [[("ann", 1.0)]] * len(first)


def test_a_rating_is_what_stands_of_each_source_and_rater() -> None:
    inbox = live().extend(
        [
            said(REF, 0.0, id="1", rater="ann"),
            said(REF, 1.0, id="2", rater="bob"),
            said(REF, 0.5, id="3", rater="ann"),
            said(REF, 0.0, id="4", rater="bob", type="retraction"),
        ]
    )
    assert [values(closure) for closure in closures(inbox)] == [
        [("ann", 0.0)],
        [("ann", 0.0), ("bob", 1.0)],
        [("bob", 1.0), ("ann", 0.5)],
        [("ann", 0.5)],
    ]


def test_a_rating_says_when_it_was_given_and_a_closure_when_the_answer_was() -> None:
    inbox = live().extend([said(REF, 0.25, rater="ann")])
    (closure,) = closures(inbox)
    answered, rated = (arrival.timestamp_ms for arrival in inbox.arrivals)
    assert closure.answered_ms == answered
    assert closure.ratings == (Rating(source="csat", value=0.25, rater="ann", time_ms=rated),)


def test_silence_and_its_default_are_no_rating() -> None:
    silent = FeedbackRules(window_ms=WINDOW_MS, default=0.7)
    inbox = live()
    inbox.append(tick(), after_ms=WINDOW_MS)
    (closure,) = closures(inbox, Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": silent}))
    assert (closure.mean_reward, closure.ratings) == (0.7, ())


def test_a_rollout_was_not_answered_in_production() -> None:
    (closure,) = closures(FakePartition().extend([block(answer("t.0", 0), answer("t.0", 1))]))
    assert (closure.answered_ms, closure.ratings) == (-1, ())
