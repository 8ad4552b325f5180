"""The SQLite file that keeps one worker's state of one partition of `verified`.

Guarantees: state and next offset change in one transaction, so the file always is the fold up to the offset it names; a
file that cannot be read is put aside, never half used. Closed groups are read back one by one, open ones at the start.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.chain.processor import Memory, Value, entries_in
from infra.observe.failpoint import reach
from infra.store.snapshots import SnapshotDamaged, SnapshotManifest, read
from infra.store.store import Store
from schemas.bulk import FindSeal
from streams.collect.state import Frames, Group, State

logger = logging.getLogger(__name__)

LAYOUT = 8  # of the file, and of the parts of its snapshots
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (id TEXT PRIMARY KEY, closed_ms INTEGER NOT NULL, data BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_closing ON groups (closed_ms);
CREATE TABLE IF NOT EXISTS frames (offset INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS entries
  (memory TEXT, key TEXT, age INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (memory, key)) WITHOUT ROWID;
"""
CACHE_KB, ADOPT_CACHE_KB = 2_000, 128_000  # of pages: SQLite's own, and for the index of a million names in no order
TABLES = ("meta", "groups", "frames", "entries")
# A known key keeps its age.
REMEMBER = "INSERT INTO entries VALUES (?, ?, ?, ?) ON CONFLICT (memory, key) DO UPDATE SET value = excluded.value"

_encoder = msgspec.msgpack.Encoder()
_group_rows = msgspec.msgpack.Decoder(list[tuple[int, str, int, bytes]])
_memories = msgspec.msgpack.Decoder(dict[str, bytes])
_group_decoder = msgspec.msgpack.Decoder(Group)
Rows = list[tuple[Any, ...]]


