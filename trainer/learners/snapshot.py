"""A copy of a learner's state, each rank its own part, that later steps do not reach.

Guarantee: a checkpoint's index is made only where every rank stored its part; the error names the rank that did not.
"""

import msgspec

from infra.observe.failpoint import reach
from infra.store.store import Store
from schemas.errors import StoreError
from trainer.learners.channel import Channel
from trainer.state import Index, Layout, Piece, Written, joined_index, write_pieces


class _Report(msgspec.Struct, frozen=True):
    written: Written | None = None
    error: str = ""


class Snapshot:
    """A rank's part of a learner's state. Every rank calls `write`, in a thread of its own.

    channel: nothing else uses it meanwhile. layout: of the whole state. pieces: in this rank's memory.
    """

    def __init__(self, channel: Channel, store: Store, folder: str, layout: Layout, pieces: list[Piece]) -> None:
        self._channel = channel
        self._store = store
        self._folder = folder
        self._layout = layout
        self._pieces = pieces
        self._index: Index | None = None

    def write(self) -> Index:
        """Store the pieces, once; nothing names them before a manifest does. On rank 0 the index of all. StoreError names the
        rank that failed. Blocks.
        """
        if self._index is not None:
            return self._index
        reports = self._channel.gather(msgspec.msgpack.encode(self._stored()))
        self._pieces = []
        found = [msgspec.msgpack.decode(data, type=_Report) for data in reports]
        if failed := [f"rank {rank}: {report.error}" for rank, report in enumerate(found) if report.written is None]:
            raise StoreError("; ".join(failed))
        parts = [report.written for report in found if report.written is not None]
        self._index = joined_index(self._layout, parts) if parts else Index((), {})
        return self._index

    def _stored(self) -> _Report:
        reach("checkpoint.before_state")
        try:
            return _Report(write_pieces(self._store, self._folder, self._channel.rank, self._pieces))
        except Exception as error:
            if not self._channel.rank and not isinstance(error, StoreError):
                raise  # rank 0 waits for a report of each other rank alone
            return _Report(error=f"{type(error).__name__}: {error}")
