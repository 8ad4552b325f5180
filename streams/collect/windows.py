"""When time alone decides about an open group, by the rules of now.

Guarantee: settings that changed hold for what waits, too: a group that was saved under other rules goes by these from the
start on, as if the log were folded anew. What would have closed by now does so in portions, so that no record closes all of it.
"""

from streams.collect.credit import FeedbackRules, is_labelled
from streams.collect.group import Group
from streams.collect.rules import Rules
from streams.collect.state import State

PORTION = 1000  # groups that new rules close at one moment
APART_MS = 1000


def due_ms(group: Group, rules: Rules) -> int:
    """When time alone decides about an open group that has an attempt."""
    if group.winner >= 0:
        return group.attempts[group.winner].first_ms + rules.window_ms
    return min(attempt.first_ms for attempt in group.attempts.values()) + rules.deadline_ms


def late_is_dropped(group: Group, source: FeedbackRules, now_ms: int) -> bool:
    """True if feedback of `source` about a closed group no longer counts: late = "drop" and its window has passed."""
    return source.late == "drop" and now_ms >= group.attempts[group.winner].first_ms + source.window_ms


def go_by(state: State, rules: Rules) -> int:
    """Let what waits go by these rules. Returns the groups about which time decides at another moment now."""
    moved = passed = 0
    for group in state.groups.values():
        if group.is_closed or group.is_ready or not group.attempts:
            continue
        at_ms = group.came_ms if may_be_labelled(group, rules) else due_ms(group, rules)
        if at_ms == group.due_ms:
            continue
        if at_ms < state.now_ms:
            at_ms = state.now_ms + passed // PORTION * APART_MS
            passed += 1
        moved += 1
        state.schedule(group, at_ms)
    return moved


def may_be_labelled(group: Group, rules: Rules) -> bool:
    """Whether a group that waits may have all feedback of the sources there are now, and is to be looked at again."""
    if group.winner < 0 or len(group.feedback) < len(group.attempts[group.winner].places(done_only=True)):
        return False
    return all(is_labelled(on_answer, rules.sources) for on_answer in group.feedback.values())
