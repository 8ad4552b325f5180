"""Snapshots of a role's folded state, in the store, each with the position in the log up to which it was folded.

    snapshots/<series>/parts/<position>-<hash>       compressed bytes, written first
    snapshots/<series>/manifests/<position>-<hash>   names every part with its hash, written last

A state is a function of the log below its position, so every complete snapshot of a series is valid, from any process
and however late; the highest position is the newest. So writers need no lock: objects are never overwritten, and a
writer that was overtaken adds an older snapshot, which is not taken.

Guarantees: a snapshot is found whole or not at all; each part is checked against its hash when it is read; a part that
has not changed since the snapshot before is not written again; `prune` removes no part named by a
kept snapshot, or by a snapshot that is being written at a later position.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import xxhash
import zstandard

from infra.store.store import Store
from schemas.errors import HeadraceError, NotInStore

FORMAT = 1
FOLDER = "snapshots"
KEPT = 2  # the newest, and the one before should that be damaged
LEVEL = 3
# Why a snapshot is not taken: short phrases, as they become labels.
DAMAGED, MISSING, NEWER = "damaged", "a part is missing", "written by a newer release"


class SnapshotDamaged(HeadraceError):
    """A part has other bytes than were written, or is gone."""


class SnapshotPart(msgspec.Struct, frozen=True):
    """One object. key: in the store. stored_bytes: as it lies there. num_bytes, digest: of the bytes given to `save`."""

    key: str
    stored_bytes: int
    num_bytes: int
    digest: str


class SnapshotManifest(msgspec.Struct, frozen=True):
    """Manifest of a snapshot. position: of the log, every record below is in it. about: more facts from its role."""

    series: str
    position: int
    parts: dict[str, SnapshotPart]
    about: dict[str, Any] = {}
    format: int = FORMAT
    key: str = ""

    @property
    def stored_bytes(self) -> int:
        return sum(part.stored_bytes for part in self.parts.values())


Refused = Callable[[str, str], None]
_decoder = msgspec.json.Decoder(SnapshotManifest)


def save(
    store: Store,
    series: str,
    position: int,
    parts: Iterable[tuple[str, bytes]],
    about: dict[str, Any],
    *,
    before: SnapshotManifest | None = None,
) -> SnapshotManifest:
    """Write a snapshot; returns once it is stored. parts: made one after the other, so that one is in memory at a time.

    before: parts that are the same as in this one are named and not written.
    Raises StoreError, SnapshotDamaged where parts of an earlier snapshot have been removed meanwhile.
    """
    named: dict[str, SnapshotPart] = {}
    for name, data in parts:
        digest = xxhash.xxh3_128_hexdigest(data)
        known = before.parts.get(name) if before is not None else None
        if known is not None and (known.digest, known.num_bytes) == (digest, len(data)):
            named[name] = known
            continue
        key = f"{_folder(series, 'parts')}{position:020d}-{digest}"
        stored = zstandard.ZstdCompressor(level=LEVEL).compress(data)
        store.put(key, stored)
        named[name] = SnapshotPart(key, len(stored), len(data), digest)
    snapshot = SnapshotManifest(series, position, named, about)
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode(snapshot))
    key = f"{_folder(series, 'manifests')}{position:020d}-{digest}"
    snapshot = msgspec.structs.replace(snapshot, key=key)
    store.put(key, msgspec.json.encode(snapshot))
    if lost := missing(store, snapshot):
        store.delete(key)
        raise SnapshotDamaged(f"snapshot {key}: {lost} was removed while it was written")
    return snapshot


def candidates(store: Store, series: str, refused: Refused) -> Iterator[SnapshotManifest]:
    """Whole snapshots, newest first. refused: gets the reason and a line for each that is not whole. Raises StoreError."""
    for key in sorted(store.keys(_folder(series, "manifests")), reverse=True):
        try:
            snapshot = _decoder.decode(store.get(key))
        except NotInStore:  # pruned meanwhile
            continue
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            refused(DAMAGED, f"snapshot {key}: {error}")
            continue
        if snapshot.format != FORMAT:
            refused(NEWER, f"snapshot {key}: got format {snapshot.format}, expected {FORMAT}: upgrade this role")
        elif (snapshot.series, snapshot.key) != (series, key):
            refused(DAMAGED, f"snapshot {key}: belongs to {snapshot.series} at {snapshot.key}")
        elif lost := missing(store, snapshot):
            refused(MISSING, f"snapshot {key}: {lost} is missing")
        else:
            yield snapshot


def read(store: Store, part: SnapshotPart) -> bytes:
    """Bytes that were given to `save`. Raises SnapshotDamaged, StoreError."""
    try:
        stored = store.get(part.key)
        if (claimed := zstandard.get_frame_parameters(stored).content_size) != part.num_bytes:
            raise SnapshotDamaged(f"part {part.key}: claims {claimed} bytes, expected {part.num_bytes}")
        data = zstandard.ZstdDecompressor().decompress(stored)
    except NotInStore as error:
        raise SnapshotDamaged(f"part {part.key}: missing in the store") from error
    except zstandard.ZstdError as error:
        raise SnapshotDamaged(f"part {part.key}: {error}") from error
    if (len(data), xxhash.xxh3_128_hexdigest(data)) != (part.num_bytes, part.digest):
        raise SnapshotDamaged(f"part {part.key}: got {len(data)} other bytes, expected {part.num_bytes} as written")
    return data


def missing(store: Store, snapshot: SnapshotManifest) -> str:
    """The key of a part that is not in the store, "" for none. Raises StoreError."""
    there = set(store.keys(_folder(snapshot.series, "parts")))
    return next((part.key for part in snapshot.parts.values() if part.key not in there), "")


def prune(store: Store, series: str, kept: int = KEPT) -> int:
    """Remove all but the `kept` newest whole snapshots, and parts that none of them names; how many objects. Raises StoreError.

    Parts at or beyond the position of the oldest kept snapshot stay: their manifest may be on the way.
    """
    parts = list(store.keys(_folder(series, "parts")))
    stays = list(itertools.islice(candidates(store, series, lambda reason, line: None), kept))
    if len(stays) < kept:
        return 0
    named = {part.key for snapshot in stays for part in snapshot.parts.values()}
    oldest_part = f"{_folder(series, 'parts')}{stays[-1].position:020d}"
    gone = [key for key in store.keys(_folder(series, "manifests")) if key < stays[-1].key]
    gone += [key for key in parts if key not in named and key < oldest_part]
    for key in gone:
        store.delete(key)
    return len(gone)


def remove(store: Store, snapshot: SnapshotManifest) -> None:
    """Remove a snapshot of another log and its parts, which others may name. Raises StoreError."""
    for key in (snapshot.key, *(part.key for part in snapshot.parts.values())):
        store.delete(key)


def _folder(series: str, kind: str) -> str:
    return f"{FOLDER}/{series}/{kind}/"
