"""The account of a run: what became of every published experience. Records go in, an Account comes out.

Precedence, as promised: trained, else dropped with a reason, else pending. A batch whose step was skipped or rolled back
trained nothing: what no other batch trained is then dropped for that reason.

    records ─> facts, few bytes each ─> a spool, dealt by group ─> an account of each part ─> their sum

Guarantee: the memory it takes is that of one part, whatever the log's length; the disk, see `infra.ledger.spool`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from infra.ledger.facts import (
    Buffered,
    Closed,
    Fact,
    FactReader,
    GroupDropped,
    LeftOut,
    Letter,
    Masked,
    Published,
    Stub,
    Trained,
)
from infra.ledger.spool import ScratchSpool
from infra.log.log import LogMessage
from schemas.fields import CANCELLED

Fate = Literal["trained", "dropped", "pending"]
VALIDATION = "kept for validation"
MAX_IDS = 100_000


class Account(msgspec.Struct, frozen=True):
    """published = trained + dropped + pending. uses: lane → times trained → experiences. trained_twice: ids whose
    (revision, use) the journal lists more than once; always empty unless a promise is broken. unknown: trained ids that
    were neither published nor are in the buffer, where processors put what they make. waiting: lane → of the pending, those
    in the buffer that are drawn without order (demonstrations): a drain does not use them up. repeated: deliveries of what was
    delivered before, which count once. masked: sampled tokens of the trained that were too old to be targets. cancelled:
    reason → episodes that were stopped, of which nothing was published. Of ids the first MAX_IDS of each kind.

    published: experiences. trained: of them, at least once. dropped: reason to experiences. pending: neither. pending_ids: of
    these.
    """

    published: int
    trained: int
    dropped: dict[str, int]
    pending: int
    uses: dict[str, dict[int, int]]
    trained_twice: tuple[str, ...]
    unknown: tuple[str, ...]
    pending_ids: tuple[str, ...]
    waiting: dict[str, int] = {}
    repeated: int = 0
    cancelled: dict[str, int] = {}
    masked: int = 0

    @property
    def on_the_way(self) -> int:
        """Pending, and not merely waiting to be drawn: 0 after a drain."""
        return self.pending - sum(self.waiting.values())

    @property
    def is_clean(self) -> bool:
        """Nothing was trained twice and nothing came from nowhere."""
        return not self.trained_twice and not self.unknown


class Ledger:
    """Folds the topics of one app, each in its own order; the order between topics does not matter.

    buffer_begins: oldest kept offset of `buffer`; where what was trained from below it came from is unknown.
    """

    def __init__(self, run: str, buffer_begins: int = 0, spool: ScratchSpool | None = None) -> None:
        """spool: its own by default, closed with the ledger."""
        self.spool = ScratchSpool() if spool is None else spool
        self._reader = FactReader(run)
        self._buffer_begins = buffer_begins

    def fold(self, topic: str, message: LogMessage) -> None:
        """A record of a topic, named as in `schemas.topics`. Raises OSError where the disk is full."""
        for fact in self._reader.facts(topic, message):
            self.spool.add(fact)

    def parts(self) -> Iterator[Account]:
        """The account as of what was folded in, group by group in many parts; `together` adds them up."""
        for part in range(self.spool.num_parts):
            yield account_of(self.spool.read(part), self._reader.without_effect, self._buffer_begins)

    def account(self) -> Account:
        """The account as of what was folded in."""
        total = account_of((), self._reader.without_effect)
        for part in self.parts():
            total = together(total, part)
        return total

    def close(self) -> None:
        """Give back what it holds on the disk."""
        self.spool.close()


class _Folded:
    """Facts of some groups by what they are about."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.published: dict[str, tuple[str, int]] = {}  # id → (group, attempt)
        self.repeated = 0
        self.stubs: dict[str, str] = {}  # id → reason, as are the next four
        self.cancelled: dict[str, str] = {}
        self.letters: dict[str, str] = {}
        self.kept_apart: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.closures: dict[tuple[str, int], Closed] = {}
        self.group_drops: dict[str, str] = {}
        self.buffered: dict[str, str] = {}  # id → lane
        self.trained: list[Trained] = []
        self.masked: list[Masked] = []
        for fact in facts:
            self._fold(fact)

    def _fold(self, fact: Fact) -> None:
        match fact:
            case Published():
                # A second delivery, which verify drops as a duplicate, shares the fate of the first.
                self.repeated += fact.id in self.published
                self.published[fact.id] = (fact.group, fact.attempt)
                if fact.held_out:
                    self.kept_apart[fact.id] = VALIDATION
            case Trained():
                self.trained.append(fact)
            case Buffered():
                self.buffered[fact.id] = fact.lane
            case Closed():
                self.closures[fact.group, fact.attempt] = fact
            case Stub():
                self.stubs.setdefault(fact.id, fact.reason)
                if fact.reason in CANCELLED:
                    self.cancelled[fact.id] = fact.reason
            case Letter():
                self.letters.setdefault(fact.id, fact.reason)
            case GroupDropped():
                self.group_drops[fact.group] = fact.reason
            case LeftOut():
                self.left_out[fact.id] = fact.reason
            case Masked():
                self.masked.append(fact)

    def group_reasons(self, own: Mapping[str, str]) -> dict[str, str]:
        """Experiences that ended with their group: id → reason. own: reasons of their own."""
        members: dict[tuple[str, int], list[str]] = {}
        for name, place in self.published.items():
            members.setdefault(place, []).append(name)
        found: dict[str, str] = {}
        for (group, attempt), names in members.items():
            closure = self.closures.get((group, attempt))
            trainer = self.group_drops.get(group, "")
            if closure is None:
                found |= dict.fromkeys(names, trainer)
            elif closure.outcome == "buffered":
                found |= dict.fromkeys(names, trainer)
                left_out = sorted(name for name in names if name not in self.buffered and name not in own)
                # Those with a drop marker have their reason already, and the closure counts it too.
                others = Counter(closure.drops) - Counter(own[name] for name in names if name in own)
                others = Counter({reason: count for reason, count in others.items() if reason not in CANCELLED})
                found |= dict(zip(left_out, spread(others, len(left_out)), strict=True))
            else:
                found |= dict.fromkeys(names, closure.reason or closure.outcome)
        return {name: reason for name, reason in found.items() if reason}


