"""A session that is rated as it goes: every word amends the turns before it, and each turn is trained once."""

from schemas import encode
from tests.streams.collect.collecting import FakePartition, decisions, folded, said
from tests.streams.collect.test_fold_turns import ref, rules, turn
from trainer.buffer.buffer import Buffer

TURNS = 5


def test_a_session_of_five_turns_rated_as_it_goes_trains_each_turn_once_whenever_it_is_drawn() -> None:
    inbox = FakePartition()
    for number in range(TURNS):
        inbox.extend([turn(number), said(ref(number), 1.0)])
    blocks = [block for one in decisions(folded(inbox, rules("amend", 0.9))) for block in one.blocks]
    assert len(blocks) > TURNS, "turns were amended"
    for every in (1, 2, 4, len(blocks)):
        buffer, trained = Buffer({"live": 1}), []
        for offset, one in enumerate(blocks):
            buffer.add(offset, encode(one), one)
            if (offset + 1) % every == 0 or offset + 1 == len(blocks):
                trained += [drawn.group for drawn in buffer.candidates("live")]
                buffer.take(buffer.candidates("live"))
        assert sorted(trained) == sorted({one.group for one in blocks}) and len(trained) == TURNS, every
