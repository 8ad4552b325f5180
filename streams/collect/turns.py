"""Turns of one session: what is said about an answer is credited to the answers before it, less for each turn between.

    turn     1        2        3   <- feedback v
    credit   γ²·v     γ·v      v

Rules: the named answer is credited as ever; the `MAX_TURNS` turns before it hear what counts of it as an echo, whatever is
delivered twice or in whatever order answers and feedback come; what is taken back there is taken back here. An echo is for
learning alone: it is no rating, ends no turn's wait for its own, and trains nothing a second time. A turn is told by how
many messages stand before its answer: the log's order is no help where gateways spool. A turn with several choices neither
echoes nor hears: which of them the session went on from is not known.
"""

from collections.abc import Mapping, Sequence

from schemas import Block, Control, Experience, Feedback
from schemas.ids import experience_id, session_of
from streams.collect.credit import FeedbackRules
from streams.collect.group import Echo, Group
from streams.collect.words import verdicts

NO_TURN = -1
MAX_TURNS = 64


def depth_of(experience: Experience) -> int:
    """Messages before the answer of a session's turn, NO_TURN for anything else."""
    return experience.turn if experience.group_size == 1 and session_of(experience.group) else NO_TURN


def echoing(sources: Mapping[str, FeedbackRules]) -> frozenset[str]:
    """Sources whose words earlier turns hear."""
    return frozenset(name for name, source in sources.items() if source.discount > 0)


def session_named(value: Block | Control | None, group: str | None, names: frozenset[str]) -> str:
    """Session whose turns a record may concern, "" for none."""
    if group is None or not names or not isinstance(value, Block | Feedback):
        return ""
    return session_of(group)


def hearers(
    group: Group | None, value: Block | Control | None, turns: Sequence[Group], names: frozenset[str]
) -> list[Group]:
    """Earlier turns that a record about `group` may have something to tell."""
    if isinstance(value, Feedback):
        depth = group.depth if group is not None and value.source in names else NO_TURN
    elif isinstance(value, Block):
        depth = depth_of(value.experiences[0]) if any(counting(turn, names) for turn in turns) else NO_TURN
    else:
        depth = NO_TURN
    return sorted((turn for turn in turns if 0 <= turn.depth < depth), key=lambda turn: turn.depth)[-MAX_TURNS:]


def new_echoes(
    group: Group, turns: Sequence[Group], names: frozenset[str], came: bool
) -> list[tuple[Group, str, Echo]]:
    """(turn, a later one's group, what counts of that) wherever it is not what the turn has heard.

    came: the answer of `group` has just come, so that it hears of later turns, and turns before it are one further from
    those; else something was said about it.
    """
    known = sorted((turn for turn in turns if turn.depth >= 0), key=lambda turn: (turn.depth, turn.id))
    order = {depth: number for number, depth in enumerate(sorted({turn.depth for turn in known}))}
    later = [turn for turn in known if turn is group or (came and turn.depth > group.depth)]
    found = []
    for told in later:
        values = counting(told, names)
        for turn in known:
            between = order[told.depth] - order[turn.depth]
            if turn.depth > group.depth or not 0 < between <= MAX_TURNS:
                continue
            echo, heard = Echo(between, values), turn.echoes.get(told.id)
            if echo != heard and (values or heard is not None):
                found.append((turn, told.id, echo))
    return found


def late_echo(heard: Echo | None, echo: Echo, sources: Mapping[str, FeedbackRules]) -> Echo:
    """What a closed turn hears of it: nothing new of sources whose late words are dropped."""
    old = {} if heard is None else heard.values
    fixed = {name: value for name, value in old.items() if sources[name].late == "drop"}
    return Echo(
        echo.turns, fixed | {name: value for name, value in echo.values.items() if sources[name].late != "drop"}
    )


def counting(turn: Group, names: frozenset[str]) -> dict[str, float]:
    """What counts of a turn's own answer, of the sources that earlier turns hear."""
    attempt = turn.winner if turn.winner >= 0 else min(turn.attempts, default=0)
    values = verdicts(turn.said.get(experience_id(turn.id, attempt, 0)))
    return {name: value for name, value in sorted(values.items()) if name in names}