def account_of(facts: Iterable[Fact], without_effect: Callable[[int], str], buffer_begins: int = 0) -> Account:
    """The account of some groups, of which these are all facts. without_effect: why a step trained nothing, "" if it did."""
    folded = _Folded(facts)
    trained = [one for one in folded.trained if not without_effect(one.step)]
    undone = {one.id: why for one in folded.trained if (why := without_effect(one.step))}
    counts = {one.id for one in trained}
    repeated = Counter((one.id, one.revision, one.use) for one in folded.trained)
    own = folded.kept_apart | folded.letters | folded.stubs | folded.left_out
    by_group = folded.group_reasons(own)
    dropped: Counter[str] = Counter()
    pending = []
    for name in folded.published:
        if name in counts:
            continue
        reason = undone.get(name) or own.get(name) or by_group.get(name)
        if reason:
            dropped[reason] += 1
        else:
            pending.append(name)
    known = folded.published.keys() | folded.buffered.keys()
    lanes = [folded.buffered.get(name, "") for name in pending]
    return Account(
        published=len(folded.published),
        trained=sum(1 for name in folded.published if name in counts),
        dropped=dict(dropped),
        pending=len(pending),
        uses=uses_by_lane(trained),
        trained_twice=first({name for (name, _, _), count in repeated.items() if count > 1}),
        unknown=first({one.id for one in trained if one.id not in known and one.offset >= buffer_begins}),
        pending_ids=first(pending),
        # Of the others, a step that is to come takes them all.
        waiting=dict(Counter(lane for lane in lanes if lane not in ("", "usual"))),
        repeated=folded.repeated,
        cancelled=dict(Counter(folded.cancelled.values())),
        masked=sum(one.count for one in folded.masked if not without_effect(one.step)),
    )


def together(one: Account, other: Account) -> Account:
    """The account of both, which have no group in common."""
    uses = {lane: Counter(one.uses.get(lane)) + Counter(other.uses.get(lane)) for lane in one.uses | other.uses}
    waiting = Counter(one.waiting) + Counter(other.waiting)
    return Account(
        published=one.published + other.published,
        trained=one.trained + other.trained,
        dropped=most_first(Counter(one.dropped) + Counter(other.dropped)),
        pending=one.pending + other.pending,
        uses={lane: dict(sorted(uses[lane].items())) for lane in sorted(uses)},
        trained_twice=first((*one.trained_twice, *other.trained_twice)),
        unknown=first((*one.unknown, *other.unknown)),
        pending_ids=first((*one.pending_ids, *other.pending_ids)),
        waiting=dict(sorted(waiting.items())),
        repeated=one.repeated + other.repeated,
        cancelled=most_first(Counter(one.cancelled) + Counter(other.cancelled)),
        masked=one.masked + other.masked,
    )


def first(ids: Iterable[str]) -> tuple[str, ...]:
    """The first MAX_IDS, in order."""
    return tuple(sorted(ids)[:MAX_IDS])


def most_first(counts: Mapping[str, int]) -> dict[str, int]:
    """Reasons in order of how many there are.

    >>> most_first({"b": 1, "a": 1, "c": 2})
    {'c': 2, 'a': 1, 'b': 1}
    """
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def uses_by_lane(trained: Iterable[Trained]) -> dict[str, dict[int, int]]:
    """Lane → how often trained → experiences."""
    counts = Counter((one.lane, one.id) for one in trained)
    uses: dict[str, Counter[int]] = {}
    for (lane, _), count in counts.items():
        uses.setdefault(lane, Counter())[count] += 1
    return {lane: dict(sorted(found.items())) for lane, found in sorted(uses.items())}


def spread(drops: Mapping[str, int], count: int) -> list[str]:
    """Reasons for `count` members of which a closure says only how many were dropped for what.

    >>> spread({"too short": 2, "odd": 1}, 2)
    ['too short', 'too short']
    """
    reasons = [
        reason for reason, times in sorted(drops.items(), key=lambda pair: (-pair[1], pair[0])) for _ in range(times)
    ]
    return (reasons + ["dropped in collect"] * count)[:count]
