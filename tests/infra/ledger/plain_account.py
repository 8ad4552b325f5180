"""The account as its words read, with everything in memory at once: what that of a long log is compared with."""

from collections import Counter
from collections.abc import Iterable, Mapping

from infra.ledger.account import VALIDATION, Account, spread
from infra.log.log import LogMessage
from schemas import Batch, BatchItem, Block, Closure, DeadLetter, Drawn, DropMarker, Rollback, Skip, decode
from schemas.errors import BadFrame, UnknownMajor
from schemas.fields import CANCELLED
from schemas.journal import Entry, JournalRecord, effective


class PlainLedger:
    """Folds the topics of one app, each in its own order; the order between topics does not matter.

    buffer_begins: oldest kept offset of `buffer`; where what was trained from below it came from is unknown.
    """

    def __init__(self, run: str, buffer_begins: int = 0) -> None:
        self._run = run
        self._buffer_begins = buffer_begins
        self._published: dict[str, tuple[str, int]] = {}  # id → (group, attempt)
        self._repeated = 0
        self._stubs: dict[str, str] = {}  # id → reason, as are the next two
        self._cancelled: dict[str, str] = {}
        self._letters: dict[str, str] = {}
        self._kept_apart: dict[str, str] = {}
        self._closures: dict[tuple[str, int], Closure] = {}
        self._group_drops: dict[str, str] = {}
        self._buffered: dict[str, str] = {}  # id → lane
        self._journal: list[JournalRecord] = []

    def published(self, message: LogMessage) -> None:
        """A record of `experiences` or `experts`; evals are not trained and have an account of their own."""
        if isinstance(message.value, Block):
            for one in message.value.experiences:
                if not one.suite:
                    # A second delivery, which verify drops as a duplicate, shares the fate of the first.
                    self._repeated += one.id in self._published
                    self._published[one.id] = (one.group, one.attempt)
                    if one.held_out:
                        self._kept_apart[one.id] = VALIDATION

    def verified(self, message: LogMessage) -> None:
        """A record of `verified`: drop markers name what was dropped and why."""
        if isinstance(message.value, DropMarker):
            self._stubs.setdefault(message.value.id, message.value.reason)
            if message.value.reason in CANCELLED:
                self._cancelled[message.value.id] = message.value.reason

    def buffered(self, message: LogMessage) -> None:
        """A record of `buffer`."""
        if isinstance(message.value, Block):
            for one in message.value.experiences:
                self._buffered[one.id] = one.lane

    def progress(self, message: LogMessage) -> None:
        """A record of `progress`: how groups ended."""
        record = message.value
        if isinstance(record, Closure):
            self._closures[record.group, record.attempt] = record
        elif isinstance(record, Drawn):
            self._group_drops |= record.dropped

    def journaled(self, message: LogMessage) -> None:
        """A record of `batches`."""
        if isinstance(message.value, JournalRecord):
            self._journal.append(message.value)

    def dead_letter(self, message: LogMessage) -> None:
        """A record of `dead-letters`: whatever can still be read of it is accounted for."""
        if not isinstance(message.value, DeadLetter):
            return
        try:
            inner = decode(message.value.value)
        except (BadFrame, UnknownMajor):
            return
        if isinstance(inner, Block):
            for one in inner.experiences:
                self._letters.setdefault(one.id, message.value.reason)

    def account(self) -> Account:
        """The account as of what was folded in."""
        entries, _ = effective(self._journal, self._run)
        without_effect = undone(entries)
        batches = [entry for entry in entries if isinstance(entry, Batch)]
        trained = [item for one in batches if one.step not in without_effect for item in one.items]
        undone_ids = {
            item.id: without_effect[one.step] for one in batches if one.step in without_effect for item in one.items
        }
        counts = Counter(item.id for item in trained)
        repeated = Counter((item.id, item.revision, item.use) for one in batches for item in one.items)
        in_batch = {
            item.id: why for one in batches for item, why in zip(one.dropped, one.dropped_because, strict=False)
        }
        own = self._kept_apart | self._letters | self._stubs | in_batch
        by_group = self._group_reasons(own)
        dropped: Counter[str] = Counter()
        pending = []
        for name in self._published:
            if name in counts:
                continue
            reason = undone_ids.get(name) or own.get(name) or by_group.get(name)
            if reason:
                dropped[reason] += 1
            else:
                pending.append(name)
        known = self._published.keys() | self._buffered.keys()
        return Account(
            published=len(self._published),
            trained=sum(1 for name in self._published if name in counts),
            dropped=dict(dropped.most_common()),
            pending=len(pending),
            uses=uses_by_lane(trained),
            trained_twice=tuple(sorted({name for (name, _, _), count in repeated.items() if count > 1})),
            unknown=tuple(
                sorted({one.id for one in trained if one.id not in known and one.offset >= self._buffer_begins})
            ),
            pending_ids=tuple(sorted(pending)),
            waiting=dict(sorted(Counter(lane for name in pending if (lane := self._drawn_at_will(name))).items())),
            repeated=self._repeated,
            cancelled=dict(Counter(self._cancelled.values()).most_common()),
            masked=sum(one.masked for one in batches if one.step not in without_effect),
        )

    def _drawn_at_will(self, name: str) -> str:
        """Lane of a buffered experience that no step has to wait for, "" for others."""
        lane = self._buffered.get(name, "")
        return "" if lane == "usual" else lane

    def _group_reasons(self, own: Mapping[str, str]) -> dict[str, str]:
        """Experiences that ended with their group: id → reason. own: reasons of their own."""
        members: dict[tuple[str, int], list[str]] = {}
        for name, place in self._published.items():
            members.setdefault(place, []).append(name)
        found: dict[str, str] = {}
        for (group, attempt), names in members.items():
            closure = self._closures.get((group, attempt))
            trainer = self._group_drops.get(group, "")
            if closure is None:
                found |= dict.fromkeys(names, trainer)
            elif closure.outcome == "buffered":
                found |= dict.fromkeys(names, trainer)
                left_out = sorted(name for name in names if name not in self._buffered and name not in own)
                # Those with a drop marker have their reason already, and the closure counts it too.
                others = Counter(closure.drops) - Counter(own[name] for name in names if name in own)
                others = Counter({reason: count for reason, count in others.items() if reason not in CANCELLED})
                found |= dict(zip(left_out, spread(others, len(left_out)), strict=True))
            else:
                found |= dict.fromkeys(names, closure.reason or closure.outcome)
        return {name: reason for name, reason in found.items() if reason}


