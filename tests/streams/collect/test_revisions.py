"""Late words: what they change, how often, and what a flood of them costs."""

import sys
from collections.abc import Sequence
from types import FrameType

import msgspec
import pytest

from schemas import Closure, Experience, Feedback
from streams.collect.feedback import MAX_COUNTED, MAX_KNOWN, TOO_MANY, FeedbackRules
from streams.collect.fold import MAX_ANSWERS
from streams.collect.rules import Rules
from streams.collect.state import State
from tests.streams.collect.collecting import DEADLINE_MS, FakePartition, answer, block, decisions, drops, folded, said
from tests.streams.collect.test_fold_turns import ref, turn

REF = "hr-a1b2.0.0-0-0"
WINDOW_MS = 5_000


def rules(late: str, discount: float = 0.0, **limits: int) -> Rules:
    source = FeedbackRules(window_ms=WINDOW_MS, late=late, discount=discount)  # type: ignore[arg-type]
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source}, **limits)  # type: ignore[arg-type]


def heard(words: Sequence[Feedback]) -> FakePartition:
    """An answer, and what is said about it; the first word closes it."""
    return FakePartition(step_ms=1).extend([block(answer("a1b2.0", 0, size=1, lane="live")), *words])


def words(*values: float, raters: Sequence[str] = ("ann",)) -> list[Feedback]:
    each = enumerate(zip(values, raters * len(values), strict=False))
    return [said(REF, value, id=str(number), rater=rater) for number, (value, rater) in each]


def sent(inbox: FakePartition, given: Rules) -> list[Experience]:
    """Without what only takes back."""
    blocks = [one for decision in decisions(folded(inbox, given)) for one in decision.blocks]
    return [one for sent in blocks for one in sent.experiences if one.kind != "withdrawal"]


def closures(inbox: FakePartition, given: Rules) -> list[Closure]:
    return [decision.closure for decision in decisions(folded(inbox, given))]


@pytest.mark.parametrize("late", ["amend", "retrain"])
def test_the_same_value_again_makes_no_new_revision(late: str) -> None:
    again = heard(words(0.5, 0.5, 0.5))
    assert [closure.revision for closure in closures(again, rules(late))] == [0]
    assert not drops(folded(again, rules(late)))


@pytest.mark.parametrize("late", ["amend", "retrain"])
def test_another_rater_of_the_same_mind_is_a_rating_and_trains_nothing_anew(late: str) -> None:
    inbox = heard(words(0.5, 0.5, raters=("ann", "bob")))
    ended = closures(inbox, rules(late))
    assert [(one.revision, len(one.ratings or ())) for one in ended] == [(0, 1), (1, 2)]
    assert [(one.revision, one.lane) for one in sent(inbox, rules(late))] == [(0, "live")]


def test_amend_never_marks_an_answer_as_to_be_trained_again() -> None:
    inbox = heard(words(0.5, 0.25, 0.75))
    found = [(one.revision, one.lane, one.retrained) for one in sent(inbox, rules("amend"))]
    assert found == [(0, "live", 0), (1, "live", 0), (2, "live", 0)]


def test_retrain_trains_again_once_per_verdict_and_no_more_than_so_often() -> None:
    inbox = heard(words(0.5, 0.25, 0.25, 0.75, 0.5, 0.25))
    found = [(one.revision, one.lane, one.retrained) for one in sent(inbox, rules("retrain", retrainings=2))]
    # Past the bound, later verdicts change the copy that was not drawn yet.
    assert found == [(0, "live", 0), (1, "human", 1), (2, "human", 2), (3, "human", 2), (4, "human", 2)]
    assert drops(folded(inbox, rules("retrain", retrainings=2))) == {"retrained often enough": 2}


