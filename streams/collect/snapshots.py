"""Snapshots of a partition's state in the store, and how a worker without the state file starts from one.

    state file, as of one commit ─> open/<n>                open groups, in the order of their last change
                                    closed/<n>, index/<n>   MAX_ROWS changed closed groups each, and the hashes of their names
                                    memories                of the steps, whole
    blocks stay in `verified`, at the offsets that the groups name

A state file that was made from a snapshot leans on it: closed groups from before are in the store alone, and ClosedGroupIndex
fetches a group when a record names it.

Guarantees: a snapshot is the state file of one commit, so it is the fold up to the offset it names. Unchanged parts are not
written again: of n changes of closed groups at most n / MAX_ROWS + 1 parts exist, and the last part alone is rewritten; a
part goes when all of it is older than groups are kept. A snapshot that is damaged, incomplete, of another log, of a newer
release or older than the log is not used, which is logged and counted, and the log is folded instead. A store that is away
costs snapshots and no record. A closed group is missing only if no part holds it: damage there, or a store that stays away,
ends the process before it decides without the group.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.snapshots import (
    DAMAGED,
    NEWER,
    SnapshotDamaged,
    SnapshotManifest,
    SnapshotPart,
    candidates,
    prune,
    read,
    remove,
    save,
)
from infra.store.store import Store
from schemas.errors import StoreError
from schemas.ids import session_of
from streams.collect.pending import FACTS, PendingFile, saved_memories, snapshot_in
from streams.collect.state import State
from streams.stages.stage import confirmed, end_for

logger = logging.getLogger(__name__)

LAYOUT = 2  # of the parts
OPEN_ROWS = 16  # bits of the row number: groups of one part
MAX_ROWS = 65_536  # of one part of closed groups
HELD_PARTS = 2  # in memory, decoded
STORE_AWAY_S = 30.0  # how long a start waits for the store before it folds the log instead
AWAY = "the store was away"

_View = tuple[SnapshotManifest, npt.NDArray[np.uint64], npt.NDArray[np.int64]]
_encoder = msgspec.msgpack.Encoder()


class Abandoned(Exception):
    """The partition is being given away, so its snapshot is not finished."""


class ClosedRow(NamedTuple):
    """A closed group of the state file. closed_ms: log time of its first closure. data: the group as msgpack."""

    id: str
    closed_ms: int
    data: bytes


class ClosedPart(NamedTuple):
    """A part of closed groups; groups of a later part replace those of an earlier part.

    number: in the names `closed/<number>` and `index/<number>`. rows: groups in it. newest_ms: log time of its newest closure.
    """

    number: int
    rows: int
    newest_ms: int


_closed_rows = msgspec.msgpack.Decoder(list[ClosedRow])


class SnapshotPolicy(msgspec.Struct, frozen=True):
    """Limits after which a snapshot is written: the first that is met, and only if a record came.

    seconds: since the last snapshot. records: of `verified`, since the last snapshot.
    """

    seconds: float = 600.0
    records: int = 100_000


def series_name(app: str, partition: int) -> str:
    return f"{app}/collect-{partition}"


def closed_parts(snapshot: SnapshotManifest) -> list[ClosedPart]:
    return [ClosedPart(*part) for part in snapshot.about["closed"]]


def write(
    store: Store, series: str, path: Path, keep_ms: int, abandoned: Callable[[], bool]
) -> SnapshotManifest | None:
    """Store the state file as of now; None if it is not further than the snapshot before.

    Reads the file through a connection of its own, while its owner writes. Raises StoreError, SnapshotDamaged, Abandoned.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.execute("BEGIN")  # all reads see one commit
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        before = snapshot_in(connection)
        if before is not None and before.position >= meta.get("next_offset", 0):
            return None
        closed: list[ClosedPart] = []
        also: dict[str, SnapshotPart] = {}
        if before is not None:
            closed += [part for part in closed_parts(before) if part.newest_ms >= meta["now_ms"] - keep_ms]
            names = [f"{kind}/{part.number}" for part in closed for kind in ("closed", "index")]
            also |= {name: before.parts[name] for name in names}
        since = -1 if before is None else int(before.about["row"])
        about: dict[str, Any] = {key: meta[key] for key in FACTS}
        about |= {"layout": LAYOUT, "closed": closed}  # filled while the parts are made

        def parts() -> Iterator[tuple[str, bytes]]:
            yield "memories", _encoder.encode(saved_memories(connection))
            yield from _open_parts(connection)
            for name, data in _closed_parts(connection, store, since, closed, also):
                if abandoned():
                    raise Abandoned
                yield name, data

        return save(store, series, meta["next_offset"], parts(), about, before=before, also=also)


