"""A partition's state as a snapshot in the store: written from the state file, and taken up by a worker without it.

    state file, as of one commit ─> open/<n>    open groups, in the order of their last change
                                    closed/<n>  groups closed since the snapshot before, and index/<n>: where to look for which
                                    memories    of the steps, whole
    blocks stay where they are: in `verified`, at the offsets that the groups name

Guarantees: a snapshot is the state file of one commit, so it is the fold up to the offset it names; what has not
changed is not written again; n changes of closed groups lie in at most 17 · (1 + 2 · n / MAX_ROWS) parts, since a part is
less than half as large as the one before it, or both together are full; a part goes when all of it is older than groups
are kept.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from infra.store.snapshots import SnapshotManifest, SnapshotPart, read, save
from infra.store.store import Store
from schemas.ids import session_of

LAYOUT = 1  # of the parts
OPEN_ROWS = 16  # bits of the row number: groups of one part
MAX_ROWS = 65_536  # of one part of closed groups
FACTS = ("last_ms", "now_ms", "progress_offset", "row")

_encoder = msgspec.msgpack.Encoder()


class OpenRow(NamedTuple):
    """An open group in the state file.

    row: number of the row, higher with each change of the group. id: of the group. data: the group as msgpack.
    """

    row: int
    id: str
    data: bytes


class ClosedRow(NamedTuple):
    """A closed group in the state file.

    id: of the group. closed_ms: log time of its last closure. data: the group as msgpack.
    """

    id: str
    closed_ms: int
    data: bytes


class ClosedPart(NamedTuple):
    """Closed groups of one part; those of a later part replace those of an earlier one.

    number: in the names `closed/<number>` and `index/<number>`. rows: groups in it. newest_ms: when the last of them was
    closed.
    """

    number: int
    rows: int
    newest_ms: int


_open_rows = msgspec.msgpack.Decoder(list[OpenRow])
_closed_rows = msgspec.msgpack.Decoder(list[ClosedRow])
_memories = msgspec.msgpack.Decoder(dict[str, bytes])


class Abandoned(Exception):
    """The partition is being given away, so its snapshot is not finished."""


def series_of(app: str, partition: int) -> str:
    """Name of a partition's snapshots."""
    return f"{app}/collect-{partition}"


