"""Admission: how far sampling may run ahead of learning, as a state machine without clock, task or client.

    issued ──> buffered ──> drawn            a group is outstanding from its issue until it is drawn,
       └─────────┴────────> dropped          or until the newest attempt was dropped or superseded

With G fresh groups per step, η versions of staleness and k steps per version, at most (η·k + 1)·G are outstanding.
Every step before the last one that may hold a new group draws G groups issued earlier, so the step that draws it is
known at most, and with it the policy version of that step; the group must be sampled by a version at most η older.
Guarantee: a group drawn in issue order, by full steps, is never older than η, however late this view of the log is, unless
`in_flight` allows more groups than that: then the trainer leaves out the tokens that got too old. The state depends only
on the issued groups and on the order within `progress`: a restart recounts it exactly.
"""

from typing import Any, ClassVar

import msgspec

from schemas import Closure, Drawn, Issued


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """G, η and k of the pacing, and other bounds of the outstanding groups.

    groups_per_step: G, of one optimizer step. max_staleness: η, in versions. steps_per_version: k. first_version: version
    at which the first optimizer step of groups runs. in_flight: the most groups outstanding, 0 for as many as the bound
    allows.
    """

    groups_per_step: int
    max_staleness: int
    steps_per_version: int
    first_version: int = 0
    in_flight: int = 0

    @property
    def within_bound(self) -> int:
        """(η·k + 1)·G groups."""
        return (self.max_staleness * self.steps_per_version + 1) * self.groups_per_step

    @property
    def max_outstanding(self) -> int:
        return self.in_flight or self.within_bound


class OutstandingGroup(msgspec.Struct):
    """An outstanding group. attempt: the newest issued. held_at: when it was issued, or when an explorer last said that
    it holds it, in the caller's units. sequence: its place in the order of issue. buffered: whether the trainer has it.
    """

    sequence: int
    attempt: int
    held_at: float
    buffered: bool = False


MAX_EARLY = 1024  # groups whose end was read before their issue: a master that had lost its lease issued them


class Admission:
    """Groups that are outstanding, and the room for new ones."""

    KEPT: ClassVar[dict[str, Any]] = {
        "outstanding": dict[str, OutstandingGroup], "next_sequence": int, "version": int, "steps_at_version": int,
        "_token": int, "_step": int, "_early": dict[str, bool],
    }  # fmt: skip

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.outstanding: dict[str, OutstandingGroup] = {}
        self.next_sequence = 0
        self.version = limits.first_version
        self.steps_at_version = 0
        self._token = -1
        self._step = -1
        self._early: dict[str, bool] = {}  # not known to be issued: whether the group is over, and not only buffered

    @property
    def room(self) -> int:
        return max(0, self.limits.max_outstanding - len(self.outstanding))

    def min_version(self, *, ahead: int | None = None) -> int:
        """Oldest version that may sample a group with `ahead` outstanding groups before it (all, for a new group).

        Earlier groups go first, G at a time: the group is drawn at most `steps` steps after the newest known step.
        """
        limits = self.limits
        steps = (len(self.outstanding) if ahead is None else ahead) // limits.groups_per_step + 1
        done = min(self.steps_at_version, limits.steps_per_version)
        version_at_draw = self.version + (done - 1 + steps) // limits.steps_per_version
        if limits.max_outstanding > limits.within_bound:  # a group that begins now is drawn when it is done, at any age
            version_at_draw = self.version
        return max(limits.first_version, version_at_draw - limits.max_staleness)

    def ahead(self, group: str) -> int:
        """Number of outstanding groups issued before `group`."""
        sequence = self.outstanding[group].sequence
        return sum(other.sequence < sequence for other in self.outstanding.values())

    def issued(self, issued: Issued, at: float) -> None:
        """A rollout group was issued, for the first time or again; the same record twice changes nothing."""
        self.number(issued)
        group = self.outstanding.get(issued.group)
        is_over = self._early.pop(issued.group, None)
        if group is None and not is_over:
            buffered = is_over is not None
            self.outstanding[issued.group] = OutstandingGroup(issued.sequence, issued.attempt, at, buffered)
        elif group is None:
            self._early[issued.group] = True
        elif issued.attempt > group.attempt:
            group.attempt, group.held_at = issued.attempt, at

    def number(self, issued: Issued) -> None:
        """Give this group's number to no other group."""
        self.next_sequence = max(self.next_sequence, issued.sequence + 1)

    def closed(self, closure: Closure) -> bool:
        """Collect closed an attempt; True if that ended the group.

        Another attempt than the newest ends nothing by being dropped: the newest may still be trained.
        """
        group = self.outstanding.get(closure.group)
        if group is None or closure.revision > 0:
            if not closure.revision and closure.sequence >= 0:
                self._end_early(closure.group, closure.outcome != "buffered")
            return False
        if closure.outcome == "buffered":
            group.buffered = True
            return False
        if group.buffered or closure.attempt < group.attempt:
            return False
        del self.outstanding[closure.group]
        return True

    def drawn(self, drawn: Drawn) -> int:
        """The trainer took groups for a step, or dropped them for good; returns how many that ended.

        A trainer that lost its lease counts for nothing; a step reported twice, after a resume, counts once.
        """
        if drawn.token < self._token:
            return 0
        self._token = drawn.token
        if drawn.groups and drawn.step > self._step:
            self._step = drawn.step
            same = drawn.version == self.version
            self.steps_at_version = self.steps_at_version + 1 if same else 1
            self.version = drawn.version
        groups = (*drawn.groups, *drawn.dropped)
        for group in groups:
            if group in self._early:
                self._early[group] = True
        return sum(self.outstanding.pop(group, None) is not None for group in groups)

    def _end_early(self, group: str, is_over: bool) -> None:
        """Note a closure of a group that is over already, or whose issue is not read yet."""
        self._early[group] = self._early.pop(group, False) or is_over
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def held(self, group: str, attempt: int, at: float) -> None:
        """An explorer says that it runs this attempt, or waits with it; an older attempt than the newest counts for nothing."""
        known = self.outstanding.get(group)
        if known is not None and attempt >= known.attempt:
            known.held_at = max(known.held_at, at)

    def reset_waits(self, at: float) -> None:
        """Count the waiting time of all outstanding groups from `at`."""
        for group in self.outstanding.values():
            group.held_at = at

    def overdue(self, now: float, limit: float) -> list[str]:
        """Unfinished groups that no explorer has reported to hold for `limit` since their newest issue, in issue order."""
        late = [
            (group.sequence, name)
            for name, group in self.outstanding.items()
            if not group.buffered and now - group.held_at >= limit
        ]
        return [name for _, name in sorted(late)]