def _open_parts(connection: sqlite3.Connection) -> Iterator[tuple[str, bytes]]:
    number, rows = -1, list[tuple[Any, ...]]()
    for row in connection.execute("SELECT rowid, id, data FROM groups WHERE closed_ms = 0 ORDER BY rowid"):
        if rows and row[0] >> OPEN_ROWS != number:
            yield f"open/{number}", _encoder.encode(rows)
            rows = []
        number = row[0] >> OPEN_ROWS
        rows.append(row)
    if rows:
        yield f"open/{number}", _encoder.encode(rows)


def _closed_parts(
    connection: sqlite3.Connection, store: Store, since: int, closed: list[ClosedPart], also: dict[str, SnapshotPart]
) -> Iterator[tuple[str, bytes]]:
    """Groups closed or changed after row `since`; the last part, if it is not full, is filled up first."""
    query = "SELECT id, closed_ms, data FROM groups WHERE +closed_ms > 0 AND rowid > ? ORDER BY rowid"
    found = connection.execute(query, (since,))
    number = closed[-1].number + 1 if closed else 0
    rows: dict[str, ClosedRow] = {}
    if closed and closed[-1].rows < MAX_ROWS and (first := found.fetchone()) is not None:
        number = closed.pop().number
        del also[f"index/{number}"]
        rows = {row.id: row for row in _closed_rows.decode(read(store, also.pop(f"closed/{number}")))}
        rows[first[0]] = ClosedRow(*first)
    while True:
        for row in found.fetchmany(max(1, MAX_ROWS - len(rows))) if len(rows) < MAX_ROWS else ():
            rows[row[0]] = ClosedRow(*row)
        if not rows:
            return
        whole = list(rows.values())
        closed.append(ClosedPart(number, len(whole), max(row.closed_ms for row in whole)))
        yield f"closed/{number}", _encoder.encode(whole)
        yield f"index/{number}", _index(whole)
        number, rows = number + 1, {}


