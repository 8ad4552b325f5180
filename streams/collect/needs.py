"""What a record needs from the log before it can be folded: the blocks of closed groups that it may close anew."""

from schemas import Block, Feedback
from streams.collect.rules import Arrival, Rules, group_named
from streams.collect.state import State
from streams.collect.turns import credited_turns, crediting
from streams.collect.windows import late_is_dropped


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
    now_ms = max(state.now_ms, arrival.timestamp_ms)
    credited = credited_turns(group, value, turns, names) if names else []
    # A turn whose time has come may close all that wait with it.
    is_due = any(0 < turn.due_ms <= now_ms for turn in (*turns, *([] if group is None else [group])))
    if isinstance(value, Block) or value.type != "retraction":
        credited = [turn for turn in credited if turn.num_credited < rules.revisions]
        rated = [group] if group is not None and group.revision - group.num_credited < rules.revisions else []
    else:
        rated = [group] if group is not None else []
    reopened = credited
    if isinstance(value, Feedback):
        source = rules.sources.get(value.source)
        if source is None:
            return set()
        reopened = [
            turn for turn in (*credited, *rated) if turn.winner >= 0 and not late_is_dropped(turn, source, now_ms)
        ]
    return {offset for turn in reopened if turn.is_closed or is_due for offset in turn.offsets()}
