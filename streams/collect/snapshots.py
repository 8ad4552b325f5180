"""Snapshots of a partition's state in the store, from which a worker without the state file starts.

    state file, as of one commit ─> groups/<n>   groups by the order of their last change, 65,536 row numbers each
                                    memories     of the steps, whole
    blocks stay in `verified`, at the offsets that the open groups name

Guarantees: a snapshot is the state file of one commit, so it is the fold up to the offset it names. Unchanged parts are not
written again. A snapshot that is damaged, incomplete, of another log, of a newer release or older than the log is not
used, which is logged and counted, and the log is folded instead. A store that is away costs snapshots and no record.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path

import msgspec

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.snapshots import DAMAGED, NEWER, SnapshotDamaged, SnapshotManifest, candidates, prune, remove, save
from infra.store.store import Store
from schemas.errors import StoreError
from streams.collect.pending import LAYOUT, PendingFile, saved_memories
from streams.stages.stage import confirmed, end_for

logger = logging.getLogger(__name__)

PART_BITS = 16  # of the row number: groups of one part
STORE_AWAY_S = 30.0  # how long a start waits for the store before it folds the log instead
AWAY = "the store was away"


class Abandoned(Exception):
    """The partition is being given away, so its snapshot is not finished."""


class SnapshotPolicy(msgspec.Struct, frozen=True):
    """Limits after which a snapshot is written: the first that is met, and only if a record came.

    seconds: since the last snapshot. records: of `verified`, since the last snapshot.
    """

    seconds: float = 600.0
    records: int = 100_000


def series_name(app: str, partition: int) -> str:
    return f"{app}/collect-{partition}"


def write(
    store: Store, series: str, path: Path, before: SnapshotManifest | None, abandoned: Callable[[], bool]
) -> SnapshotManifest | None:
    """Store the state file as of now; None if it is not further than `before`, whose unchanged parts are not written again.

    Reads the file through a connection of its own, while its owner writes. Raises StoreError, SnapshotDamaged, Abandoned.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.execute("BEGIN")  # all reads see one commit
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        next_offset = meta.get("next_offset", 0)
        if next_offset <= (0 if before is None else before.position):
            return None

        def parts() -> Iterator[tuple[str, bytes]]:
            yield "memories", msgspec.msgpack.encode(saved_memories(connection))
            rows = connection.execute("SELECT rowid, id, closed_ms, data FROM groups ORDER BY rowid")
            for number, part in groupby(rows, lambda row: row[0] >> PART_BITS):
                if abandoned():
                    raise Abandoned
                yield f"groups/{number}", msgspec.msgpack.encode(list(part))

        return save(store, series, next_offset, parts(), {"layout": LAYOUT, "meta": meta}, before=before)


class SnapshotManager:
    """Stores one partition's state file, and makes a state file from the store. Not safe for concurrent use."""

    def __init__(
        self, log: Log, metrics: Metrics, partition: int, pending: PendingFile, policy: SnapshotPolicy
    ) -> None:
        self._store = log.store
        self._metrics = metrics
        self._partition = partition
        self._series = series_name(log.app, partition)
        self._pending = pending
        self._policy = policy
        self._newest: SnapshotManifest | None = None
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
        for other in [snapshot for snapshot in found if snapshot.about.get("layout") != LAYOUT]:
            self.refuse(NEWER, f"snapshot {other.key}: got layout {other.about.get('layout')}, expected {LAYOUT}")
            found.remove(other)
        return found

    def refuse(self, reason: str, line: str) -> None:
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
        self._metrics.counter("snapshots_taken_up").inc()
        return True

    def begin(self, next_offset: int, newest: SnapshotManifest | None) -> None:
        """The fold continues at `next_offset`. newest: the snapshot whose parts the next one may name."""
        self._newest = newest
        self._at = next_offset if newest is None else newest.position
        if newest is not None:
            self._show_size(newest.stored_bytes)
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
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._show_size(0)

    async def write(self) -> None:
        """Store the state file as of now; returns once it is stored or has failed; a failure is logged and counted."""
        store = self._store
        if store is None:
            return
        try:
            snapshot = await asyncio.to_thread(
                write, store, self._series, self._pending.path, self._newest, lambda: self._closed
            )
            if snapshot is None or self._closed:
                return
            self._newest = snapshot
            await asyncio.to_thread(prune, store, self._series)
        except Abandoned:
            return
        except (StoreError, SnapshotDamaged, sqlite3.Error) as error:
            logger.warning("collect_snapshot_failed partition=%d error=%s", self._partition, error)
            self._metrics.counter("snapshots_failed").inc()
            if isinstance(error, SnapshotDamaged):
                self._newest = None  # the next is written whole
        except Exception as error:
            end_for(error, f"collect: snapshot of partition {self._partition}")
        else:
            self._metrics.counter("snapshots_written").inc()
            if not self._closed:
                self._show_size(snapshot.stored_bytes)

    def _show_size(self, num_bytes: int) -> None:
        self._metrics.gauge("snapshot_bytes", partition=str(self._partition)).set(num_bytes)