class PendingFile:
    """One open file. Not safe for concurrent use; `save` writes in a thread."""

    def __init__(self, path: Path, find_seal: FindSeal | None = None) -> None:
        """Open or create the file; rename a damaged file to `<name>.damaged` and create a new one. find_seal: keys of its
        blocks, which it stores sealed as in the log.
        """
        self.path = path
        self._find_seal = find_seal
        path.parent.mkdir(parents=True, exist_ok=True)
        self.progress_offset = 0
        self._row = 0  # last number given to a row; a row gets a new one with every change
        self._age = 0  # last one given to an entry of a memory
        self._kept: set[str] = set()  # memories of which the file lacks nothing but their changes
        self._looked_up: set[str] = set()
        self._writing = threading.Lock()  # a cancelled save writes on in its thread: closing under it would crash
        try:
            self._connection = self._open()
        except sqlite3.DatabaseError as error:
            logger.warning("collect_state_damaged path=%s error=%s", path, error)
            path.replace(path.with_suffix(".damaged"))
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._connection = self._open()

    def load(self, memories: dict[str, Memory]) -> State:
        meta = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        for name, data in saved_memories(self._connection).items():
            if name in memories:
                memories[name] = Memory.from_bytes(data, memories[name].limit)
        for memory in memories.values():
            memory.changes()
        self._age = self._connection.execute("SELECT coalesce(max(age), 0) FROM entries").fetchone()[0]
        self._kept = set(memories)
        state = State(Frames(self._frame, self._find_seal), memories)
        state.next_offset = meta.get("next_offset", 0)
        state.last_ms = meta.get("last_ms", 0)
        state.now_ms = meta.get("now_ms", 0)
        self.progress_offset = meta.get("progress_offset", 0)
        self._row = meta.get("row", 0)
        rows = self._connection.execute("SELECT data FROM groups WHERE closed_ms = 0")
        for group in sorted((_group_decoder.decode(data) for (data,) in rows), key=lambda group: group.came_ms):
            state.restore(group)
        there = {offset for (offset,) in self._connection.execute("SELECT offset FROM frames")}
        state.frames.absent = {at for group in state.groups.values() for at in group.offsets()} - there
        return state

    def adopt(self, store: Store, snapshot: SnapshotManifest) -> None:
        """Become the snapshot, in one transaction; blocking. Raises SnapshotDamaged, StoreError, and is as before then."""
        memories = _memories.decode(read(store, snapshot.parts["memories"]))
        with self._writing:
            connection = self._connection
            connection.execute(f"PRAGMA cache_size = -{ADOPT_CACHE_KB}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                for table in TABLES:
                    connection.execute(f"DELETE FROM {table}")
                for part in [part for name, part in snapshot.parts.items() if name.startswith("groups/")]:
                    rows = _group_rows.decode(read(store, part))
                    connection.executemany("INSERT INTO groups (rowid, id, closed_ms, data) VALUES (?, ?, ?, ?)", rows)
                connection.executemany(
                    REMEMBER, _entry_rows({name: entries_in(data) for name, data in memories.items()}, 0)
                )
                connection.executemany("INSERT INTO meta VALUES (?, ?)", snapshot.about["meta"].items())
                connection.execute("COMMIT")
            except BaseException as error:
                connection.execute("ROLLBACK")
                if isinstance(error, msgspec.DecodeError | KeyError | sqlite3.IntegrityError):
                    raise SnapshotDamaged(f"snapshot {snapshot.key}: {type(error).__name__}: {error}") from error
                raise
            finally:
                connection.execute(f"PRAGMA cache_size = -{CACHE_KB}")

    def look_up(self, state: State, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            if group_id not in state.groups:
                row = self._connection.execute("SELECT data FROM groups WHERE id = ?", (group_id,)).fetchone()
                if row is not None:
                    state.add(_group_decoder.decode(row[0]))
                    self._looked_up.add(group_id)

    def look_up_sessions(self, state: State, sessions: Iterable[str]) -> None:
        for session in sessions:
            # "/" follows ".", so this is every id that begins with the session and a dot.
            between = (f"{session}.", f"{session}/")
            rows = self._connection.execute("SELECT id, data FROM groups WHERE id >= ? AND id < ?", between).fetchall()
            for group_id, data in rows:
                if group_id not in state.groups and group_id not in state.touched:
                    state.add(_group_decoder.decode(data))
                    self._looked_up.add(group_id)

    async def save(self, state: State, keep_ms: int) -> None:
        """Make the file equal to `state`, in one transaction; closed groups then leave the memory."""
        groups: Rows = []
        gone: Rows = []
        for group_id in state.touched:
            group = state.groups.get(group_id)
            if group is None:
                gone.append((group_id,))
            else:
                self._row += 1
                groups.append((self._row, group_id, group.closed_ms, _encoder.encode(group)))
        changed = {name: memory.changes() for name, memory in state.memories.items()}
        entries = _entry_rows({name: change.entries.items() for name, change in changed.items()}, self._age)
        self._age += len(entries)
        meta = {
            "next_offset": state.next_offset,
            "last_ms": state.last_ms,
            "now_ms": state.now_ms,
            "progress_offset": self.progress_offset,
            "row": self._row,
        }
        changes: list[tuple[str, Rows]] = [
            ("INSERT OR REPLACE INTO groups (rowid, id, closed_ms, data) VALUES (?, ?, ?, ?)", groups),
            ("DELETE FROM groups WHERE id = ?", gone),
            ("INSERT OR REPLACE INTO frames VALUES (?, ?)", list(state.frames.unsaved.items())),
            ("DELETE FROM frames WHERE offset = ?", [(offset,) for offset in state.frames.removed]),
            ("DELETE FROM entries WHERE memory = ?", [(name,) for name in changed if name not in self._kept]),
            (
                "DELETE FROM entries WHERE memory = ? AND key = ?",
                [(name, key) for name, change in changed.items() for key in change.gone],
            ),
            (REMEMBER, entries),
            ("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(meta.items())),
            ("DELETE FROM groups WHERE closed_ms > 0 AND closed_ms < ?", [(state.now_ms - keep_ms,)]),
        ]
        await asyncio.to_thread(self._write, changes)
        self._kept.update(changed)
        state.frames.mark_saved()
        for group_id in state.touched | self._looked_up:
            group = state.groups.get(group_id)
            if group is not None and group.is_closed:
                state.remove(group_id)
        state.touched.clear()
        self._looked_up.clear()
        state.forget_closed_order()

    def clear(self) -> None:
        with self._writing:
            self._connection.execute("BEGIN IMMEDIATE")
            for table in TABLES:
                self._connection.execute(f"DELETE FROM {table}")
            self._connection.execute("COMMIT")

    def close(self) -> None:
        with self._writing:
            self._connection.close()

    def _open(self) -> sqlite3.Connection:
        # isolation_level None: transactions begin where this file says so.
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            # NORMAL may lose the last transactions with the machine, never the file: the log has them.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            (layout,) = connection.execute("PRAGMA user_version").fetchone()
            if layout not in (0, LAYOUT):
                raise sqlite3.DatabaseError(f"layout {layout}, expected {LAYOUT}")
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA user_version = {LAYOUT}")
            connection.execute("SELECT count(*) FROM meta").fetchone()
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    def _frame(self, offset: int) -> bytes:
        row = self._connection.execute("SELECT data FROM frames WHERE offset = ?", (offset,)).fetchone()
        if row is None:
            raise KeyError(offset)
        return bytes(row[0])

    def _write(self, changes: Sequence[tuple[str, Rows]]) -> None:
        connection = self._connection
        with self._writing:
            connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, rows in changes:
                    connection.executemany(statement, rows)
                reach("collect.before_commit")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        reach("collect.after_commit")


def _entry_rows(entries: Mapping[str, Iterable[tuple[str, Value]]], age: int) -> Rows:
    named = ((name, key, value) for name, own in entries.items() for key, value in own)
    return [(name, key, at, _encoder.encode(value)) for at, (name, key, value) in enumerate(named, age + 1)]


def saved_memories(connection: sqlite3.Connection) -> dict[str, bytes]:
    found: dict[str, list[tuple[str, msgspec.Raw]]] = {}
    for name, key, value in connection.execute("SELECT memory, key, value FROM entries ORDER BY memory, age"):
        found.setdefault(name, []).append((key, msgspec.Raw(value)))
    return {name: _encoder.encode(entries) for name, entries in found.items()}