def _index(rows: list[ClosedRow]) -> bytes:
    names = {row.id for row in rows} | {f"{session}/" for row in rows if (session := session_of(row.id))}
    return np.array(sorted(map(_hash, names)), dtype="<u8").tobytes()


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class ClosedGroupIndex:
    """Finds closed groups that are in the store alone. Not safe for concurrent use, except `open`.

    The hashes of all parts (8 bytes a group) are in memory; the parts that may hold a name are fetched, newest first.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # The snapshot, the hashes of all parts, sorted, and their parts; replaced at once, since `open` runs in a thread.
        self._view: _View = (SnapshotManifest("", 0, {}), np.empty(0, np.uint64), np.empty(0, np.int64))
        self._indexes: dict[str, npt.NDArray[np.uint64]] = {}
        self._held: dict[str, dict[str, ClosedRow]] = {}

    def open(self, snapshot: SnapshotManifest) -> None:
        """Use this snapshot from here on; blocking. Raises SnapshotDamaged, StoreError, and keeps the one before then."""
        indexes: dict[str, npt.NDArray[np.uint64]] = {}
        hashes, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for closed in closed_parts(snapshot):
            part = snapshot.parts[f"index/{closed.number}"]
            known = self._indexes.get(part.key)
            indexes[part.key] = np.frombuffer(read(self._store, part), dtype="<u8") if known is None else known
            hashes.append(indexes[part.key])
            numbers.append(np.full(len(hashes[-1]), closed.number, np.int64))
        order = np.argsort(np.concatenate(hashes), kind="stable")
        self._view = snapshot, np.concatenate(hashes)[order], np.concatenate(numbers)[order]
        self._indexes = indexes

    async def group(self, group_id: str) -> ClosedRow | None:
        """Return the newest state of a group. Raises SnapshotDamaged, StoreError."""
        for part in self._parts(_hash(group_id)):
            if (found := (await self._rows(part)).get(group_id)) is not None:
                return found
        return None

    async def session(self, session: str) -> list[ClosedRow]:
        """Return the newest state of each turn of a session. Raises SnapshotDamaged, StoreError."""
        found: dict[str, ClosedRow] = {}
        for part in self._parts(_hash(f"{session}/")):
            for row in (await self._rows(part)).values():
                if session_of(row.id) == session:
                    found.setdefault(row.id, row)
        return list(found.values())

    def _parts(self, wanted: int) -> list[SnapshotPart]:
        snapshot, hashes, numbers = self._view
        begin = int(np.searchsorted(hashes, np.uint64(wanted), "left"))
        end = int(np.searchsorted(hashes, np.uint64(wanted), "right"))
        return [snapshot.parts[f"closed/{number}"] for number in numbers[begin:end][::-1]]

    async def _rows(self, part: SnapshotPart) -> dict[str, ClosedRow]:
        held = self._held.pop(part.key, None)
        if held is None:
            try:
                held = {row.id: row for row in _closed_rows.decode(await asyncio.to_thread(read, self._store, part))}
            except SnapshotDamaged:
                # Removed, so that no snapshot that names it is used again.
                await asyncio.to_thread(self._store.delete, part.key)
                raise
        self._held[part.key] = held  # last: the part used longest ago goes first
        while len(self._held) > HELD_PARTS:
            del self._held[next(iter(self._held))]
        return held


class SnapshotManager:
    """Stores one partition's state file, and makes a state file from the store. Not safe for concurrent use."""

    def __init__(
        self, log: Log, metrics: Metrics, partition: int, pending: PendingFile, policy: SnapshotPolicy, keep_ms: int
    ) -> None:
        self._store = log.store
        self._metrics = metrics
        self._partition = partition
        self._series = series_name(log.app, partition)
        self._pending = pending
        self._policy = policy
        self._keep_ms = keep_ms
        self._index: ClosedGroupIndex | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.store_away_s = STORE_AWAY_S
        self._at = 0
        self._since_s = 0.0

    async def candidates(self) -> list[SnapshotManifest]:
        """Return whole snapshots of the partition, newest first; none if the store stays away."""
        store = self._store
        if store is None:
            return []
        try:
            found = await confirmed(
                lambda: asyncio.to_thread(lambda: list(candidates(store, self._series, self.refuse))),
                "snapshots", self.store_away_s,
            )  # fmt: skip
        except StoreError as error:
            self.refuse(AWAY, f"{self._series}: {error}")
            return []
        for later in [snapshot for snapshot in found if snapshot.about.get("layout") != LAYOUT]:
            self.refuse(NEWER, f"snapshot {later.key}: got layout {later.about.get('layout')}, expected {LAYOUT}")
            found.remove(later)
        return found

    def refuse(self, reason: str, line: str) -> None:
        """Log and count that a snapshot is not used."""
        logger.warning("collect_snapshot_refused partition=%d reason=%s: %s", self._partition, reason, line)
        self._metrics.counter("snapshots_refused", reason=reason).inc()

    async def remove(self, snapshot: SnapshotManifest) -> None:
        """Remove a snapshot of another log, whose position would stay the newest."""
        assert self._store is not None
        try:
            await asyncio.to_thread(remove, self._store, snapshot)
        except StoreError as error:
            self.refuse(AWAY, str(error))

    async def adopt(self, snapshot: SnapshotManifest) -> bool:
        """Replace the state file by this snapshot; False, with nothing changed, if a part of it cannot be read."""
        store = self._store
        assert store is not None
        try:
            await confirmed(
                lambda: asyncio.to_thread(self._pending.adopt, store, snapshot), "snapshot", self.store_away_s
            )
        except (SnapshotDamaged, StoreError) as error:
            self.refuse(DAMAGED if isinstance(error, SnapshotDamaged) else AWAY, str(error))
            return False
        if not await self.opened():
            return False
        self._metrics.counter("snapshots_taken_up").inc()
        return True

    async def opened(self) -> bool:
        """True if the closed groups that the file leans on can be read. Raises StoreError if the store stays away."""
        store, snapshot = self._store, self._pending.snapshot()
        self._index = None
        if not self._pending.leans:
            return True
        if store is None or snapshot is None:
            self.refuse(DAMAGED, f"{self._pending.path}: leans on a snapshot that is missing")
            return False
        index = ClosedGroupIndex(store)
        try:
            await confirmed(lambda: asyncio.to_thread(index.open, snapshot), "snapshot", self.store_away_s)
        except SnapshotDamaged as error:
            self.refuse(DAMAGED, str(error))
            return False
        self._index = index
        return True

    async def look_up(self, state: State, groups: Iterable[str], sessions: Iterable[str], give_up_s: float) -> None:
        """Load closed groups that are in the store alone into the state; call it after the look-up in the file.

        Raises StoreError; SnapshotDamaged with the file cleared, so that the next start folds the log.
        """
        index = self._index
        if index is None or not self._pending.leans:
            return
        try:
            for group_id in [group_id for group_id in groups if group_id not in state.groups]:
                found = await confirmed(partial(index.group, group_id), "closed group", give_up_s)
                self._put_back(state, [] if found is None else [found])
            for session in sessions:
                self._put_back(state, await confirmed(partial(index.session, session), "closed turns", give_up_s))
        except SnapshotDamaged as error:
            self.refuse(DAMAGED, str(error))
            self._pending.clear()
            raise

    def _put_back(self, state: State, rows: Iterable[ClosedRow]) -> None:
        for row in rows:
            if row.id not in state.groups and row.closed_ms >= state.now_ms - self._keep_ms:
                self._pending.put_back(state, row.id, row.data)

    def begin(self, next_offset: int) -> None:
        """The fold continues at `next_offset`."""
        known = self._pending.snapshot()
        self._at = next_offset if known is None else known.position
        if known is not None:
            self._show_size(known.stored_bytes)
        self._since_s = asyncio.get_running_loop().time()

    def saved(self, next_offset: int) -> None:
        """Call it after each save of the state file: stores it in the background when the policy says so."""
        is_running = self._task is not None and not self._task.done()
        if self._store is None or self._closed or is_running or next_offset <= self._at:
            return
        now_s = asyncio.get_running_loop().time()
        if next_offset - self._at >= self._policy.records or now_s - self._since_s >= self._policy.seconds:
            self._at, self._since_s = next_offset, now_s
            self._task = asyncio.create_task(self.write())

    def close(self) -> None:
        """Write nothing more; a snapshot in progress is left unfinished."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._show_size(0)

    async def write(self) -> None:
        """Store the state file as of now; returns once it is stored or has failed; a failure is logged and counted."""
        store, pending = self._store, self._pending
        if store is None:
            return
        try:
            snapshot = await asyncio.to_thread(
                write, store, self._series, pending.path, self._keep_ms, lambda: self._closed
            )
            if snapshot is None or self._closed:
                return
            pending.stored_as(snapshot)
            if self._index is not None:
                await asyncio.to_thread(self._index.open, snapshot)
            await asyncio.to_thread(prune, store, self._series)
        except Abandoned:
            return
        except (StoreError, SnapshotDamaged, sqlite3.Error) as error:
            logger.warning("collect_snapshot_failed partition=%d error=%s", self._partition, error)
            self._metrics.counter("snapshots_failed").inc()
            if isinstance(error, SnapshotDamaged) and not pending.leans and not self._closed:
                pending.stored_as(None)  # the next is written whole
        except Exception as error:
            end_for(error, f"collect: snapshot of partition {self._partition}")
        else:
            self._metrics.counter("snapshots_written").inc()
            if not self._closed:
                self._show_size(snapshot.stored_bytes)

    def _show_size(self, num_bytes: int) -> None:
        self._metrics.gauge("snapshot_bytes", partition=str(self._partition)).set(num_bytes)
