"""collect and feedback: who it is credited to, how long answers wait, and what late words do."""

import msgspec
import pytest

from actors.config import PeopleConfig
from actors.master.gate.counts import Counts
from schemas import Block
from streams.collect.feedback import FeedbackRules, take_feedback, values_of
from streams.collect.group import AnswerFeedback, LoggedFeedback
from streams.collect.rules import Rules
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    drops,
    folded,
    said,
    tick,
)

WINDOW_MS = 5_000


def rules(late: str = "drop", default: float | None = None, *sources: str) -> Rules:
    source = FeedbackRules(window_ms=WINDOW_MS, default=default, late=late)  # type: ignore[arg-type]
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources=dict.fromkeys(sources or ("csat",), source))


def live(group: str = "a1b2.0") -> Block:
    return block(answer(group, 0, size=1, lane="live"))


REF = "hr-a1b2.0.0-0-0"


def rewards(inbox: FakePartition, given: Rules) -> dict[tuple[str, int], float | None]:
    return {key: members[0][1] for key, members in buffered(folded(inbox, given)).items()}


def test_a_live_answer_waits_for_its_feedback() -> None:
    inbox = FakePartition().extend([live()])
    assert not decisions(folded(inbox, rules()))
    inbox.append(said(REF, 0.8))
    assert rewards(inbox, rules()) == {("a1b2.0", 0): 0.8}


def test_feedback_before_its_answer_waits_for_it() -> None:
    inbox = FakePartition().extend([said(REF, 0.8), live()])
    assert rewards(inbox, rules()) == {("a1b2.0", 0): 0.8}


def test_feedback_whose_own_time_closes_the_window_is_late_feedback() -> None:
    inbox = FakePartition().extend([live()])
    inbox.append(said(REF, 0.8), after_ms=WINDOW_MS)
    inbox.append(said(REF, 0.2, rater="second"))
    heard = buffered(folded(inbox, rules("amend")))
    assert [(key[1], members[0][1]) for key, members in heard.items()] == [(0, 0.0), (1, 0.8), (2, 0.5)]


