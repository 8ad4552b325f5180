"""The account of a run: what became of every published experience. Pure: records go in, an Account comes out.

Precedence, as promised: trained, else dropped with a reason, else pending.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec

from infra.bus.log import Message
from schemas import Batch, Block, Closure, DeadLetter, Drawn, Fence, Rollback, Skip, Stub, decode
from schemas.errors import BadFrame, UnknownMajor
from trainer.journal import Entry, effective

Fate = Literal["trained", "dropped", "pending"]
VALIDATION = "kept for validation"


class Account(msgspec.Struct, frozen=True):
    """published = trained + dropped + pending. uses: lane → times trained → experiences. trained_twice: (id, revision, use)
    that the journal lists more than once; always empty unless a promise is broken. unknown: trained ids nobody published.
    """

    published: int
    trained: int
    dropped: dict[str, int]
    pending: int
    uses: dict[str, dict[int, int]]
    trained_twice: tuple[str, ...]
    unknown: tuple[str, ...]
    pending_ids: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Nothing was trained twice and nothing came from nowhere."""
        return not self.trained_twice and not self.unknown


class Ledger:
    """Folds the topics of one app, each in its own order; the order between topics does not matter."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._published: dict[str, tuple[str, int]] = {}  # id → (group, attempt)
        self._reasons: dict[str, str] = {}
        self._closures: dict[tuple[str, int], Closure] = {}
        self._group_drops: dict[str, str] = {}
        self._buffered: dict[str, str] = {}  # id → lane
        self._journal: list[Fence | Entry] = []

    def published(self, message: Message) -> None:
        """A record of `experiences` or `experts`; evals are not trained and have an account of their own."""
        if isinstance(message.value, Block):
            for one in message.value.experiences:
                if not one.suite:
                    self._published[one.id] = (one.group, one.attempt)
                    if one.meta.get("split") == "validation":
                        self._reasons.setdefault(one.id, VALIDATION)

    def verified(self, message: Message) -> None:
        """A record of `verified`: stubs name what was dropped and why."""
        if isinstance(message.value, Stub):
            self._reasons.setdefault(message.value.id, message.value.reason)

    def buffered(self, message: Message) -> None:
        """A record of `buffer`."""
        if isinstance(message.value, Block):
            for one in message.value.experiences:
                self._buffered[one.id] = one.lane

    def progress(self, message: Message) -> None:
        """A record of `progress`: how groups ended."""
        record = message.value
        if isinstance(record, Closure):
            self._closures[record.group, record.attempt] = record
        elif isinstance(record, Drawn):
            self._group_drops |= record.dropped

    def journaled(self, message: Message) -> None:
        """A record of `batches`."""
        if isinstance(message.value, Fence | Batch | Skip | Rollback):
            self._journal.append(message.value)

    def dead_letter(self, message: Message) -> None:
        """A record of `dead-letters`: whatever can still be read of it is accounted for."""
        if not isinstance(message.value, DeadLetter):
            return
        try:
            inner = decode(message.value.value)
        except (BadFrame, UnknownMajor):
            return
        if isinstance(inner, Block):
            for one in inner.experiences:
                self._reasons.setdefault(one.id, message.value.reason)

    def account(self) -> Account:
        """The account as of what was folded in."""
        entries, _ = effective(self._journal, self._run)
        items = [item for entry in entries if isinstance(entry, Batch) for item in entry.items]
        counts = Counter(item.id for item in items)
        lanes = {item.id: item.lane for item in items}
        repeated = Counter((item.id, item.revision, item.use) for item in items)
        dropped: Counter[str] = Counter()
        pending = []
        for name in self._published:
            if name in counts:
                continue
            reason = self._reason(name)
            if reason:
                dropped[reason] += 1
            else:
                pending.append(name)
        uses: dict[str, Counter[int]] = {}
        for name, count in counts.items():
            uses.setdefault(lanes[name], Counter())[count] += 1
        synthetic = {name for name, lane in self._buffered.items() if name not in self._published}
        return Account(
            published=len(self._published),
            trained=sum(1 for name in self._published if name in counts),
            dropped=dict(dropped.most_common()),
            pending=len(pending),
            uses={lane: dict(sorted(found.items())) for lane, found in sorted(uses.items())},
            trained_twice=tuple(sorted({name for (name, _, _), count in repeated.items() if count > 1})),
            unknown=tuple(sorted(name for name in counts if name not in self._published and name not in synthetic)),
            pending_ids=tuple(sorted(pending)),
        )

    def _reason(self, name: str) -> str:
        """Why an experience was not trained, "" while it still may be."""
        if name in self._reasons:
            return self._reasons[name]
        group, attempt = self._published[name]
        if group in self._group_drops:
            return self._group_drops[group]
        closure = self._closures.get((group, attempt))
        if closure is None or (closure.outcome == "buffered" and name in self._buffered):
            return ""
        if closure.outcome == "buffered":
            return max(closure.drops, key=lambda reason: closure.drops[reason], default="dropped in collect")
        return closure.reason or closure.outcome


def fold_all(ledger: Ledger, topic: str, messages: Iterable[Message]) -> None:
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
