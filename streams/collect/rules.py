"""Rules of collect, and the records that it folds.

Guarantee: changed settings hold for waiting groups, too: a group that was saved under other rules follows the new rules
from the start on, as if the log were folded again. Groups that would have closed by now close in portions, so that no
record closes all.
"""

import msgspec

from infra.settings.config import Floor, duration_s
from schemas import Block, Control, DropMarker, Feedback, Lane
from schemas.ids import group_of
from streams.collect.feedback import FeedbackRules, OpenText, as_it_is, is_labelled
from streams.collect.state import Group, State
from streams.config import LimitsConfig, StreamsConfig


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of collect: deadlines, sources, limits.

    deadline_ms: after a group's first record. keep_ms: for how long a closed group is known. sources: feedback by name.
    waiting: the lanes whose answers wait for it. corrects: the chain learns from edits. open_text: see `newest_edit`.
    revisions, retrainings, limits, session_ms, session_turns: as in [collect].
    """

    deadline_ms: int
    keep_ms: int
    sources: dict[str, FeedbackRules] = {}
    waiting: frozenset[Lane] = frozenset({"live"})
    corrects: bool = False
    open_text: OpenText = as_it_is
    revisions: int = 16
    retrainings: int = 2
    limits: LimitsConfig = LimitsConfig()
    session_ms: int = 0
    session_turns: int = 65_536

    @property
    def window_ms(self) -> int:
        return max((source.window_ms for source in self.sources.values()), default=0)


def collect_rules(floor: Floor, config: StreamsConfig) -> Rules:
    sources = {
        source.name: FeedbackRules(
            window_ms=int(duration_s(source.window) * 1000),
            default=None if isinstance(source.default, str) else float(source.default),
            late=source.late,
            discount=source.discount,
        )
        for source in config.feedback
    }
    return Rules(
        deadline_ms=int(config.collect.deadline_s * 1000),
        keep_ms=int(duration_s(floor.keep.replay) * 1000),
        sources=sources,
        corrects=config.collect.correct.on,
        revisions=config.collect.revisions,
        retrainings=config.collect.retrainings,
        session_ms=int(config.collect.session_s * 1000),
        session_turns=config.collect.session_turns,
        limits=config.collect.limits,
    )


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the inbox.

    partition, offset: in `verified`. timestamp_ms: log-append time. value: None for a record that could not be read. frame: a
    block's own bytes if at hand.
    """

    partition: int
    offset: int
    timestamp_ms: int
    value: Block | Control | None
    frame: bytes = b""


def group_named(value: Block | Control | None) -> str | None:
    if isinstance(value, Block | DropMarker):
        return value.group
    if isinstance(value, Feedback):
        try:
            return group_of(value.ref)
        except ValueError:
            return None
    return None


PORTION = 1000  # groups that new rules close at one moment
APART_MS = 1000


def due_ms(group: Group, rules: Rules) -> int:
    if group.winner >= 0:
        return group.attempts[group.winner].first_ms + rules.window_ms
    return min(attempt.first_ms for attempt in group.attempts.values()) + rules.deadline_ms


def late_is_dropped(group: Group, source: FeedbackRules, now_ms: int) -> bool:
    return source.late == "drop" and now_ms >= group.attempts[group.winner].first_ms + source.window_ms


def go_by(state: State, rules: Rules) -> int:
    """Apply these rules to waiting groups. Returns the number of groups whose deadline moved."""
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
    if group.winner < 0 or len(group.feedback) < len(group.attempts[group.winner].places(done_only=True)):
        return False
    return all(is_labelled(on_answer, rules.sources) for on_answer in group.feedback.values())
