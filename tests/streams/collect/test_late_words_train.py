"""What late words train: collect's revisions, drawn by a trainer that is quicker than the next word."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from schemas import Block, encode
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from tests.streams.collect.collecting import DEADLINE_MS, FakePartition, answer, block, decisions, folded, said
from tests.streams.collect.test_fold_turns import ref, turn
from trainer.buffer.buffer import Buffer

REF = "hr-a1b2.0.0-0-0"
LANES = ("live", "human")


def trained(inbox: FakePartition, rules: Rules, max_uses: int = 1) -> Counter[str]:
    """Group to how often it was trained, by a trainer that trains whatever there is after each block."""
    buffer, uses = Buffer(dict.fromkeys(LANES, max_uses)), Counter[str]()
    sent: Sequence[Block] = [one for decision in decisions(folded(inbox, rules)) for one in decision.blocks]
    for offset, one in enumerate(sent):
        buffer.add(offset, encode(one), one)
        for lane in LANES:
            while waiting := buffer.candidates(lane):
                buffer.take(waiting)
                uses.update(candidate.group for candidate in waiting)
    return uses


def rules(late: str, discount: float = 0.0) -> Rules:
    source = FeedbackRules(window_ms=5_000, late=late, discount=discount)  # type: ignore[arg-type]
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source}, retrainings=2)


@pytest.mark.parametrize(("late", "expected"), [("amend", 1), ("retrain", 3)])
def test_two_hundred_late_words_of_one_rater_train_an_answer_no_more_than_the_settings_say(
    late: str, expected: int
) -> None:
    inbox = FakePartition(step_ms=1).extend([block(answer("a1b2.0", 0, size=1, lane="live"))])
    inbox.extend(said(REF, number % 2, id=str(number), rater="ann") for number in range(201))
    assert trained(inbox, rules(late)) == {"a1b2.0": expected}


def test_turns_of_a_session_that_is_rated_as_it_goes_are_trained_once_each() -> None:
    inbox = FakePartition()
    for number in range(5):
        inbox.extend([turn(number), said(ref(number), 1.0)])
    uses = trained(inbox, rules("amend", 0.9))
    assert len(uses) == 5 and set(uses.values()) == {1}


def waiting(inbox: FakePartition, rules: Rules) -> list[tuple[str, int]]:
    """(lane, how often retrained) of what a trainer that was asleep all the time may draw."""
    buffer = Buffer(dict.fromkeys(LANES, 1))
    for offset, one in enumerate(one for decision in decisions(folded(inbox, rules)) for one in decision.blocks):
        buffer.add(offset, encode(one), one)
    return [(lane, one.experiences[0].retrained) for lane in LANES for one in buffer.look_at(buffer.candidates(lane))]


def test_retrain_takes_the_place_of_a_copy_that_was_not_drawn_yet_and_a_retraction_leaves_none() -> None:
    words = [said(REF, value, id=str(value), rater="ann") for value in (0.5, 0.25, 0.75)]
    inbox = FakePartition().extend([block(answer("a1b2.0", 0, size=1, lane="live")), *words])
    assert waiting(inbox, rules("retrain")) == [("human", 2)]
    unscored = msgspec.structs.replace(answer("a1b2.0", 0, size=1, lane="live"), scores=())
    back = said(REF, 0.0, id="back", rater="ann", type="retraction")
    assert waiting(FakePartition().extend([block(unscored), *words, back]), rules("retrain")) == []
