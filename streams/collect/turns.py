"""Turns of one session: feedback on an answer is credited to the answers before it, less for each turn between.

    turn     1        2        3   <- feedback v
    credit   γ²·v     γ·v      v

Rules: the named answer gets the full credit; the `MAX_TURNS` turns before it get a discounted credit, for any order of answers
and feedback and with repeated deliveries. A retraction withdraws the credit too. The credit is only for learning: it is not a
rating, does not end a turn's wait for its own feedback, and trains nothing a second time. The number of messages before its
answer identifies a turn, since gateways with a spool write out of order. A turn with several choices gives and gets no credit,
since the choice that the session continued from is unknown.

Turns of a session wait for each other and are closed together, so that the shared parts of their prompts are trained once.

    turn 1  ready ──────────────┐
    turn 2  waits for feedback ─┼─ the session is over and all are ready ──> closed in their order, joined
    turn 3  ready ──────────────┘

A turn is ready when every source gave feedback or its window has passed. A session is over for its open turns when no turn came
for `session_ms`, when its client ended it, or when the next turn rewrote its history; later turns start a new session.

Guarantees: a turn's verdict is the same as for a turn alone. A turn waits at most for the slowest turn of its session. A
session without an end is closed in runs of MAX_JOINED turns. Everything follows from the log and its times.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from schemas import Block, Control, Experience, Feedback, Join
from schemas.experience import is_withdrawal
from schemas.fields import HISTORY_REWRITTEN
from schemas.ids import experience_id, session_of
from streams.collect.decision import Decision
from streams.collect.feedback import FeedbackRules, mean_values
from streams.collect.state import Group, LaterCredit

NO_TURN = -1
MAX_TURNS = 64


def turn_depth(experience: Experience) -> int:
    return experience.turn if experience.group_size == 1 and session_of(experience.group) else NO_TURN


def crediting(sources: Mapping[str, FeedbackRules]) -> frozenset[str]:
    return frozenset(name for name, source in sources.items() if source.discount > 0)


def session_named(value: Block | Control | None, group: str | None, names: frozenset[str]) -> str:
    if group is None or not names or not isinstance(value, Block | Feedback):
        return ""
    return session_of(group)


def new_credits(
    group: Group, turns: Sequence[Group], names: frozenset[str], came: bool
) -> list[tuple[Group, str, LaterCredit]]:
    """New or changed credits: (turn, group id of the later turn, credit).

    came: True if the answer of `group` just arrived, so later turns credit it, and earlier turns are one turn further from
    them; False for new feedback on it.
    """
    if len(turns) < 2:  # none is before another
        return []
    known = sorted((turn for turn in turns if turn.depth >= 0), key=lambda turn: (turn.depth, turn.id))
    order = {depth: number for number, depth in enumerate(sorted({turn.depth for turn in known}))}
    later = [turn for turn in known if turn is group or (came and turn.depth > group.depth)]
    found = []
    for source_turn in later:
        values = counting(source_turn, names)
        for turn in known:
            between = order[source_turn.depth] - order[turn.depth]
            if turn.depth > group.depth or not 0 < between <= MAX_TURNS:
                continue
            credit, before = LaterCredit(between, values), turn.credits.get(source_turn.id)
            if credit != before and (values or before is not None):
                found.append((turn, source_turn.id, credit))
    return found


def late_credit(before: LaterCredit | None, credit: LaterCredit, dropped: Collection[str]) -> LaterCredit:
    old = {} if before is None else before.values
    fixed = {name: value for name, value in old.items() if name in dropped}
    return LaterCredit(
        credit.turns, fixed | {name: value for name, value in credit.values.items() if name not in dropped}
    )


def counting(turn: Group, names: frozenset[str]) -> dict[str, float]:
    attempt = turn.winner if turn.winner >= 0 else min(turn.attempts, default=0)
    values = mean_values(turn.feedback.get(experience_id(turn.id, attempt, 0)))
    return {name: value for name, value in sorted(values.items()) if name in names}


MAX_JOINED = 64


class ClosableTurns(NamedTuple):
    """Turns of a session that may close now. runs: groups of turns that close together. again_ms: when to look again, 0 for
    never.
    """

    runs: list[Sequence[Group]]
    again_ms: int


def ended_by(came: Group, answer: Experience, turns: Iterable[Group]) -> list[Group]:
    others = [turn for turn in turns if turn is not came and not turn.is_closed and turn.depth != NO_TURN]
    if came.depth == NO_TURN:
        return []
    if answer.ends_session:
        return [*others, came]
    return others if answer.part_reason == HISTORY_REWRITTEN else []


def closable(turns: Iterable[Group], now_ms: int, session_ms: int) -> ClosableTurns:
    known = sorted(
        (turn for turn in turns if turn.depth != NO_TURN and not turn.is_closed and turn.winner >= 0),
        key=lambda turn: (turn.depth, turn.id),
    )
    if session_ms == 0:
        return ClosableTurns([[turn] for turn in known if turn.is_ready], 0)
    ended, rest = ([turn for turn in known if turn.is_over == is_over] for is_over in (True, False))
    silent_ms = max((came_ms(turn) for turn in rest), default=0) + session_ms
    goes_on = bool(rest) and silent_ms > now_ms
    runs = []
    for turns_of, may_follow in ((ended, False), (rest, goes_on)):
        ready = [turn for turn in turns_of if turn.is_ready]
        whole = len(ready) if not may_follow and len(ready) == len(turns_of) else len(ready) // MAX_JOINED * MAX_JOINED
        runs += cut_runs(ready[:whole])
    return ClosableTurns(runs, silent_ms if goes_on else 0)


def cut_runs(turns: Sequence[Group]) -> list[Sequence[Group]]:
    return [turns[start : start + MAX_JOINED] for start in range(0, len(turns), MAX_JOINED)]


def came_ms(turn: Group) -> int:
    return turn.attempts[turn.winner].first_ms


def joined(decisions: Sequence[Decision], name: str) -> list[Decision]:
    """Mark the kept answers of these turns as one join `name`. With fewer than two kept answers, return the decisions
    unchanged.
    """
    blocks = [(block, decision) for decision in decisions for block in decision.blocks]
    left = sum(_is_answer(member, decision) for block, decision in blocks for member in block.experiences)
    if left < 2:
        return list(decisions)
    following = iter(range(left - 1, -1, -1))
    return [_in_joins(decision, lambda: Join(name, next(following))) for decision in decisions]


def joined_again(decision: Decision, name: str) -> Decision:
    return _in_joins(decision, lambda: Join(name))


def _in_joins(decision: Decision, join: Callable[[], Join]) -> Decision:
    blocks = tuple(
        Block(
            tuple(
                msgspec.structs.replace(member, join=join()) if _is_answer(member, decision) else member
                for member in block.experiences
            )
        )
        for block in decision.blocks
    )
    return msgspec.structs.replace(decision, blocks=blocks)


def is_followed(block: Block) -> bool:
    return any(member.join is not None and member.join.more > 0 for member in block.experiences)


def _is_answer(member: Experience, decision: Decision) -> bool:
    return member.group == decision.closure.group and not is_withdrawal(member)
