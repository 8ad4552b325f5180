"""What stands of what was said about an answer, and what it is credited with, at their edges."""

import msgspec
import pytest

from infra.chain.processor import Memory
from schemas import Feedback, Rating
from streams.collect.feedback import (
    MAX_KNOWN,
    MAX_RATINGS,
    NEUTRAL,
    USUAL_PRIOR,
    USUAL_WINDOW,
    FeedbackRules,
    answer_of,
    credited,
    edit_of,
    is_repeat,
    learn_usual,
    ratings,
    returns,
    take_feedback,
    usual_of,
    values_of,
)  # fmt: skip  # fmt: skip
from streams.collect.group import AnswerFeedback, LaterCredit, LoggedFeedback
from tests.streams.collect.collecting import answer

REF = "a.0.0-0-0"


def heard(on_answer: AnswerFeedback, number: int, value: float | None = None, **more: object) -> str:
    given = {"ref": REF, "id": str(number), "value": value, "source": "csat", **more}
    return take_feedback(on_answer, LoggedFeedback(msgspec.convert(given, Feedback), number, 1_000 + number))


def edit(on_answer: AnswerFeedback, number: int, text: str, **more: object) -> str:
    return heard(on_answer, number, type="correction", text=text, **more)


def test_the_last_words_are_known_and_older_ones_are_forgotten() -> None:
    on_answer = AnswerFeedback()
    for number in range(MAX_KNOWN + 1):
        assert heard(on_answer, number, number / 1000) == ""
    assert len(on_answer.known) == MAX_KNOWN == 256
    known = [is_repeat(on_answer, Feedback(ref=REF, id=str(number), source="csat")) for number in (0, 1, MAX_KNOWN)]
    assert known == [False, True, True]
    assert is_repeat(on_answer, Feedback(ref=REF, id="1", source="other")) is False
    assert is_repeat(None, Feedback(ref=REF, id="1")) is False
    assert len(on_answer.counted) == 1 and values_of(on_answer) == {"csat": 0.256}


def test_a_retraction_takes_back_all_of_its_rater_at_its_source_and_nobody_elses() -> None:
    on_answer = AnswerFeedback()
    heard(on_answer, 1, 0.5, rater="ann")
    edit(on_answer, 2, "better", rater="ann")
    heard(on_answer, 3, 0.5, rater="bob")
    heard(on_answer, 4, 0.5, rater="ann", source="other")
    assert on_answer.edits == 1
    heard(on_answer, 4, type="retraction", rater="dan")
    assert on_answer.edits == 1 and len(on_answer.counted) == 4, "he had said nothing"
    assert heard(on_answer, 5, type="retraction", rater="ann") == ""
    assert [said.offset for said in on_answer.counted] == [3, 4] and on_answer.edits == 2
    heard(on_answer, 6, type="retraction", rater="bob")
    assert on_answer.edits == 2, "no edit was among them"


def test_an_edit_counts_once_for_each_change_of_what_stands() -> None:
    on_answer = AnswerFeedback()
    assert edit_of(on_answer) is None
    for number, (text, rater, edits) in enumerate(
        [("one", "ann", 1), ("one", "bob", 1), ("two", "bob", 2), ("two", "ann", 2), ("", "ann", 2)]
    ):
        edit(on_answer, number, text, rater=rater)
        assert on_answer.edits == edits
    assert edit_of(on_answer) == "two"


def test_the_newest_edit_that_can_still_be_opened_stands() -> None:
    on_answer, asked = AnswerFeedback(), []
    edit(on_answer, 1, "old", rater="ann", ref=f"hr-{REF}")
    edit(on_answer, 2, "new", rater="bob")
    heard(on_answer, 3, rater="cid", type="label", text="no edit")

    def opened(text: str, of: str) -> str | None:
        asked.append((text, of))
        return None if text == "new" else text.upper()

    assert edit_of(on_answer, opened) == "OLD" and asked == [("new", REF), ("old", REF)]
    assert edit_of(on_answer, lambda text, of: None) is None
    assert answer_of(f"hr-{REF}") == answer_of(REF) == REF


def test_of_several_values_of_a_source_the_mean_counts_and_words_without_a_value_count_for_nothing() -> None:
    on_answer = AnswerFeedback()
    for number, value in enumerate((0.25, 1.0, 0.5)):
        heard(on_answer, number, value, rater=f"r{number}")
    heard(on_answer, 9, None, type="label", text="x", source="note")
    assert values_of(on_answer) == {"csat": pytest.approx(1.75 / 3)} and values_of(None) == {}


