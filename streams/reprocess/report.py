"""What a reprocessing found: totals, and what is not as recorded, by kind and reason with a few examples each."""

import msgspec

from streams.reprocess.outcome import Difference, Reprocessed, differences
from streams.reprocess.shelf import OutcomeShelf

EXAMPLES = 3


class Example(msgspec.Struct, frozen=True):
    """One case of a change.

    key: of the experience. old: as recorded. new: as it comes out now.

    Example: Example("add-1.0.0-3-0", "kept, reward 1", "too short")
    """

    key: str
    old: str
    new: str


class Change(msgspec.Struct):
    """All differences of one kind and reason.

    kind, reason: as in Difference. count: how many there are. examples: the first EXAMPLES of them.
    """

    kind: str
    reason: str
    count: int = 0
    examples: list[Example] = []


class ReprocessReport(msgspec.Struct):
    """What a reprocessing found.

    stage: that was run. records: read from the range. kept: experiences (tasks) as they come out now. dropped: reason to count
    of the others. repeated: experiences that came out before. compared: of them, with what is recorded. unrecorded: those that
    the log has no record of. behind: records of the range that the workers have not committed yet, left out of a comparison.
    open_groups: those that wait for records behind the range. published: records written to the other app. reused_scores:
    verdicts taken from the log instead of being asked for again. other_code: of the scores reused, those recorded under the
    same version by other code, by name. changes: what is not as recorded, the most frequent first.
    """

    stage: str
    records: int = 0
    kept: int = 0
    dropped: dict[str, int] = {}
    repeated: int = 0
    compared: int = 0
    unrecorded: int = 0
    behind: int = 0
    open_groups: int = 0
    published: int = 0
    reused_scores: int = 0
    other_code: dict[str, int] = {}
    changes: list[Change] = []

    @property
    def is_same(self) -> bool:
        """Everything came out as recorded."""
        return not self.changes

    def count(self, new: Reprocessed) -> None:
        """One experience as it comes out now."""
        if new.dropped:
            self.dropped[new.dropped] = self.dropped.get(new.dropped, 0) + 1
        else:
            self.kept += 1

    def drop(self, reason: str, count: int) -> None:
        """Experiences dropped without a trace of their own, such as repeated deliveries."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def compare(self, shelf: OutcomeShelf, new: Reprocessed, absent: Reprocessed | None = None) -> None:
        """Compare with what is recorded; absent: what it means when nothing is recorded under the key."""
        if not shelf.meet(new.key):
            self.repeated += 1
            return
        old = shelf.get(new.key) or absent
        if old is None:
            made = new.parent and shelf.get(new.parent) is not None
            if made:
                self.note(Difference("newly made", "", "", f"from {new.parent}"), new.key)
            else:
                self.unrecorded += 1
            return
        self.compared += 1
        for difference in differences(old, new):
            self.note(difference, new.key)

    def note(self, difference: Difference, key: str) -> None:
        """Count one difference."""
        for change in self.changes:
            if (change.kind, change.reason) == (difference.kind, difference.reason):
                break
        else:
            change = Change(difference.kind, difference.reason)
            self.changes.append(change)
        change.count += 1
        if len(change.examples) < EXAMPLES:
            change.examples.append(Example(key, difference.old, difference.new))

    def finish(self, shelf: OutcomeShelf) -> None:
        """Note what is recorded and no longer made, and bring the changes in order."""
        for gone in shelf.orphans():
            self.note(Difference("no longer made", "", f"from {gone.parent}", ""), gone.key)
        self.changes.sort(key=lambda change: (-change.count, change.kind, change.reason))
