"""A rank's part of a snapshot, written to the store beside the next steps; rank 0 makes one index of what all wrote."""

import msgspec

from infra.observe.failpoint import reach
from infra.store.store import Store
from schemas.errors import StoreError
from trainer.learners.orders import Channel
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


class _Report(msgspec.Struct, frozen=True):
    """What a rank did. error: why it could not."""

    written: Written | None = None
    error: str = ""


class RankSnapshot:
    """See `trainer.learners.learner.Snapshot`. `write` is collective: every rank calls it, in a thread of its own.

    channel: one that nothing else uses meanwhile. layout: of the whole state. pieces: in this rank's memory.
    """

    def __init__(self, channel: Channel, store: Store | None, folder: str, layout: Layout, pieces: list[Piece]) -> None:
        self._channel = channel
        self._store = store
        self._folder = folder
        self._layout = layout
        self._pieces = pieces

    def write(self) -> Index:
        """Store the pieces. On rank 0 the index of all; StoreError names the rank that could not."""
        reports = self._channel.gather(msgspec.msgpack.encode(self._stored()))
        self._pieces = []
        found = [msgspec.msgpack.decode(data, type=_Report) for data in reports]
        if failed := [f"rank {rank}: {one.error}" for rank, one in enumerate(found) if one.written is None]:
            raise StoreError("; ".join(failed))
        parts = [one.written for one in found if one.written is not None]
        return joined_index(self._layout, parts) if parts else Index(0, (), {})

    def hash(self) -> str:
        """`trainer.state.state_hash` of the whole state, on rank 0; nothing is stored. Collective."""
        parts = self._channel.gather(msgspec.msgpack.encode(self._digests()))
        found = [msgspec.msgpack.decode(data, type=Digests) for data in parts]
        chunks = {name: {at: one for part in found for at, one in part.get(name, {}).items()} for name in self._layout}
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
        mine = [Extent(one.name, one.start, one.stop) for one in self._pieces]
        extents = [
            msgspec.msgpack.decode(data, type=list[Extent]) for data in channel.everywhere(msgspec.msgpack.encode(mine))
        ]
        cut = owners(tails(self._pieces), extents)
        given = [
            Piece(*fields)
            for data in channel.exchange(
                [msgspec.msgpack.encode([msgspec.structs.astuple(one) for one in part]) for part in cut]
            )
            for fields in msgspec.msgpack.decode(data, type=list[tuple[str, int, bytes]])
        ]
        return chunk_digests(self._pieces, self._layout, given)
