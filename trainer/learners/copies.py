"""Copies of a learner's state and of its weights, each rank its own part, that later steps do not reach.

Guarantees: a checkpoint's index and a version's manifest are written only where every rank stored its part; the error names the
rank that did not. All calls block; a copy is stored in a thread beside the learner's.
"""

from typing import TypeVar

import msgspec

from infra.observe.failpoint import reach
from infra.store.store import Store
from schemas.errors import PolicyRefused, StoreError
from trainer.learners.channel import Channel
from trainer.state import (
    Digests,
    Extent,
    Index,
    Layout,
    Piece,
    Written,
    chunk_digests,
    joined,
    joined_index,
    owners,
    state_hash,
    tails,
    write_pieces,
)

Answered = TypeVar("Answered")
ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (StoreError, PolicyRefused, ValueError)}


class _Report(msgspec.Struct, frozen=True):
    written: Written | None = None
    error: str = ""


class Snapshot:
    """A rank's part of a learner's state. `write` and `hash` are collective: every rank calls them, in a thread of its own.

    channel: nothing else uses it meanwhile. layout: of the whole state. pieces: in this rank's memory.
    """

    def __init__(self, channel: Channel, store: Store | None, folder: str, layout: Layout, pieces: list[Piece]) -> None:
        self._channel = channel
        self._store = store
        self._folder = folder
        self._layout = layout
        self._pieces = pieces
        self._index: Index | None = None

    def write(self) -> Index:
        """Store the pieces, once; nothing names them before a manifest does. On rank 0 the index of all; StoreError names the
        rank that failed.
        """
        if self._index is not None:
            return self._index
        reports = self._channel.gather(msgspec.msgpack.encode(self._stored()))
        self._pieces = []
        found = [msgspec.msgpack.decode(data, type=_Report) for data in reports]
        if failed := [f"rank {rank}: {report.error}" for rank, report in enumerate(found) if report.written is None]:
            raise StoreError("; ".join(failed))
        parts = [report.written for report in found if report.written is not None]
        self._index = joined_index(self._layout, parts) if parts else Index(0, (), {})
        return self._index

    def hash(self) -> str:
        """`trainer.state.state_hash` of the whole state, on rank 0; nothing is stored."""
        parts = self._channel.gather(msgspec.msgpack.encode(self._digests()))
        found = [msgspec.msgpack.decode(data, type=Digests) for data in parts]
        chunks = {
            name: {at: digest for part in found for at, digest in part.get(name, {}).items()} for name in self._layout
        }
        if self._channel.rank:
            return ""
        return state_hash(self._layout, {name: joined(kind, chunks[name], name) for name, kind in self._layout.items()})

    def _stored(self) -> _Report:
        assert self._store is not None, "a snapshot is written to the store that it was taken for"
        digests = self._digests()
        reach("checkpoint.before_state")
        try:
            rank = self._channel.rank
            return _Report(write_pieces(self._store, self._folder, rank, self._pieces, digests))
        except StoreError as error:
            return _Report(error=str(error))

    def _digests(self) -> Digests:
        channel = self._channel
        mine = [Extent(piece.name, piece.start, piece.stop) for piece in self._pieces]
        extents = [
            msgspec.msgpack.decode(data, type=list[Extent]) for data in channel.everywhere(msgspec.msgpack.encode(mine))
        ]
        cut = owners(tails(self._pieces), extents)
        given = [
            Piece(*fields)
            for data in channel.exchange(
                [msgspec.msgpack.encode([msgspec.structs.astuple(piece) for piece in part]) for part in cut]
            )
            for fields in msgspec.msgpack.decode(data, type=list[tuple[str, int, bytes]])
        ]
        return chunk_digests(self._pieces, self._layout, given)