def undone(entries: Iterable[Entry]) -> dict[int, str]:
    """Steps that changed nothing, or whose change was taken back: step → reason."""
    found: dict[int, str] = {}
    for entry in entries:
        if isinstance(entry, Skip):
            found.setdefault(entry.step, "step skipped")
        elif isinstance(entry, Rollback):
            found |= {step: "rolled back" for step in range(entry.from_step, entry.to_step + 1)}
    return found


def uses_by_lane(trained: Iterable[BatchItem]) -> dict[str, dict[int, int]]:
    """Lane → how often trained → experiences."""
    counts = Counter((item.lane, item.id) for item in trained)
    uses: dict[str, Counter[int]] = {}
    for (lane, _), count in counts.items():
        uses.setdefault(lane, Counter())[count] += 1
    return {lane: dict(sorted(found.items())) for lane, found in sorted(uses.items())}


def fold_all(ledger: PlainLedger, topic: str, messages: Iterable[LogMessage]) -> None:
    """Fold the records of one topic, named as in `schemas.topics`."""
    fold = {
        "experiences": ledger.published,
        "experts": ledger.published,
        "verified": ledger.verified,
        "buffer": ledger.buffered,
        "progress": ledger.progress,
        "batches": ledger.journaled,
        "dead-letters": ledger.dead_letter,
    }[topic]
    for message in messages:
        fold(message)
