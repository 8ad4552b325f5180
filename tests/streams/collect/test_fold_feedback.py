"""Fold and feedback: credit, waiting, ratings, late feedback and its limits."""

import sys
from collections.abc import Sequence
from types import FrameType

import msgspec
import pytest

from actors.config import PeopleConfig
from actors.master.gate.counts import Counts
from infra.chain.processor import Memory
from schemas import Closure, Experience, Feedback, Rating
from streams.collect.feedback import (
    MAX_COUNTED,
    MAX_RATINGS,
    NEUTRAL,
    TOO_MANY,
    USUAL_PRIOR,
    USUAL_WINDOW,
    FeedbackRules,
    credited,
    learn_usual,
    ratings,
    returns,
    take_feedback,
    usual_value,
)  # fmt: skip  # fmt: skip
from streams.collect.rules import Rules
from streams.collect.state import AnswerFeedback, LaterCredit, LoggedFeedback, State
from tests.streams.collect.collecting import (
    REF,
    WINDOW_MS,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    drops,
    folded,
    live,
    rules,
    said,
    stub,
    tick,
)
from tests.streams.collect.test_fold_turns import group_of_turn, ref, turn


def rewards(inbox: FakePartition, given: Rules) -> dict[tuple[str, int], float | None]:
    return {key: members[0][1] for key, members in buffered(folded(inbox, given)).items()}


def test_feedback_whose_own_time_closes_the_window_is_late_feedback() -> None:
    inbox = FakePartition().extend([live()])
    inbox.append(said(REF, 0.8), after_ms=WINDOW_MS)
    inbox.append(said(REF, 0.2, rater="second"))
    heard = buffered(folded(inbox, rules("amend")))
    assert [(key[1], members[0][1]) for key, members in heard.items()] == [(0, 0.0), (1, 0.8), (2, 0.5)]