def write(
    store: Store, series: str, path: Path, keep_ms: int, abandoned: Callable[[], bool]
) -> SnapshotManifest | None:
    """Store the state file as it is at this moment; None where it is not further than the snapshot before.

    Reads it beside its writer, through a connection of its own. Raises StoreError, SnapshotDamaged, Abandoned.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.execute("BEGIN")  # what is read from here on is of one commit
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        before = snapshot_in(connection)
        if before is not None and before.position >= meta.get("next_offset", 0):
            return None
        closed, also = _still_kept(before, meta["now_ms"] - keep_ms)
        parts = _Parts(connection, store, before, closed, also, abandoned)
        about: dict[str, Any] = {key: meta[key] for key in FACTS}
        about |= {"layout": LAYOUT, "closed": closed}  # the latter is filled while the parts are made
        return save(store, series, meta["next_offset"], parts.make(), about, before=before, also=also)


def snapshot_in(connection: sqlite3.Connection) -> SnapshotManifest | None:
    """The snapshot that the file was last stored as, or made from."""
    row = connection.execute("SELECT data FROM snapshot").fetchone()
    return None if row is None else msgspec.json.decode(row[0], type=SnapshotManifest)


def memories_of(connection: sqlite3.Connection) -> dict[str, bytes]:
    """Each memory in the file by its name, as `Memory.to_bytes` gives it."""
    found: dict[str, list[tuple[str, msgspec.Raw]]] = {}
    for name, key, value in connection.execute("SELECT memory, key, value FROM entries ORDER BY memory, age"):
        found.setdefault(name, []).append((key, msgspec.Raw(value)))
    return {name: _encoder.encode(entries) for name, entries in found.items()}


def closed_parts(snapshot: SnapshotManifest) -> list[ClosedPart]:
    """The parts of closed groups, earliest first."""
    return [ClosedPart(*one) for one in snapshot.about["closed"]]


def _still_kept(before: SnapshotManifest | None, since_ms: int) -> tuple[list[ClosedPart], dict[str, SnapshotPart]]:
    """Parts of closed groups of the snapshot before of which some are still to be known."""
    if before is None:
        return [], {}
    closed = [one for one in closed_parts(before) if one.newest_ms >= since_ms]
    names = [f"{kind}/{one.number}" for one in closed for kind in ("closed", "index")]
    return closed, {name: before.parts[name] for name in names}


class _Parts:
    """What `save` is given, one part after the other. closed, also: changed while they are made."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        store: Store,
        before: SnapshotManifest | None,
        closed: list[ClosedPart],
        also: dict[str, SnapshotPart],
        abandoned: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._store = store
        self._before = before
        self._closed = closed
        self._also = also
        self._abandoned = abandoned

    def make(self) -> Iterator[tuple[str, bytes]]:
        """Names and bytes."""
        for name, data in self._all():
            if self._abandoned():
                raise Abandoned
            yield name, data

    def _all(self) -> Iterator[tuple[str, bytes]]:
        yield "memories", _encoder.encode(memories_of(self._connection))
        yield from self._open()
        since = -1 if self._before is None else int(self._before.about["row"])
        query = "SELECT id, closed_ms, data FROM groups WHERE +closed_ms > 0 AND rowid > ? ORDER BY rowid"
        rows = self._connection.execute(query, (since,))
        while chunk := [ClosedRow(*row) for row in rows.fetchmany(MAX_ROWS)]:
            yield from self._close(chunk)

    def _open(self) -> Iterator[tuple[str, bytes]]:
        number, rows = -1, list[OpenRow]()
        query = "SELECT rowid, id, data FROM groups WHERE closed_ms = 0 ORDER BY rowid"
        for row in self._connection.execute(query):
            if rows and row[0] >> OPEN_ROWS != number:
                yield f"open/{number}", _encoder.encode(rows)
                rows = []
            number = row[0] >> OPEN_ROWS
            rows.append(OpenRow(*row))
        if rows:
            yield f"open/{number}", _encoder.encode(rows)

    def _close(self, rows: list[ClosedRow]) -> Iterator[tuple[str, bytes]]:
        """A part of these, and of the parts before it that are not much larger."""
        number = self._closed[-1].number + 1 if self._closed else 0
        while self._closed and self._closed[-1].rows <= min(2 * len(rows), MAX_ROWS - len(rows)):
            small = self._closed.pop()
            part = self._also.pop(f"closed/{small.number}")
            del self._also[f"index/{small.number}"]
            merged = {row.id: row for row in closed_rows(read(self._store, part))} | {row.id: row for row in rows}
            rows = list(merged.values())
        self._closed.append(ClosedPart(number, len(rows), max(row.closed_ms for row in rows)))
        yield f"closed/{number}", _encoder.encode(rows)
        yield f"index/{number}", index_of(rows)


def open_rows(data: bytes) -> list[OpenRow]:
    """What a part of open groups holds."""
    return _open_rows.decode(data)


def closed_rows(data: bytes) -> list[ClosedRow]:
    """What a part of closed groups holds."""
    return _closed_rows.decode(data)


def memories_in(store: Store, snapshot: SnapshotManifest) -> dict[str, bytes]:
    """The memories of the steps, by name. Raises SnapshotDamaged, StoreError."""
    return _memories.decode(read(store, snapshot.parts["memories"]))


def open_parts(snapshot: SnapshotManifest) -> list[SnapshotPart]:
    """The parts of open groups."""
    return [part for name, part in snapshot.parts.items() if name.startswith("open/")]


def index_of(rows: list[ClosedRow]) -> bytes:
    """Hashes of the groups and of their sessions, sorted, 8 bytes each."""
    hashes = {hash_of(row.id) for row in rows} | {hash_of(f"{one}/") for row in rows if (one := session_of(row.id))}
    return np.array(sorted(hashes), dtype="<u8").tobytes()


def hash_of(name: str) -> int:
    """The hash of a group, or of a session with a slash behind it, which no group has."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


def facts_of(snapshot: SnapshotManifest) -> dict[str, Any]:
    """The rows of the state file's table `meta` that say where the fold is."""
    return {"next_offset": snapshot.position} | {key: snapshot.about[key] for key in FACTS}