def test_a_credit_of_later_turns_trains_no_turn_again() -> None:
    inbox = FakePartition().extend([turn(0), said(ref(0), 0.5), turn(1), said(ref(1), 1.0)])
    found = [(one.group[-1], one.revision, one.lane, one.retrained) for one in sent(inbox, rules("retrain", 0.5))]
    assert found == [("0", 0, "live", 0), ("1", 0, "live", 0), ("0", 1, "live", 0)]


def test_a_later_turn_of_the_same_credit_makes_no_revision() -> None:
    inbox = FakePartition().extend([turn(0), said(ref(0), 0.5), turn(1), said(ref(1), 1.0, rater="ann")])
    inbox.extend([said(ref(1), 1.0, id="again", rater="ann"), said(ref(1), 1.0, id="other", rater="bob")])
    revisions = [(one.group[-1], one.revision) for one in closures(inbox, rules("amend", 0.5))]
    assert revisions == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]


def test_late_words_close_an_answer_anew_no_more_than_so_often_and_the_rest_is_counted() -> None:
    flips = heard(words(*(number % 2 for number in range(201))))
    assert closures(flips, rules("amend", revisions=16))[-1].revision == 16
    assert drops(folded(flips, rules("amend", revisions=16))) == {"revised often enough": 200 - 16}


def test_what_is_taken_back_is_taken_back_however_often_an_answer_was_revised() -> None:
    back = said(REF, 0.0, id="back", rater="ann", type="retraction")
    ended = closures(heard([*words(0.0, 1.0, 0.0, 1.0), back]), rules("amend", revisions=2))
    assert [(one.revision, len(one.ratings or ())) for one in ended] == [(0, 1), (1, 1), (2, 1), (3, 0)]


def test_of_many_raters_the_first_stand_and_the_others_are_counted() -> None:
    number = 3 * MAX_COUNTED
    raters = [f"r{index}" for index in range(number)]
    inbox = FakePartition().extend(
        [*words(*[1.0] * number, raters=raters), block(answer("a1b2.0", 0, size=1, lane="live"))]
    )
    (closure,) = closures(inbox, rules("amend"))
    assert [rating.rater for rating in closure.ratings or ()] == raters[:MAX_COUNTED]
    assert drops(folded(inbox, rules("amend"))) == {TOO_MANY: number - MAX_COUNTED}


def test_words_about_answers_that_are_not_there_are_kept_in_bounded_number() -> None:
    number = MAX_ANSWERS + 5
    inbox = FakePartition(step_ms=0).extend(said(f"a1b2.0.0-{index}-0", 1.0) for index in range(number))
    assert drops(folded(inbox, rules("amend"))) == {"feedback about too many answers of a group": 5}


def test_feedback_that_is_delivered_again_is_known_among_the_last_that_were_heard() -> None:
    many = words(*(index / 1000 for index in range(MAX_KNOWN)))
    inbox = FakePartition(step_ms=1).extend([*many, many[0], many[-1]])
    state = State()
    folded(inbox, rules("amend"), state)
    (stands,) = state.groups["a1b2.0"].feedback["a1b2.0.0-0-0"].counted
    assert stands.feedback == many[-1]


def lines_run(inbox: FakePartition, given: Rules, state: State) -> int:
    """Lines of Python that folding takes: work, whatever the machine does beside it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        folded(inbox, given, state)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("raters", [("ann",), tuple(f"r{number}" for number in range(2000))], ids=["one", "many"])
def test_a_flood_of_feedback_about_one_answer_costs_the_same_for_each_word(raters: tuple[str, ...]) -> None:
    def flood(number: int) -> tuple[int, int]:
        inbox, state = heard(words(*(index % 2 for index in range(number)), raters=raters)), State()
        work = lines_run(inbox, rules("amend"), state)
        return work, len(msgspec.msgpack.encode(state.groups["a1b2.0"]))

    few, many = flood(250), flood(1000)
    assert many[0] < 4.2 * few[0], "four times the words, four times the work"
    assert many[1] < 1.1 * few[1], "and no more to save each time"
