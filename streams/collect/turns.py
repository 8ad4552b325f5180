"""Turns of one session: feedback on an answer is credited to the answers before it, less for each turn between.

    turn     1        2        3   <- feedback v
    credit   γ²·v     γ·v      v

Rules: the named answer is credited in full; the `MAX_TURNS` turns before it get a discounted credit, whatever is delivered
twice and in whatever order answers and feedback come; a retraction takes the credit back too. The credit is for learning
alone: it does not count as a rating, does not end a turn's wait for its own feedback, and trains nothing a second time. A turn
is known by how many messages come before its answer, since gateways that spool write out of order. A turn with several choices
gives no credit and gets none: which of them the session went on from is not known.
"""

from collections.abc import Collection, Mapping, Sequence

from schemas import Block, Control, Experience, Feedback
from schemas.ids import experience_id, session_of
from streams.collect.credit import FeedbackRules
from streams.collect.feedback import values_of
from streams.collect.group import Group, LaterCredit

NO_TURN = -1
MAX_TURNS = 64


def depth_of(experience: Experience) -> int:
    """Messages before the answer of a session's turn, NO_TURN for anything else."""
    return experience.turn if experience.group_size == 1 and session_of(experience.group) else NO_TURN


def crediting(sources: Mapping[str, FeedbackRules]) -> frozenset[str]:
    """Sources whose feedback is credited to earlier turns."""
    return frozenset(name for name, source in sources.items() if source.discount > 0)


def session_named(value: Block | Control | None, group: str | None, names: frozenset[str]) -> str:
    """Session whose turns a record may concern, "" for none."""
    if group is None or not names or not isinstance(value, Block | Feedback):
        return ""
    return session_of(group)


def credited_turns(
    group: Group | None, value: Block | Control | None, turns: Sequence[Group], names: frozenset[str]
) -> list[Group]:
    """Earlier turns that a record about `group` may give credit to."""
    if isinstance(value, Feedback):
        depth = group.depth if group is not None and value.source in names else NO_TURN
    elif isinstance(value, Block):
        depth = depth_of(value.experiences[0]) if any(counting(turn, names) for turn in turns) else NO_TURN
    else:
        depth = NO_TURN
    return sorted((turn for turn in turns if 0 <= turn.depth < depth), key=lambda turn: turn.depth)[-MAX_TURNS:]


def new_credits(
    group: Group, turns: Sequence[Group], names: frozenset[str], came: bool
) -> list[tuple[Group, str, LaterCredit]]:
    """(turn, a later one's group, what counts of that) wherever the turn has not been credited with it yet.

    came: the answer of `group` has just come, so that later turns credit it, and turns before it are one further from
    those; else there is new feedback on it.
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
    """Return the credit of a closed turn. dropped: sources whose feedback no longer counts for it; their values stay."""
    old = {} if before is None else before.values
    fixed = {name: value for name, value in old.items() if name in dropped}
    return LaterCredit(
        credit.turns, fixed | {name: value for name, value in credit.values.items() if name not in dropped}
    )


def counting(turn: Group, names: frozenset[str]) -> dict[str, float]:
    """What counts of a turn's own answer, of the sources that are credited to earlier turns."""
    attempt = turn.winner if turn.winner >= 0 else min(turn.attempts, default=0)
    values = values_of(turn.feedback.get(experience_id(turn.id, attempt, 0)))
    return {name: value for name, value in sorted(values.items()) if name in names}
