"""Edited answers and late feedback, up to what a trainer draws."""

from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from infra.chain.chain import make_step, run_chain
from infra.chain.processor import Drop, processor
from schemas import Block, Control, Edit, Experience, Feedback, Span, encode
from schemas.experience import is_withdrawal, pair_fault, pair_side
from streams.collect.decision import Decision
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.processors.correct import Correct, answer_start
from streams.processors.difficulty import difficulty
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    REF,
    WINDOW_MS,
    FakePartition,
    answer,
    block,
    decisions,
    folded,
    rules,
    said,
    tick,
)
from tests.streams.processors.by_default import advantage, reward
from trainer.buffer.buffer import Buffer

SOURCE = FeedbackRules(window_ms=WINDOW_MS, late="amend")
RULES = Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": SOURCE}, corrects=True)


class Letters:
    """Spells a letter as its code point."""

    end = 2

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@processor(version=1, inline=True)
def not_empty(experience: Experience) -> Experience | Drop:
    return experience if experience.response else Drop("empty")


CORRECT = make_step("correct", Correct(speller=Letters()))
STEPS = (CORRECT, make_step("not_empty", not_empty), make_step("reward", reward))


def live() -> Block:
    member = answer("a1b2.0", 0, size=1, lane="live")
    return block(msgspec.structs.replace(member, scores=(), tenant="acme", subject="ada", key_id="k1"))


def edit(text: str, *, id: str, rater: str = "ann", type: str = "correction") -> Feedback:
    return Feedback(ref=REF, id=id, source="csat", rater=rater, type=type, text=text)  # type: ignore[arg-type]


BACK = Feedback(ref=REF, id="back", source="csat", rater="ann", type="retraction")


def decided(records: Sequence[Block | Control], rules: Rules = RULES) -> list[Decision]:
    return decisions(folded(FakePartition().extend(records), rules, chain=partial(run_chain, STEPS)))


def sent(decisions: Sequence[Decision], lane: str) -> list[tuple[Experience, ...]]:
    blocks = [sent_block for decision in decisions for sent_block in decision.blocks]
    return [sent_block.experiences for sent_block in blocks if sent_block.experiences[0].lane == lane]


def held_by_a_trainer(decisions: Sequence[Decision], lane: str) -> list[tuple[Experience, ...]]:
    buffer = Buffer({"live": 1, "expert": 4, "human": 1})
    for offset, made in enumerate(sent_block for decision in decisions for sent_block in decision.blocks):
        buffer.add(offset, encode(made), made)
    return [item.experiences for item in buffer.look_at(buffer.candidates(lane))]  # type: ignore[arg-type]


def test_an_edited_answer_becomes_a_demonstration_and_a_pair_on_the_answers_own_prompt() -> None:
    decisions = decided([live(), edit("ok", id="1")])
    original = live().experiences[0]
    ((shown,),), (pair,) = sent(decisions, "expert"), sent(decisions, "human")
    expected = [*original.tokens[: original.num_prompt].tolist(), ord("o"), ord("k"), 2]
    assert shown.tokens.tolist() == expected and shown.spans == (Span(2, 5, -1, ratio=False),)
    assert pair_fault(pair) == "" and [pair_side(member) for member in pair] == ["chosen", "rejected"]
    assert [member.tokens.tolist() for member in pair] == [expected, original.tokens.tolist()]
    assert shown.response == pair[0].response == "ok" and pair[1].response == original.response
    for member in (shown, *pair):
        assert (member.tenant, member.subject, member.key_id) == ("acme", "ada", "k1")
        assert member.parent == original.id and member.origin == "correct"
        assert (member.reward, member.advantage, member.scores) == (None, None, ())


def test_a_newer_edit_replaces_what_was_made_of_the_older_one() -> None:
    decisions = decided([live(), edit("ok", id="1"), edit("fine", id="2", rater="bob")])
    ((shown,),), (pair,) = held_by_a_trainer(decisions, "expert"), held_by_a_trainer(decisions, "human")
    assert shown.response == pair[0].response == "fine"
    assert {decision[0].id for decision in sent(decisions, "expert")} == {shown.id}


def test_a_retracted_edit_is_taken_back_from_what_was_not_drawn_yet() -> None:
    decisions = decided([live(), edit("ok", id="1"), BACK])
    assert held_by_a_trainer(decisions, "expert") == held_by_a_trainer(decisions, "human") == []
    assert all(is_withdrawal(sent(decisions, lane)[-1][0]) for lane in ("expert", "human"))
    again = decided([live(), edit("ok", id="1"), BACK, edit("fine", id="3")])
    assert [item[0].response for item in held_by_a_trainer(again, "expert")] == ["fine"]


