"""The journal's records: batches of steps, skips, rollbacks and hashes of checkpoints. Evolution: see `schemas.records`."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta as Bounds

from schemas.fields import Count, Counts, Finite, Id, Lane, Number, Struct


class Ranges:
    """Numbers stored as ranges: the steps of a month of training are one range."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        """Add first to last, inclusive; nothing where last is below first."""
        if last < first:
            return
        begin = bisect_left(self._lasts, first - 1)  # of the ranges that these numbers meet or touch
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number)
        return at > 0 and number <= self._lasts[at - 1]

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self._firsts)


class BatchItem(Struct, frozen=True, array_like=True):
    """One experience as trained: its place in `buffer`, and the numbers that the loss used.

    id: of the experience. partition, offset: of its block. index: within its block. lane: that trains it. revision: of the
    experience. advantage: of the whole experience. use: 0 the first time that any revision of it is trained in the lane.
    min_version: oldest version among its trained tokens. weight: multiplies its loss terms.
    """

    id: Id
    partition: Count
    offset: Count
    index: Count
    lane: Lane
    revision: Count = 0
    use: Count = 0
    min_version: Number = -1
    advantage: Finite = 0.0
    weight: Finite = 1.0


Items = Annotated[tuple[BatchItem, ...], Bounds(max_length=65_536)]
Digests = Annotated[tuple[Annotated[bytes, Bounds(max_length=64)], ...], Bounds(max_length=65_536)]


class Batch(Struct, frozen=True, tag_field="kind", tag="batch"):
    """The journal: the experiences of one optimizer step, in order, written before the step.

    run: whose journal it is. token: fencing token; the first record per (token, step) counts. step: from 0. version: policy
    version before the step. items: in the order of training. phase: "warmup" or "train". drops: reason to experiences dropped
    at the draw or in the batch chain. dropped: experiences of the draw that are wholly too old, and experiences that the batch
    chain took out of the step. dropped_because: one reason each. masked_below: usual tokens that a version below it sampled are
    no targets of this step, -1 where there are none. masked: number of such tokens in the draw, without experiences that
    are wholly too old. seed: of everything random in the step. config_hash: of the settings that shape the step. blocks:
    BLAKE2b-128 of each block's record in `buffer`, in the order in which `items` and then `dropped` first name them, so that
    an altered block can be named.
    """

    run: str
    token: int
    step: int
    version: int
    items: Items
    phase: Literal["warmup", "train"] = "train"
    drops: Counts = {}
    dropped: Items = ()
    seed: int = 0
    config_hash: str = ""
    blocks: Digests = ()
    dropped_because: Annotated[tuple[str, ...], Bounds(max_length=65_536)] = ()
    masked_below: Number = -1
    masked: Count = 0


class Fence(Struct, frozen=True, tag_field="kind", tag="fence"):
    """First record of a new lease in the journal: lower tokens after it count for nothing.

    run: whose journal it is. token: of the lease. owner: instance of the trainer that holds it.
    """

    run: str
    token: int
    owner: str = ""


class Skip(Struct, frozen=True, tag_field="kind", tag="skip"):
    """A journaled step that changed no weights, and why.

    run, token, step: as in the Batch it is about. reason: a short phrase for people.
    """

    run: str
    token: int
    step: int
    reason: str


class Rollback(Struct, frozen=True, tag_field="kind", tag="rollback"):
    """The trainer went back: a run of steps is quarantined, and their batches are never re-executed.

    run, token: as in a Batch. from_step, to_step: the first and the last of these steps. restored_version: the older
    version whose weights are taken. reason: a short phrase for people. version: the new, higher version whose content
    equals restored_version.
    """

    run: str
    token: int
    from_step: int
    to_step: int
    restored_version: int
    version: int
    reason: str


class Saved(Struct, frozen=True, tag_field="kind", tag="saved"):
    """Hash of the learner's state after `step`, written to the journal just before its checkpoint becomes valid; it stays
    when the checkpoint is pruned, so that a replay can be compared with every one made inside the horizon.

    run, token: as in a Batch. step: -1 before the first. version: of these weights. sha256: of the state over names, dtypes,
    shapes and bytes, in order of the names; of the bytes the hashes of their chunks, where it begins with "chunks ". phase: of
    the steps that follow. made_with: inputs of the bits besides the journal (code, libraries, device, threads), by name.
    """

    run: str
    token: int
    step: int
    version: int
    sha256: str
    phase: Literal["warmup", "train"] = "train"
    made_with: Annotated[dict[str, str], Bounds(max_length=256)] = {}


Entry = Batch | Skip | Rollback | Saved
JournalRecord = Fence | Entry


class Effective:
    """Tells of each record of a journal, in its order, whether it counts: the same for every reader.

    Steps that an older token journaled are only executed again, never journaled again, so (token, step) is
    unique per kind of record; a rollback has its last step; a repeated pair is a retried send. After a trim, the first
    kept record counts as the fence before it: the trainer trims only up to a record that counted. token: highest fence.
    """

    def __init__(self, run: str, token: int = -1) -> None:
        """token: highest fence before the first record."""
        self.token = token
        self._run = run
        self._seen: dict[tuple[type, int], Ranges] = {}  # steps by kind of record and token

    def counts(self, record: JournalRecord) -> bool:
        """True if the next record counts; a fence never does."""
        if record.run != self._run:
            return False
        if isinstance(record, Fence):
            self.token = max(self.token, record.token)
            return False
        if self.token < 0:
            self.token = record.token
        step = record.to_step if isinstance(record, Rollback) else record.step
        seen = self._seen.setdefault((type(record), record.token), Ranges())
        if record.token < self.token or step in seen:
            return False
        seen.add(step, step)
        return True


def effective(records: Iterable[JournalRecord], run: str, token: int = -1) -> tuple[list[Entry], int]:
    """Records that count, and the highest fence: pure. token: highest fence before the first record."""
    reader = Effective(run, token)
    entries = [record for record in records if reader.counts(record) and not isinstance(record, Fence)]
    return entries, reader.token
