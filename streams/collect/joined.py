"""Turns of a session wait for each other and are closed together, so that what their prompts share is trained once.

    turn 1  ready ──────────────┐
    turn 2  waits for feedback ─┼─ the session is over and all are ready ──> closed in their order, joined
    turn 3  ready ──────────────┘

A turn is ready when nothing more is waited for that is about itself: every source has spoken, or its window has passed. A
session is over for its open turns when no turn came for `session_ms`, when its client said that none follows, or when the next
one rewrote its history; what comes then begins anew.

Guarantees: what counts of a turn is its own, as if it were alone; a turn waits for the slowest of its session and no longer;
a session that never ends is closed in runs of MAX_JOINED turns. All follows from the log and its times.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from schemas import Block, Experience, Join
from schemas.parts import HISTORY_REWRITTEN
from schemas.withdrawal import is_withdrawal
from streams.collect.decision import Decision
from streams.collect.group import Group
from streams.collect.turns import NO_TURN

MAX_JOINED = 64


class Over(NamedTuple):
    """What of a session is over.

    runs: turns to be closed, each run together. again_ms: when to look again, 0 for never.
    """

    runs: list[Sequence[Group]]
    again_ms: int


def ended_by(came: Group, answer: Experience, turns: Iterable[Group]) -> list[Group]:
    """Open turns of a session that is over for them because of the one that just came."""
    others = [turn for turn in turns if turn is not came and not turn.is_closed and turn.depth != NO_TURN]
    if came.depth == NO_TURN:
        return []
    if answer.ends_session:
        return [*others, came]
    return others if answer.part_reason == HISTORY_REWRITTEN else []


def over(turns: Iterable[Group], now_ms: int, session_ms: int) -> Over:
    """What of a session's turns can be closed now."""
    known = sorted(
        (turn for turn in turns if turn.depth != NO_TURN and not turn.is_closed and turn.winner >= 0),
        key=lambda turn: (turn.depth, turn.id),
    )
    if session_ms == 0:
        return Over([[turn] for turn in known if turn.is_ready], 0)
    ended, rest = ([turn for turn in known if turn.is_over == is_over] for is_over in (True, False))
    silent_ms = max((came_ms(turn) for turn in rest), default=0) + session_ms
    goes_on = bool(rest) and silent_ms > now_ms
    runs = []
    for turns_of, may_follow in ((ended, False), (rest, goes_on)):
        ready = [turn for turn in turns_of if turn.is_ready]
        whole = len(ready) if not may_follow and len(ready) == len(turns_of) else len(ready) // MAX_JOINED * MAX_JOINED
        runs += runs_of(ready[:whole])
    return Over(runs, silent_ms if goes_on else 0)


def runs_of(turns: Sequence[Group]) -> list[Sequence[Group]]:
    """Turns cut into runs of MAX_JOINED, in their order."""
    return [turns[start : start + MAX_JOINED] for start in range(0, len(turns), MAX_JOINED)]


def came_ms(turn: Group) -> int:
    """Log-append time of a turn's answer."""
    return turn.attempts[turn.winner].first_ms


def joined(decisions: Sequence[Decision], name: str) -> list[Decision]:
    """The decisions about some turns, their answers as a join called `name`; as they are where fewer than two go on."""
    left = sum(_is_answer(one, decision) for decision in decisions for one in _all(decision.blocks))
    if left < 2:
        return list(decisions)
    following = iter(range(left - 1, -1, -1))
    return [_in_joins(decision, lambda: Join(name, next(following))) for decision in decisions]


def joined_again(decision: Decision, name: str) -> Decision:
    """A decision about a turn that was closed in a join before."""
    return _in_joins(decision, lambda: Join(name))


def _in_joins(decision: Decision, join: Callable[[], Join]) -> Decision:
    """A decision whose answers have each the next join."""
    blocks = tuple(
        Block(
            tuple(
                msgspec.structs.replace(one, join=join()) if _is_answer(one, decision) else one
                for one in block.experiences
            )
        )
        for block in decision.blocks
    )
    return msgspec.structs.replace(decision, blocks=blocks)


def is_followed(block: Block) -> bool:
    """Whether others of its join follow it into `buffer`."""
    return any(one.join is not None and one.join.more > 0 for one in block.experiences)


def _all(blocks: Iterable[Block]) -> Iterable[Experience]:
    return (one for block in blocks for one in block.experiences)


def _is_answer(one: Experience, decision: Decision) -> bool:
    return one.group == decision.closure.group and not is_withdrawal(one)
