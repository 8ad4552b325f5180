"""Turns of one session: what is said about an answer is credited to the answers before it, less for each turn between.

    turn     1        2        3   <- feedback v
    credit   γ²·v     γ·v      v

Rules: the named answer is credited as ever; earlier turns hear it as an echo, once, whatever is delivered twice or in
whatever order answers and feedback come; a retraction echoes too, and takes back what it took back there. A turn is told
by how many messages stand before its answer: the log's order is no help where gateways spool. A turn with several choices
neither echoes nor hears: which of them the session went on from is not known.
"""

from collections.abc import Iterable, Mapping, Sequence

from schemas import Block, Control, Experience, Feedback
from schemas.ids import session_of
from streams.collect.credit import Source
from streams.collect.group import Echo, Group, Said

NO_TURN = -1


def depth_of(experience: Experience) -> int:
    """Messages before the answer of a session's turn, NO_TURN for anything else."""
    return experience.turn if experience.group_size == 1 and session_of(experience.group) else NO_TURN


def echoing(sources: Mapping[str, Source]) -> frozenset[str]:
    """Sources whose words earlier turns hear."""
    return frozenset(name for name, source in sources.items() if source.discount > 0)


def session_named(value: Block | Control | None, group: str | None, names: frozenset[str]) -> str:
    """Session whose turns a record may concern, "" for none."""
    if group is None or not names or not isinstance(value, Block | Feedback):
        return ""
    return session_of(group)


def hearers(
    group: Group | None, value: Block | Control | None, turns: Iterable[Group], names: frozenset[str]
) -> list[Group]:
    """Earlier turns that a record about `group` may have something to tell."""
    if isinstance(value, Feedback):
        depth = group.depth if group is not None and value.source in names else NO_TURN
    elif isinstance(value, Block):
        told = group is not None and any(said.feedback.source in names for said in heard_about(group))
        depth = depth_of(value.experiences[0]) if told else NO_TURN
    else:
        depth = NO_TURN
    return [turn for turn in turns if 0 <= turn.depth < depth]


def new_echoes(group: Group, turns: Sequence[Group], names: frozenset[str], offset: int) -> list[tuple[Group, Echo]]:
    """What turns have to hear because of the record at `offset`, which is about `group`, in log order.

    New to all is feedback that lies there; where it is the answer that came, all that was said about it before, and to it
    what was said about later ones.
    """
    known = [turn for turn in turns if turn.depth >= 0]
    if len(known) < 2:
        return []
    order = {depth: number for number, depth in enumerate(sorted({turn.depth for turn in known}))}
    has_come = offset in group.offsets()
    found = []
    for later in known:
        fresh = [said for said in heard_about(later) if said.offset == offset or has_come]
        for turn in known if later is group else (group,):
            between = order[later.depth] - order[turn.depth]
            heard = [echo.said for echo in turn.echoes]
            if between > 0:
                found += [
                    (turn, Echo(said, between)) for said in fresh if said.feedback.source in names and said not in heard
                ]
    return sorted(found, key=lambda one: (one[1].said.offset, one[0].id))


def heard_about(group: Group) -> list[Said]:
    """Everything that was said about the answers of a group, in log order."""
    return sorted((said for heard in group.said.values() for said in heard), key=lambda said: said.offset)