def test_feedback_without_an_answer_is_counted_and_dead_lettered() -> None:
    inbox = FakePartition().extend([said(REF, 0.8)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    results = folded(inbox, rules("drop"))
    assert drops(results) == {"feedback without an answer": 1}
    assert [letter.offset for result in results for letter in result.letters] == [0]


def test_feedback_with_a_bad_ref_is_dead_lettered() -> None:
    results = folded(FakePartition().extend([said("nonsense", 0.8)]), rules("drop"))
    assert [letter.reason for result in results for letter in result.letters] == ["bad ref"]


def test_silence_differs_from_zero() -> None:
    silent, zero = FakePartition().extend([live()]), FakePartition().extend([live(), said(REF, 0.0)])
    silent.append(tick(), after_ms=WINDOW_MS)
    assert rewards(zero, rules("drop")) == {("a1b2.0", 0): 0.0}
    experience = decisions(folded(silent, rules("drop")))[0].blocks[0].experiences[0]
    assert experience.score("csat") is None


def test_silence_takes_the_default_when_the_window_closes() -> None:
    inbox = FakePartition().extend([live()])
    inbox.append(tick(), after_ms=WINDOW_MS - 1)
    assert not decisions(folded(inbox, rules("drop", default=0.25)))
    inbox.append(tick(), after_ms=1)
    assert rewards(inbox, rules("drop", default=0.25)) == {("a1b2.0", 0): 0.25}


def test_an_answer_waits_for_every_source() -> None:
    given = rules("drop", sources=("csat", "thumbs"))
    inbox = FakePartition().extend([live(), said(REF, 0.8)])
    assert not decisions(folded(inbox, given))
    inbox.append(said(REF, 0.2, source="thumbs"))
    assert rewards(inbox, given) == {("a1b2.0", 0): 0.8}


def test_feedback_is_credited_to_the_answer_it_names_and_to_no_other() -> None:
    answers = block(*(answer("a1b2.0", episode, size=2, lane="live") for episode in range(2)))
    inbox = FakePartition().extend([answers, said("a1b2.0.0-1-0", 0.7)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    assert buffered(folded(inbox, rules("drop"))) == {("a1b2.0", 0): [("a1b2.0.0-0-0", 0.0), ("a1b2.0.0-1-0", 0.7)]}


@pytest.mark.parametrize(("late", "lane"), [("amend", "live"), ("retrain", "human")])
def test_late_feedback_sends_a_new_revision(late: str, lane: str) -> None:
    inbox = FakePartition().extend([live(), said(REF, 0.8), said(REF, 0.1, id="later")])
    results = folded(inbox, rules(late))
    last = [decision.blocks[-1].experiences[0] for decision in decisions(results)]
    assert [(item.revision, item.reward) for item in last] == [(0, 0.8), (1, 0.1)]
    sent = decisions(results)[1].blocks[-1].experiences[0]
    assert (sent.lane, sent.revision, sent.id) == (lane, 1, "a1b2.0.0-0-0")


def test_a_retraction_sends_a_revision_without_what_it_took_back() -> None:
    back = said(REF, 0.0, id="back", type="retraction")
    inbox = FakePartition().extend([live(), said(REF, 0.8), back])
    last = decisions(folded(inbox, rules("amend")))[1]
    assert last.closure.revision == 1
    assert last.blocks[0].experiences[0].score("csat") is None


def test_an_answer_counts_as_dropped_once_whatever_stage_drops_it_and_however_often_it_is_revised() -> None:
    answers = [answer("a1b2.0", episode, size=4, lane="live") for episode in range(2)]
    over = msgspec.structs.replace(stub("a1b2.0", 2, size=4, reason="group over"), stage="explore")
    short = msgspec.structs.replace(stub("a1b2.0", 3, size=4), stage="verify")
    inbox = FakePartition().extend([block(answers[0], msgspec.structs.replace(answers[1], scores=())), over, short])
    inbox.append(said(REF, 0.8))
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.append(said(REF, 0.1, id="later"))
    results = folded(inbox, rules("amend"))
    assert [decision.closure.revision for decision in decisions(results)] == [0, 1]
    assert drops(results) == {"group over": 1, "unlabelled": 1}, "verify counts its own"


def test_late_feedback_about_an_answer_the_log_no_longer_holds_is_counted() -> None:
    inbox = FakePartition().extend([live(), said(REF, 0.8), said(REF, 0.1, id="later")])
    results = folded(inbox, rules("amend"), kept_from=1)
    assert drops(results) == {"answer no longer in the log": 1}
    assert len(decisions(results)) == 1


def test_a_closure_says_what_was_on_trial_and_a_withdrawn_rating_closes_the_answer_anew_without_one() -> None:
    asked = msgspec.structs.replace(answer("a1b2.0", 0, size=1, lane="live"), scores=(), trial=7)
    withdrawn = said(REF, 0.0, id="2", type="retraction")
    inbox = FakePartition().extend([block(asked), said(REF, 0.2, id="1"), withdrawn])
    closures = [decision.closure for decision in decisions(folded(inbox, rules("amend")))]
    assert [(closure.revision, closure.mean_reward, closure.version, closure.trial) for closure in closures] == [
        (0, 0.2, 1, 7),
        (1, None, 1, 7),
    ]
    assert [
        decision.closure.trial
        for decision in decisions(folded(FakePartition().extend([live(), said(REF, 1.0)]), rules("drop")))
    ] == [-1]
    counts, heard = Counts(PeopleConfig(rating_window="1h")), []
    for closure in closures:
        counts.closure(closure, closure.answered_ms)
        heard.append([[*row] for sums in counts.comparison(7).rated.values() for row in sums.values()])
    assert heard == [[[1, 1]], [[0, 0]]]


RULES = rules(discount=0.9)


def closures(inbox: FakePartition, given: Rules = RULES) -> list[Closure]:
    return [decision.closure for decision in decisions(folded(inbox, given))]


def newest(inbox: FakePartition, given: Rules = RULES) -> dict[str, Closure]:
    return {closure.group: closure for closure in closures(inbox, given)}


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


def test_silence_and_its_default_are_no_rating() -> None:
    inbox = FakePartition().extend([live()])
    inbox.append(tick(), after_ms=WINDOW_MS)
    (closure,) = closures(inbox, rules(default=0.7))
    assert (closure.mean_reward, closure.ratings) == (0.7, ())


def answered_with(words: Sequence[Feedback]) -> FakePartition:
    """An answer, and what is said about it; the first word closes it."""
    return FakePartition(step_ms=1).extend([block(answer("a1b2.0", 0, size=1, lane="live")), *words])


def words(*values: float, raters: Sequence[str] = ("ann",)) -> list[Feedback]:
    each = enumerate(zip(values, raters * len(values), strict=False))
    return [said(REF, value, id=str(number), rater=rater) for number, (value, rater) in each]


def sent(inbox: FakePartition, given: Rules) -> list[Experience]:
    """Without what only takes back."""
    blocks = [sent_block for decision in decisions(folded(inbox, given)) for sent_block in decision.blocks]
    return [member for sent in blocks for member in sent.experiences if member.kind != "withdrawal"]


@pytest.mark.parametrize("late", ["amend", "retrain"])
def test_the_same_value_again_makes_no_new_revision(late: str) -> None:
    again = answered_with(words(0.5, 0.5, 0.5))
    assert [closure.revision for closure in closures(again, rules(late))] == [0]
    assert not drops(folded(again, rules(late)))


@pytest.mark.parametrize("late", ["amend", "retrain"])
def test_another_rater_of_the_same_mind_is_a_rating_and_trains_nothing_anew(late: str) -> None:
    inbox = answered_with(words(0.5, 0.5, raters=("ann", "bob")))
    ended = closures(inbox, rules(late))
    assert [(closure.revision, len(closure.ratings or ())) for closure in ended] == [(0, 1), (1, 2)]
    assert [(sent_block.revision, sent_block.lane) for sent_block in sent(inbox, rules(late))] == [(0, "live")]


def test_retrain_trains_again_once_per_verdict_and_no_more_than_so_often() -> None:
    inbox = answered_with(words(0.5, 0.25, 0.25, 0.75, 0.5, 0.25))
    found = [
        (sent_block.revision, sent_block.lane, sent_block.retrained)
        for sent_block in sent(inbox, rules("retrain", retrainings=2))
    ]
    # Past the bound, later verdicts change the copy that was not drawn yet.
    assert found == [(0, "live", 0), (1, "human", 1), (2, "human", 2), (3, "human", 2), (4, "human", 2)]
    assert drops(folded(inbox, rules("retrain", retrainings=2))) == {"retrained often enough": 2}


def test_a_credit_of_later_turns_trains_no_turn_again() -> None:
    inbox = FakePartition().extend([turn(0), said(ref(0), 0.5), turn(1), said(ref(1), 1.0)])
    found = [
        (sent_block.group[-1], sent_block.revision, sent_block.lane, sent_block.retrained)
        for sent_block in sent(inbox, rules("retrain", 0.5))
    ]
    assert found == [("0", 0, "live", 0), ("1", 0, "live", 0), ("0", 1, "live", 0)]


def test_late_words_close_an_answer_anew_no_more_than_so_often_and_the_rest_is_counted() -> None:
    flips = answered_with(words(*(number % 2 for number in range(201))))
    assert closures(flips, rules("amend", revisions=16))[-1].revision == 16
    assert drops(folded(flips, rules("amend", revisions=16))) == {"revised often enough": 200 - 16}


def test_what_is_taken_back_is_taken_back_however_often_an_answer_was_revised() -> None:
    back = said(REF, 0.0, id="back", rater="ann", type="retraction")
    ended = closures(answered_with([*words(0.0, 1.0, 0.0, 1.0), back]), rules("amend", revisions=2))
    assert [(closure.revision, len(closure.ratings or ())) for closure in ended] == [(0, 1), (1, 1), (2, 1), (3, 0)]


def test_of_many_raters_the_first_stand_and_the_others_are_counted() -> None:
    number = 3 * MAX_COUNTED
    raters = [f"r{index}" for index in range(number)]
    inbox = FakePartition().extend(
        [*words(*[1.0] * number, raters=raters), block(answer("a1b2.0", 0, size=1, lane="live"))]
    )
    (closure,) = closures(inbox, rules("amend"))
    assert [rating.rater for rating in closure.ratings or ()] == raters[:MAX_COUNTED]
    assert drops(folded(inbox, rules("amend"))) == {TOO_MANY: number - MAX_COUNTED}


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
        inbox, state = answered_with(words(*(index % 2 for index in range(number)), raters=raters)), State()
        work = lines_run(inbox, rules("amend"), state)
        return work, len(msgspec.msgpack.encode(state.groups["a1b2.0"]))

    few, many = flood(250), flood(1000)
    assert many[0] < 4.2 * few[0], "four times the words, four times the work"
    assert many[1] < 1.1 * few[1], "and no more to save each time"


ANSWER = "a.0.0-0-0"


def take(on_answer: AnswerFeedback, number: int, value: float | None = None, **more: object) -> str:
    given = {"ref": ANSWER, "id": str(number), "value": value, "source": "csat", **more}
    return take_feedback(on_answer, LoggedFeedback(msgspec.convert(given, Feedback), number, 1_000 + number))


def edit(on_answer: AnswerFeedback, number: int, text: str, **more: object) -> str:
    return take(on_answer, number, type="correction", text=text, **more)


def test_a_retraction_takes_back_all_of_its_rater_at_its_source_and_nobody_elses() -> None:
    on_answer = AnswerFeedback()
    take(on_answer, 1, 0.5, rater="ann")
    edit(on_answer, 2, "better", rater="ann")
    take(on_answer, 3, 0.5, rater="bob")
    take(on_answer, 4, 0.5, rater="ann", source="other")
    assert on_answer.edits == 1
    take(on_answer, 4, type="retraction", rater="dan")
    assert on_answer.edits == 1 and len(on_answer.counted) == 4, "he had said nothing"
    assert take(on_answer, 5, type="retraction", rater="ann") == ""
    assert [said.offset for said in on_answer.counted] == [3, 4] and on_answer.edits == 2
    take(on_answer, 6, type="retraction", rater="bob")
    assert on_answer.edits == 2, "no edit was among them"


def test_ratings_are_the_newest_of_each_rater_of_each_answer_in_log_order() -> None:
    first, second = AnswerFeedback(), AnswerFeedback()
    take(first, 1, 0.5, rater="ann")
    take(first, 5, 0.75, rater="ann", type="label", text="x")
    take(second, 3, 0.25, rater="ann")
    take(second, 4, None, rater="bob", type="label", text="x")
    assert ratings((first, second)) == (
        Rating(source="csat", value=0.25, rater="ann", time_ms=1_003),
        Rating(source="csat", value=0.75, rater="ann", time_ms=1_005),
    )
    many = [AnswerFeedback() for _ in range(MAX_RATINGS + 6)]
    for number, on_answer in enumerate(many):
        take(on_answer, number, 0.5)
    assert [rating.time_ms - 1_000 for rating in ratings(reversed(many))] == list(range(6, 70)) and MAX_RATINGS == 64


SOURCES = {
    "csat": FeedbackRules(window_ms=10, default=0.25, discount=0.5),
    "judge": FeedbackRules(window_ms=10),
    "thumb": FeedbackRules(window_ms=10, default=0.0),
}


def test_an_answer_is_credited_with_what_later_ones_differ_from_the_usual_by() -> None:
    on_answer = AnswerFeedback()
    take(on_answer, 1, 0.5)
    credits = [LaterCredit(2, {"csat": 1.0}), LaterCredit(1, {"csat": 0.25, "gone": 1.0})]
    assert returns(on_answer, credits, SOURCES) == {"csat": pytest.approx(0.5 + 0.5 * -0.25 + 0.25 * 0.5)}
    assert returns(None, credits[:1], SOURCES) == {"csat": pytest.approx(0.5 + 0.25 * 0.5)}
    usual = {"csat": 0.75}.__getitem__
    assert returns(None, credits[:1], SOURCES, usual) == {"csat": pytest.approx(0.75 + 0.25 * 0.25)}
    assert returns(None, [], SOURCES) == {}
    assert credited(answer("a.0", 0), None, SOURCES, False, credits[:1]).score("csat") == pytest.approx(0.625)


def test_the_usual_verdict_begins_neutral_and_is_then_the_mean_of_the_last_ones() -> None:
    memories: dict[str, Memory] = {}
    assert usual_value(memories, "acme", "csat") == NEUTRAL == 0.5
    assert USUAL_PRIOR == 8 and USUAL_WINDOW == 256
    for number in range(1, 20):
        learn_usual(memories, "acme", {}, {"csat": 1.0})
        neutral = max(0, 8 - number)
        assert usual_value(memories, "acme", "csat") == pytest.approx((number + neutral * 0.5) / (number + neutral))
    assert usual_value(memories, "acme", "judge") == usual_value(memories, "other", "csat") == 0.5
    learn_usual(memories, "acme", {"csat": 1.0}, {"csat": 0.0})
    assert usual_value(memories, "acme", "csat") == pytest.approx(18 / 19), (
        "a verdict that is changed counts as it stands"
    )


def test_rating_one_answer_and_taking_it_back_moves_nothing() -> None:
    memories: dict[str, Memory] = {}
    for _ in range(100):
        learn_usual(memories, "acme", {}, {"csat": 1.0})
        learn_usual(memories, "acme", {"csat": 1.0}, {})
    assert usual_value(memories, "acme", "csat") == 0.5
    for number in range(2 * USUAL_WINDOW):
        learn_usual(memories, "acme", {}, {"csat": number % 2})
    before = usual_value(memories, "acme", "csat")
    for _ in range(100):
        learn_usual(memories, "acme", {}, {"csat": 1.0})
        learn_usual(memories, "acme", {"csat": 1.0}, {})
    assert usual_value(memories, "acme", "csat") == pytest.approx(before)