def test_ratings_are_the_newest_of_each_rater_of_each_answer_in_log_order() -> None:
    first, second = AnswerFeedback(), AnswerFeedback()
    heard(first, 1, 0.5, rater="ann")
    heard(first, 5, 0.75, rater="ann", type="label", text="x")
    heard(second, 3, 0.25, rater="ann")
    heard(second, 4, None, rater="bob", type="label", text="x")
    assert ratings((first, second)) == (
        Rating(source="csat", value=0.25, rater="ann", time_ms=1_003),
        Rating(source="csat", value=0.75, rater="ann", time_ms=1_005),
    )
    many = [AnswerFeedback() for _ in range(MAX_RATINGS + 6)]
    for number, on_answer in enumerate(many):
        heard(on_answer, number, 0.5)
    assert [one.time_ms - 1_000 for one in ratings(reversed(many))] == list(range(6, 70)) and MAX_RATINGS == 64


SOURCES = {
    "csat": FeedbackRules(window_ms=10, default=0.25, discount=0.5),
    "judge": FeedbackRules(window_ms=10),
    "thumb": FeedbackRules(window_ms=10, default=0.0),
}


def test_an_answer_is_credited_with_what_later_ones_differ_from_the_usual_by() -> None:
    on_answer = AnswerFeedback()
    heard(on_answer, 1, 0.5)
    credits = [LaterCredit(2, {"csat": 1.0}), LaterCredit(1, {"csat": 0.25, "gone": 1.0})]
    assert returns(on_answer, credits, SOURCES) == {"csat": pytest.approx(0.5 + 0.5 * -0.25 + 0.25 * 0.5)}
    assert returns(None, credits[:1], SOURCES) == {"csat": pytest.approx(0.5 + 0.25 * 0.5)}
    usual = {"csat": 0.75}.__getitem__
    assert returns(None, credits[:1], SOURCES, usual) == {"csat": pytest.approx(0.75 + 0.25 * 0.25)}
    assert returns(None, [], SOURCES) == {}
    assert credited(answer("a.0", 0), None, SOURCES, False, credits[:1]).score("csat") == pytest.approx(0.625)


def test_the_usual_verdict_begins_neutral_and_is_then_the_mean_of_the_last_ones() -> None:
    memories: dict[str, Memory] = {}
    assert usual_of(memories, "acme", "csat") == NEUTRAL == 0.5
    assert USUAL_PRIOR == 8 and USUAL_WINDOW == 256
    for number in range(1, 20):
        learn_usual(memories, "acme", {}, {"csat": 1.0})
        neutral = max(0, 8 - number)
        assert usual_of(memories, "acme", "csat") == pytest.approx((number + neutral * 0.5) / (number + neutral))
    assert usual_of(memories, "acme", "judge") == usual_of(memories, "other", "csat") == 0.5
    learn_usual(memories, "acme", {"csat": 1.0}, {"csat": 0.0})
    assert usual_of(memories, "acme", "csat") == pytest.approx(18 / 19), "a verdict that is changed counts as it stands"


def test_rating_one_answer_and_taking_it_back_moves_nothing() -> None:
    memories: dict[str, Memory] = {}
    for _ in range(100):
        learn_usual(memories, "acme", {}, {"csat": 1.0})
        learn_usual(memories, "acme", {"csat": 1.0}, {})
    assert usual_of(memories, "acme", "csat") == 0.5
    for number in range(2 * USUAL_WINDOW):
        learn_usual(memories, "acme", {}, {"csat": number % 2})
    before = usual_of(memories, "acme", "csat")
    for _ in range(100):
        learn_usual(memories, "acme", {}, {"csat": 1.0})
        learn_usual(memories, "acme", {"csat": 1.0}, {})
    assert usual_of(memories, "acme", "csat") == pytest.approx(before)


def test_the_usual_verdict_follows_the_last_ones_with_a_fixed_share() -> None:
    memories: dict[str, Memory] = {}
    for value in [1.0] * USUAL_WINDOW + [0.0] * 3:
        learn_usual(memories, "acme", {}, {"csat": value, "judge": 0.5})
    assert usual_of(memories, "acme", "csat") == pytest.approx((1 - 1 / USUAL_WINDOW) ** 3)
    assert usual_of(memories, "acme", "judge") == 0.5
