"""Weights of a version over ranks: each hashes, encodes and stores its own, and rank 0 writes the manifest of all.

Guarantee: nothing names a version of which a rank could not store its part; the error says which rank.
"""

import threading
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

from infra.policies.manifest import TensorEntry
from infra.policies.policy import Probe
from infra.policies.publish import NewVersion, publish_shares
from infra.policies.share import EncodedShare, Share, StoredShare, VersionTensors, WantedObjects
from infra.store.store import Store
from schemas.errors import PolicyRefused, StoreError
from schemas.records import PolicyEvent
from trainer.learners.learner import Weights
from trainer.learners.orders import Channel

Answered = TypeVar("Answered")
ERRORS: dict[str, type[Exception]] = {one.__name__: one for one in (StoreError, PolicyRefused, ValueError)}


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 asks of all. previous: number of the weights that these are encoded against, -1 for none. wanted: see
    Share. published: with "end".
    """

    name: Literal["finite", "entries", "encode", "put", "end"]
    previous: int = -1
    wanted: WantedObjects | None = None
    published: bool = False


class _Answer(msgspec.Struct, frozen=True):
    """Of one rank: as msgpack, or the name of the error it met, and its words."""

    data: bytes = b""
    error: str = ""
    words: str = ""


class LastPublished(msgspec.Struct):
    """What a rank keeps of the version that was published last: the base of the next delta.

    number: of its weights, -1 before the first. tensors: this rank's own.
    """

    number: int = -1
    tensors: VersionTensors | None = None


class TakenWeights:
    """The weights that a rank took last, one after the other. channel: nothing else uses it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._newest: RankWeights | None = None
        self._serving: threading.Thread | None = None
        self._last = LastPublished()

    def take(self, tensors: VersionTensors, store: Store | None) -> "RankWeights":
        """The next ones, of which `tensors` are this rank's. All ranks together; rank 0 has let go of the ones before."""
        self.wait()
        number = 0 if self._newest is None else self._newest.number + 1
        self._newest = RankWeights(self._channel, number, tensors, self._last, store)
        if self._channel.rank:
            self._serving = threading.Thread(target=self._newest.serve, name="weights")
            self._serving.start()
        return self._newest

    def let_go(self) -> None:
        """Rank 0: nothing more is asked of the newest."""
        if self._newest is not None:
            self._newest.let_go()

    def wait(self) -> None:
        """Other ranks: until rank 0 has let go of the newest."""
        if self._serving is not None:
            self._serving.join()


class RankWeights:
    """See `trainer.learners.learner.Weights`. Rank 0 is called; on the others `serve` runs meanwhile, in a thread of its own.

    channel: one that nothing else uses until these weights are let go or published. number: of these weights, on all ranks the
    same. tensors: this rank's own. store: of ranks other than 0, where they put them.
    """

    def __init__(
        self, channel: Channel, number: int, tensors: VersionTensors, last: LastPublished, store: Store | None
    ) -> None:
        self.number = number
        self._channel = channel
        self._tensors = tensors
        self._last = last
        self._store = store
        self._share: Share | None = None
        self._ended = False

    def not_finite(self) -> str:
        """See Weights."""
        return next((one for one in self.ask(_Request(name="finite"), str) if one), "")

    def entries(self) -> tuple[TensorEntry, ...]:
        """See Weights."""
        found = self.ask(_Request(name="entries"), tuple[TensorEntry, ...])
        return tuple(sorted((one for part in found for one in part), key=lambda one: one.name))

    def publish(self, store: Store, new: NewVersion, *, previous: Weights | None, probe: Probe | None) -> PolicyEvent:
        """See Weights."""
        number = previous.number if isinstance(previous, RankWeights) else -1
        published = False
        self._store = store
        try:
            event = publish_shares(
                store,
                new,
                lambda: self.ask(_Request(name="encode", previous=number), EncodedShare),
                lambda wanted: self.ask(_Request(name="put", wanted=wanted), StoredShare),
                probe,
            )
            published = True
        finally:
            self._send_end(published=published)
        return event

    def let_go(self) -> None:
        """See Weights."""
        if not self._ended:
            self._send_end(published=False)

    def serve(self) -> None:
        """Do what rank 0 asks for until it ends. Blocks."""
        while (request := msgspec.msgpack.decode(self._channel.broadcast(None), type=_Request)).name != "end":
            self._channel.gather(msgspec.msgpack.encode(self._answer(request)))
        self._end(published=request.published)

    def ask(self, request: _Request, kind: type[Answered]) -> list[Answered]:
        """What all ranks answer, on rank 0. Raises the first error, naming its rank."""
        self._channel.broadcast(msgspec.msgpack.encode(request))
        parts = self._channel.gather(msgspec.msgpack.encode(self._answer(request)))
        answers = [msgspec.msgpack.decode(one, type=_Answer) for one in parts]
        for rank, one in enumerate(answers):
            if one.error:
                raise ERRORS.get(one.error, RuntimeError)(f"rank {rank}: {one.words}")
        return [msgspec.msgpack.decode(one.data, type=kind) for one in answers]

    def _answer(self, request: _Request) -> _Answer:
        """Every failure of a rank becomes an answer: rank 0 waits for one, and ends."""
        try:
            return _Answer(msgspec.msgpack.encode(self._found(request)))
        except Exception as error:
            name = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), type(error).__name__)
            return _Answer(error=name, words=str(error))

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

    def _base(self, number: int) -> VersionTensors | None:
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


def owners(num_bytes: Iterable[int], ranks: int) -> list[int]:
    """Which rank publishes each of some tensors: as many in a row as make up its share of the bytes."""
    sizes = list(num_bytes)
    total, before, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(ranks * (2 * before + size) // (2 * total) if size else 0)
        before += size
    return [min(one, ranks - 1) for one in found]