def test_feedback_without_an_answer_is_counted_and_dead_lettered() -> None:
    inbox = FakePartition().extend([said(REF, 0.8)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    results = folded(inbox, rules())
    assert drops(results) == {"feedback without an answer": 1}
    assert [letter.offset for result in results for letter in result.letters] == [0]


def test_feedback_with_a_bad_ref_is_dead_lettered() -> None:
    results = folded(FakePartition().extend([said("nonsense", 0.8)]), rules())
    assert [letter.reason for result in results for letter in result.letters] == ["bad ref"]


def test_silence_differs_from_zero() -> None:
    silent, zero = FakePartition().extend([live()]), FakePartition().extend([live(), said(REF, 0.0)])
    silent.append(tick(), after_ms=WINDOW_MS)
    assert rewards(zero, rules()) == {("a1b2.0", 0): 0.0}
    experience = decisions(folded(silent, rules()))[0].blocks[0].experiences[0]
    assert experience.score("csat") is None


def test_silence_takes_the_default_when_the_window_closes() -> None:
    inbox = FakePartition().extend([live()])
    inbox.append(tick(), after_ms=WINDOW_MS - 1)
    assert not rewards(inbox, rules("drop", 0.25))
    inbox.append(tick(), after_ms=1)
    assert rewards(inbox, rules("drop", 0.25)) == {("a1b2.0", 0): 0.25}


def test_an_answer_waits_for_every_source() -> None:
    given = rules("drop", None, "csat", "thumbs")
    inbox = FakePartition().extend([live(), said(REF, 0.8)])
    assert not rewards(inbox, given)
    inbox.append(said(REF, 0.2, source="thumbs"))
    assert rewards(inbox, given) == {("a1b2.0", 0): 0.8}


def test_rollouts_do_not_wait_for_feedback() -> None:
    inbox = FakePartition().extend([block(answer("t.0", 0), answer("t.0", 1))])
    assert len(decisions(folded(inbox, rules()))) == 1


def test_feedback_is_credited_to_the_answer_it_names_and_to_no_other() -> None:
    answers = block(*(answer("a1b2.0", episode, size=2, lane="live") for episode in range(2)))
    inbox = FakePartition().extend([answers, said("a1b2.0.0-1-0", 0.7)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    assert buffered(folded(inbox, rules())) == {("a1b2.0", 0): [("a1b2.0.0-0-0", 0.0), ("a1b2.0.0-1-0", 0.7)]}


def test_feedback_for_an_answer_that_never_was_is_counted() -> None:
    inbox = FakePartition().extend([said("a1b2.0.0-9-0", 0.7), live(), said(REF, 0.5)])
    assert drops(folded(inbox, rules())) == {"feedback for an unknown answer": 1}


def test_the_same_feedback_twice_counts_once() -> None:
    inbox = FakePartition().extend([live(), said(REF, 0.8, id="x"), said(REF, 0.8, id="x")])
    results = folded(inbox, rules("amend"))
    assert len(decisions(results)) == 1


def test_late_feedback_is_counted_when_its_policy_is_drop() -> None:
    inbox = FakePartition().extend([live(), said(REF, 0.8)])
    inbox.append(said(REF, 0.1, id="later"), after_ms=WINDOW_MS)
    results = folded(inbox, rules("drop"))
    assert len(decisions(results)) == 1
    assert drops(results) == {"late feedback": 1}


@pytest.mark.parametrize(("late", "lane"), [("amend", "live"), ("retrain", "human")])
def test_late_feedback_sends_a_new_revision(late: str, lane: str) -> None:
    inbox = FakePartition().extend([live(), said(REF, 0.8), said(REF, 0.1, id="later")])
    results = folded(inbox, rules(late))
    last = [decision.blocks[-1].experiences[0] for decision in decisions(results)]
    assert [(one.revision, one.reward) for one in last] == [(0, 0.8), (1, 0.1)]
    sent = decisions(results)[1].blocks[-1].experiences[0]
    assert (sent.lane, sent.revision, sent.id) == (lane, 1, "a1b2.0.0-0-0")


def test_a_retraction_sends_a_revision_without_what_it_took_back() -> None:
    back = said(REF, 0.0, id="back", type="retraction")
    inbox = FakePartition().extend([live(), said(REF, 0.8), back])
    last = decisions(folded(inbox, rules("amend")))[1]
    assert last.closure.revision == 1
    assert last.blocks[0].experiences[0].score("csat") is None


def test_late_feedback_about_an_answer_the_log_no_longer_holds_is_counted() -> None:
    inbox = FakePartition().extend([live(), said(REF, 0.8), said(REF, 0.1, id="later")])
    results = folded(inbox, rules("amend"), kept_from=1)
    assert drops(results) == {"answer no longer in the log": 1}
    assert len(decisions(results)) == 1


def test_raters_are_averaged_and_each_may_revise() -> None:
    words = AnswerFeedback()
    for item in (
        said(REF, 0.0, id="1", rater="ann"),
        said(REF, 1.0, id="2", rater="bob"),
        said(REF, 0.5, id="3", rater="ann"),
    ):
        take_feedback(words, LoggedFeedback(item, 0, 0))
    assert values_of(words) == {"csat": 0.75}
    take_feedback(words, LoggedFeedback(said(REF, 0.0, id="4", rater="bob", type="retraction"), 0, 0))
    assert values_of(words) == {"csat": 0.5}


def test_a_closure_says_what_was_on_trial_and_a_withdrawn_rating_closes_the_answer_anew_without_one() -> None:
    asked = msgspec.structs.replace(answer("a1b2.0", 0, size=1, lane="live"), scores=(), trial=7)
    withdrawn = said(REF, 0.0, id="2", type="retraction")
    inbox = FakePartition().extend([block(asked), said(REF, 0.2, id="1"), withdrawn])
    closures = [decision.closure for decision in decisions(folded(inbox, rules("amend")))]
    assert [(one.revision, one.mean_reward, one.version, one.trial) for one in closures] == [
        (0, 0.2, 1, 7),
        (1, None, 1, 7),
    ]
    assert [
        decision.closure.trial
        for decision in decisions(folded(FakePartition().extend([live(), said(REF, 1.0)]), rules()))
    ] == [-1]
    counts, heard = Counts(PeopleConfig(rating_window="1h")), []
    for closure in closures:
        counts.closure(closure, closure.answered_ms)
        heard.append([[*row] for sums in counts.comparison(7).rated.values() for row in sums.values()])
    assert heard == [[[1, 1]], [[0, 0]]]