def test_an_edit_taken_back_before_the_window_closed_makes_nothing() -> None:
    given = msgspec.structs.replace(RULES, sources={"csat": SOURCE, "other": SOURCE})
    inbox = FakePartition().extend([live(), edit("ok", id="1"), BACK])
    inbox.append(tick(), after_ms=WINDOW_MS)
    found = decisions(folded(inbox, given, chain=partial(run_chain, STEPS)))
    assert [decision.blocks for decision in found] == [()]


def test_where_edits_are_not_learned_from_they_are_counted() -> None:
    inbox = FakePartition().extend([live(), edit("ok", id="1")])
    given = msgspec.structs.replace(RULES, corrects=False)
    results = folded(inbox, given, chain=partial(run_chain, STEPS))
    assert results[1].dropped["correction without [collect.correct]"] == 1
    assert not sent(results[1].decisions, "expert")


def test_an_edit_replaces_the_last_turn_and_all_of_it() -> None:
    member = answer("a1b2.0", 0, size=1)
    spans = (Span(1, 2, 3), Span(3, 5, 3), Span(5, 8, 4))
    long = member.with_bulk(tokens=range(8), logprobs=[-0.1] * 6, spans=spans)
    assert answer_start(long) == 3, "a hot reload within the last answer does not begin another"


def test_what_redaction_finds_in_an_edit_is_masked_before_it_is_spelled() -> None:
    marked = msgspec.structs.replace(live().experiences[0], edit=Edit(text="ask ada@x.example", count=1))
    (_, shown, chosen, _) = Correct(speller=Letters(), kinds=("email",))((marked,))
    assert shown.response == chosen.response == "ask [email]"
    assert bytes(shown.tokens[shown.num_prompt : -1].tolist()) == b"ask [email]"


LANES = ("live", "human")


def waiting(inbox: FakePartition, given: Rules) -> list[tuple[str, int]]:
    """(lane, how often retrained) of what a trainer that was asleep all the time may draw."""
    buffer = Buffer(dict.fromkeys(LANES, 1))
    for offset, made in enumerate(
        sent_block for decision in decisions(folded(inbox, given)) for sent_block in decision.blocks
    ):
        buffer.add(offset, encode(made), made)
    return [(lane, item.experiences[0].retrained) for lane in LANES for item in buffer.look_at(buffer.candidates(lane))]


def test_retrain_takes_the_place_of_a_copy_that_was_not_drawn_yet_and_a_retraction_leaves_none() -> None:
    words = [said(REF, value, id=str(value), rater="ann") for value in (0.5, 0.25, 0.75)]
    inbox = FakePartition().extend([block(answer("a1b2.0", 0, size=1, lane="live")), *words])
    assert waiting(inbox, rules("retrain")) == [("human", 2)]
    unscored = msgspec.structs.replace(answer("a1b2.0", 0, size=1, lane="live"), scores=())
    back = said(REF, 0.0, id="back", rater="ann", type="retraction")
    assert waiting(FakePartition().extend([block(unscored), *words, back]), rules("retrain")) == []


@pytest.mark.parametrize("choices", [1, 2])
def test_a_retrained_answer_has_the_advantage_of_an_answer_of_production(choices: int) -> None:
    steps = [make_step(step.func.__name__, step) for step in (reward, advantage)] + [
        make_step("difficulty", difficulty)
    ]
    members = [answer("a1b2.0", episode, size=choices, lane="live") for episode in range(choices)]
    earlier = [answer(f"a1b2c{number}.0", 0, size=1, lane="live") for number in range(8)]
    inbox = FakePartition().extend(block(msgspec.structs.replace(member, scores=())) for member in earlier)
    inbox.extend(said(f"hr-{member.id}", 0.0) for member in earlier)
    inbox.extend([block(*(msgspec.structs.replace(member, scores=()) for member in members)), said(REF, 0.0, id="1")])
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.append(said(REF, 1.0, id="2"))
    last = {
        late: decisions(folded(inbox, rules(late), chain=partial(run_chain, steps)))[-1]
        for late in ("amend", "retrain")
    }
    ((amended,), (again,)) = (decision.blocks[-1].experiences for decision in last.values())
    assert (again.lane, again.retrained, again.reward, last["retrain"].closure.outcome) == ("human", 1, 1.0, "buffered")
    assert again.advantage == amended.advantage and (again.advantage or 0) > 0
