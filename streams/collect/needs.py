"""What a record needs from the log before it can be folded: the blocks of closed groups that it may close anew."""

from schemas import Block, Feedback
from streams.collect.rules import Arrival, Rules, group_named
from streams.collect.state import State
from streams.collect.turns import credited_turns, crediting


def wanted(state: State, arrival: Arrival, rules: Rules) -> set[int]:
    """Offsets of `verified` whose blocks `fold` needs: those of the groups that late feedback reopens.

    They are closed by now, or the record's own time closes them first.
    """
    value = arrival.value
    name = group_named(value)
    if name is None or not isinstance(value, Feedback | Block):
        return set()
    group, names = state.groups.get(name), crediting(rules.sources)
    turns = state.turns(name)
    reopened = credited_turns(group, value, turns, names) if names else []
    if isinstance(value, Feedback):
        source = rules.sources.get(value.source)
        if source is None or source.late == "drop":
            return set()
        reopened = [group, *reopened] if group is not None else reopened
    now_ms = max(state.now_ms, arrival.timestamp_ms)
    # A turn whose time has come may close all that wait with it.
    is_due = any(0 < one.due_ms <= now_ms for one in (*turns, *reopened))
    if isinstance(value, Block) or value.type != "retraction":
        reopened = [one for one in reopened if one.revision < rules.revisions]
    return {offset for one in reopened if one.is_closed or is_due for offset in one.offsets()}
