"""When a partition's state goes to the store, and how a worker without it takes it up there.

Guarantees: a snapshot that is damaged, incomplete, of another log, of a newer release or older than what the log keeps is
not taken, which is said and counted, and the log is folded instead; a store that is away costs snapshots and no record; a
closed group that lies in the store alone is found there, or the process ends before it decides without it.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Iterable

import msgspec

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.snapshots import DAMAGED, NEWER, SnapshotDamaged, SnapshotManifest, candidates, prune, remove
from schemas.errors import StoreError
from streams.collect.carried import LAYOUT, Abandoned, ClosedRow, series_of, write
from streams.collect.pending import PendingFile
from streams.collect.shelf import Shelf
from streams.collect.state import State
from streams.stages.stage import confirmed, end_for

logger = logging.getLogger(__name__)

STORE_AWAY_S = 30.0  # how long a start waits for the store before it folds the log instead
AWAY = "the store was away"


class Often(msgspec.Struct, frozen=True):
    """When a snapshot is written: at whichever limit is met first, and only if a record came.

    seconds: since the last snapshot. records: of `verified`, since the last snapshot.

    Example: Often(seconds=600.0, records=100_000)
    """

    seconds: float = 600.0
    records: int = 100_000


class Carrier:
    """Between one partition's state file and the store. Not safe for concurrent use."""

    def __init__(
        self, log: Log, metrics: Metrics, partition: int, pending: PendingFile, often: Often, keep_ms: int
    ) -> None:
        self._store = log.store
        self._metrics = metrics
        self._partition = partition
        self._series = series_of(log.app, partition)
        self._pending = pending
        self._often = often
        self._keep_ms = keep_ms
        self._shelf: Shelf | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.store_away_s = STORE_AWAY_S
        self._at = 0
        self._since_s = 0.0

    async def candidates(self) -> list[SnapshotManifest]:
        """Whole snapshots of the partition, newest first; none where the store stays away."""
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
        for later in [one for one in found if one.about.get("layout") != LAYOUT]:
            self.refuse(NEWER, f"snapshot {later.key}: got layout {later.about.get('layout')}, expected {LAYOUT}")
            found.remove(later)
        return found

    def refuse(self, reason: str, line: str) -> None:
        """Say that a snapshot is not taken up."""
        logger.warning("collect_snapshot_refused partition=%d reason=%s: %s", self._partition, reason, line)
        self._metrics.counter("snapshots_refused", reason=reason).inc()

    async def remove(self, snapshot: SnapshotManifest) -> None:
        """Take one of another log away: its position would be the newest for ever."""
        assert self._store is not None
        try:
            await asyncio.to_thread(remove, self._store, snapshot)
        except StoreError as error:
            self.refuse(AWAY, str(error))

    async def adopt(self, snapshot: SnapshotManifest) -> bool:
        """Make the state file this snapshot; False, with nothing changed, where a part of it cannot be had."""
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
        """Whether the closed groups that the file leans on can be had. Raises StoreError where the store stays away."""
        store, snapshot = self._store, self._pending.snapshot()
        self._shelf = None
        if not self._pending.leans:
            return True
        if store is None or snapshot is None:
            self.refuse(DAMAGED, f"{self._pending.path}: leans on a snapshot that is not there")
            return False
        shelf = Shelf(store)
        try:
            await confirmed(lambda: asyncio.to_thread(shelf.open, snapshot), "snapshot", self.store_away_s)
        except SnapshotDamaged as error:
            self.refuse(DAMAGED, str(error))
            return False
        self._shelf = shelf
        return True

    async def look_up(self, state: State, groups: Iterable[str], sessions: Iterable[str], give_up_s: float) -> None:
        """Bring closed groups that lie in the store alone into the state; after the file was asked for them.

        Raises StoreError, SnapshotDamaged; then the file holds nothing any more, and the next start folds what is whole.
        """
        shelf = self._shelf
        if shelf is None or not self._pending.leans:
            return
        try:
            for group_id in groups:
                if group_id not in state.groups:
                    found = await confirmed(lambda one=group_id: shelf.group(one), "closed group", give_up_s)  # type: ignore[misc]
                    self._put_back(state, [found] if found is not None else [])
            for session in sessions:
                turns = await confirmed(lambda one=session: shelf.session(one), "closed turns", give_up_s)  # type: ignore[misc]
                self._put_back(state, turns)
        except SnapshotDamaged as error:
            self.refuse(DAMAGED, str(error))
            self._pending.clear()
            raise

    def _put_back(self, state: State, rows: Iterable[ClosedRow]) -> None:
        for row in rows:
            if row.id not in state.groups and row.closed_ms >= state.now_ms - self._keep_ms:
                self._pending.put_back(state, row.id, row.data)

    def begin(self, next_offset: int) -> None:
        """The fold continues from here."""
        known = self._pending.snapshot()
        self._at = next_offset if known is None else known.position
        if known is not None:
            self._show_size(known.stored_bytes)
        self._since_s = asyncio.get_running_loop().time()

    def saved(self, next_offset: int) -> None:
        """The state file holds everything below `next_offset`: store it if it is time, beside the fold."""
        is_running = self._task is not None and not self._task.done()
        if self._store is None or self._closed or is_running or next_offset <= self._at:
            return
        now_s = asyncio.get_running_loop().time()
        if next_offset - self._at >= self._often.records or now_s - self._since_s >= self._often.seconds:
            self._at, self._since_s = next_offset, now_s
            self._task = asyncio.create_task(self.write())

    def close(self) -> None:
        """Write nothing more; what is being written is left unfinished."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._show_size(0)

    async def write(self) -> None:
        """Store the state file as it is now; returns once it is stored or has failed; a failure is logged and counted."""
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
            if self._shelf is not None:
                await asyncio.to_thread(self._shelf.open, snapshot)
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
