"""Copies of a learner's state and of its weights, each rank its own part, that later steps do not reach.

Guarantees: a checkpoint's index and a version's manifest are written only where every rank stored its part; the error names the
rank that did not. All calls block; a copy is stored in a thread beside the learner's.
"""

import threading
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from infra.observe.failpoint import reach
from infra.policies.manifest import TensorEntry
from infra.policies.policy import Probe
from infra.policies.publish import NewVersion, publish_shares
from infra.policies.share import EncodedShare, HashedTensors, Share, StoredShare, WantedObjects
from infra.store.store import Store
from schemas.errors import PolicyRefused, StoreError
from schemas.records import PolicyEvent
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


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """previous: number of the weights that these are encoded against, -1 for none. published: with "end"."""

    name: Literal["finite", "entries", "encode", "put", "end"]
    previous: int = -1
    wanted: WantedObjects | None = None
    published: bool = False


class _Answer(msgspec.Struct, frozen=True):
    """A rank's answer as msgpack, or the name and message of its error."""

    data: bytes = b""
    error: str = ""
    message: str = ""


class LastPublished(msgspec.Struct):
    """The version that was published last: the base of the next delta.

    number: of its weights, -1 before the first. tensors: this rank's own.
    """

    number: int = -1
    tensors: HashedTensors | None = None


class TakenWeights:
    """The weights that a rank took last, one after the other. channel: nothing else uses it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._newest: Weights | None = None
        self._serving: threading.Thread | None = None
        self._last = LastPublished()

    def take(self, tensors: HashedTensors, store: Store | None) -> "Weights":
        """The next weights, of which `tensors` are this rank's. Collective; rank 0 has released the ones before."""
        self.wait()
        number = 0 if self._newest is None else self._newest.number + 1
        self._newest = Weights(tensors, self._channel, number=number, last=self._last, store=store)
        if self._channel.rank:
            self._serving = threading.Thread(target=self._newest.serve, name="weights")
            self._serving.start()
        return self._newest

    def release(self) -> None:
        """Rank 0: end the other ranks' wait for requests to the newest weights."""
        if self._newest is not None:
            self._newest.release()

    def wait(self) -> None:
        """Other ranks: wait until rank 0 has released the newest weights."""
        if self._serving is not None:
            self._serving.join()


class Weights:
    """Weights of a policy. Rank 0 is called; on other ranks `serve` runs meanwhile, in a thread of its own.

    tensors: this rank's own. channel: nothing else uses it until these weights are released or published; by default of one
    process. number: of these weights, the same on all ranks. last: what this rank published last. store: of ranks other than 0.
    """

    def __init__(
        self,
        tensors: HashedTensors,
        channel: Channel | None = None,
        *,
        number: int = 0,
        last: LastPublished | None = None,
        store: Store | None = None,
    ) -> None:
        self.number = number
        self._channel = channel or Channel(alone=True)
        self._tensors = tensors
        self._last = last or LastPublished()
        self._store = store
        self._share: Share | None = None
        self._ended = False

    def not_finite(self) -> str:
        """Name of a tensor that holds NaN or infinity, "" for none."""
        return next((name for name in self._ask(_Request(name="finite"), str) if name), "")

    def entries(self) -> tuple[TensorEntry, ...]:
        """Their entries of the manifest, by name."""
        found = self._ask(_Request(name="entries"), tuple[TensorEntry, ...])
        return tuple(sorted((entry for part in found for entry in part), key=lambda entry: entry.name))

    def publish(self, store: Store, new: NewVersion, *, previous: "Weights | None", probe: Probe | None) -> PolicyEvent:
        """Publish a version; see `publish_shares`. previous: the parent, of the same learner, published last."""
        number = -1
        if previous is not None:
            number, self._last = previous.number, previous._last
        published = False
        self._store = store
        try:
            event = publish_shares(
                store,
                new,
                lambda: self._ask(_Request(name="encode", previous=number), EncodedShare),
                lambda wanted: self._ask(_Request(name="put", wanted=wanted), StoredShare),
                probe,
            )
            published = True
        finally:
            self._send_end(published=published)
        return event

    def release(self) -> None:
        """Ask no more of these weights but to be `previous`."""
        if not self._ended:
            self._send_end(published=False)

    def serve(self) -> None:
        """Answer rank 0's requests until it ends. Blocks."""
        while (request := msgspec.msgpack.decode(self._channel.broadcast(None), type=_Request)).name != "end":
            self._channel.gather(msgspec.msgpack.encode(self._answer(request)))
        self._end(published=request.published)

    def _ask(self, request: _Request, kind: type[Answered]) -> list[Answered]:
        """Ask all ranks, on rank 0. Raises the first error, naming its rank."""
        if self._channel.world == 1:
            found: Answered = self._found(request)  # type: ignore[assignment]
            return [found]
        self._channel.broadcast(msgspec.msgpack.encode(request))
        parts = self._channel.gather(msgspec.msgpack.encode(self._answer(request)))
        answers = [msgspec.msgpack.decode(data, type=_Answer) for data in parts]
        for rank, answer in enumerate(answers):
            if answer.error:
                raise ERRORS.get(answer.error, RuntimeError)(f"rank {rank}: {answer.message}")
        return [msgspec.msgpack.decode(answer.data, type=kind) for answer in answers]

    def _answer(self, request: _Request) -> _Answer:
        """Every failure of a rank becomes an answer: rank 0 waits for one, and ends."""
        try:
            return _Answer(msgspec.msgpack.encode(self._found(request)))
        except Exception as error:
            name = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), type(error).__name__)
            return _Answer(error=name, message=str(error))

    def _found(self, request: _Request) -> object:
        match request:
            case _Request(name="finite"):
                return self._tensors.not_finite
            case _Request(name="entries"):
                return self._tensors.entries
            case _Request(name="encode"):
                assert self._store is not None, "a rank that serves has a store"
                self._share = Share(self._store, self._tensors, self._base(request.previous))
                return self._share.encode()
        assert self._share is not None and request.wanted is not None, "they are encoded first"
        return self._share.put(request.wanted)

    def _base(self, number: int) -> HashedTensors | None:
        if number < 0:
            return None
        if number != self._last.number:
            raise ValueError(f"previous: got weights {number}, expected {self._last.number}, which were published last")
        return self._last.tensors

    def _send_end(self, *, published: bool) -> None:
        self._channel.broadcast(msgspec.msgpack.encode(_Request(name="end", published=published)))
        self._end(published=published)

    def _end(self, *, published: bool) -> None:
        self._ended = True
        self._share = None
        if published:
            self._tensors = self._tensors.base()  # all that the next delta needs
            self._last.number, self._last.tensors = self.number, self._tensors


def publishing_ranks(num_bytes: Iterable[int], ranks: int) -> list[int]:
    """The rank that publishes each tensor: as many tensors in a row as make up its share of the bytes."""
    sizes = list(num_bytes)
    total, before, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(ranks * (2 * before + size) // (2 * total) if size else 0)
        before += size
    return [min(rank, ranks - 1) for rank in found]
