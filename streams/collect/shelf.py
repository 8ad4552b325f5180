"""Closed groups that lie in the store alone: those of a snapshot that a worker took up, fetched when a record names them.

    index of every part (8 bytes a group) in memory ─> the parts that may hold it ─> newest first ─> the group

Guarantee: a group is not there only if no part holds it: a store that does not answer and a part that is damaged are errors.
"""

import asyncio
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infra.store.snapshots import SnapshotDamaged, SnapshotManifest, SnapshotPart, read
from infra.store.store import Store
from schemas.ids import session_of
from streams.collect.carried import ClosedRow, closed_parts, closed_rows, hash_of

HELD_PARTS = 2


class _View(NamedTuple):
    """hashes: of all parts, sorted; numbers: of the parts they are of."""

    snapshot: SnapshotManifest
    hashes: npt.NDArray[np.uint64]
    numbers: npt.NDArray[np.int64]

    def places(self, wanted: int) -> list[SnapshotPart]:
        """Parts that may hold it, newest first."""
        begin = int(np.searchsorted(self.hashes, np.uint64(wanted), "left"))
        end = int(np.searchsorted(self.hashes, np.uint64(wanted), "right"))
        return [self.snapshot.parts[f"closed/{number}"] for number in self.numbers[begin:end][::-1]]


class Shelf:
    """Closed groups of one snapshot after another. Not safe for concurrent use, but for `open`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._view = _View(SnapshotManifest("", 0, {}), np.empty(0, np.uint64), np.empty(0, np.int64))
        self._indexes: dict[str, npt.NDArray[np.uint64]] = {}
        self._held: dict[str, dict[str, ClosedRow]] = {}

    def open(self, snapshot: SnapshotManifest) -> None:
        """Look into this one from here on; blocking. Raises SnapshotDamaged, StoreError, and keeps the one before then."""
        indexes: dict[str, npt.NDArray[np.uint64]] = {}
        hashes, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for number in (one.number for one in closed_parts(snapshot)):
            part = snapshot.parts[f"index/{number}"]
            index = self._indexes.get(part.key)
            indexes[part.key] = np.frombuffer(read(self._store, part), dtype="<u8") if index is None else index
            hashes.append(indexes[part.key])
            numbers.append(np.full(len(hashes[-1]), number, np.int64))
        order = np.argsort(np.concatenate(hashes), kind="stable")
        self._view = _View(snapshot, np.concatenate(hashes)[order], np.concatenate(numbers)[order])
        self._indexes = indexes

    async def group(self, group_id: str) -> ClosedRow | None:
        """The newest of a group. Raises SnapshotDamaged, StoreError."""
        for part in self._view.places(hash_of(group_id)):
            if (found := (await self._rows(part)).get(group_id)) is not None:
                return found
        return None

    async def session(self, session: str) -> list[ClosedRow]:
        """The newest of each turn of a session. Raises SnapshotDamaged, StoreError."""
        found: dict[str, ClosedRow] = {}
        for part in self._view.places(hash_of(f"{session}/")):
            for row in (await self._rows(part)).values():
                if session_of(row.id) == session:
                    found.setdefault(row.id, row)
        return list(found.values())

    async def _rows(self, part: SnapshotPart) -> dict[str, ClosedRow]:
        held = self._held.pop(part.key, None)
        if held is None:
            try:
                held = {row.id: row for row in closed_rows(await asyncio.to_thread(read, self._store, part))}
            except SnapshotDamaged:
                # Gone, so that no snapshot that names it is taken up again.
                await asyncio.to_thread(self._store.delete, part.key)
                raise
        self._held[part.key] = held  # last: the one used longest ago goes first
        while len(self._held) > HELD_PARTS:
            del self._held[next(iter(self._held))]
        return held
