"""Messages between the ranks of a learner besides gradients: orders, rows, observations.

Guarantees: a rank gets only the rows and pieces that it needs. Idle ranks hear a heartbeat, so silence is no
reason to end, however long it lasts; the log names a rank that does not answer one, and the process ends, so that the launcher
of the ranks starts all of them again.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from infra.roles.process import exit_stuck
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.batch.split import for_ranks
from trainer.health import Observed
from trainer.learners.channel import Channel, Encoded, decode_array, encode_array
from trainer.learners.learner import Phase

logger = logging.getLogger(__name__)

BEATS = 4  # in the time after which a silent rank is given up


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One collective call.

    name: of the call. counts: the batch of a step without its rows. num_parts: minibatches of a step. learning_rate: of the
    step. max_grad_norm: a larger norm refuses the step. seed: of the step. phase: that begins. sequences: token ids to compute
    logprobs of. folder, index, sha256: of a state in the store. names, dtypes: of the tensors to load, or of the tensors that
    follow.
    """

    name: str
    counts: PackedBatch | None = None
    num_parts: int = 1
    learning_rate: float = 0.0
    max_grad_norm: float = 0.0
    seed: int = 0
    phase: Phase = "train"
    sequences: tuple[tuple[int, ...], ...] = ()
    folder: str = ""
    index: str = ""
    sha256: str = ""
    names: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


class Orders:
    """Sends orders from rank 0 to the other ranks, one at a time, and heartbeats while there is no order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._closed = threading.Event()
        self.lock = threading.Lock()
        if channel.world > 1 and not channel.rank:
            threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True).start()

    def give(self, order: Order) -> None:
        """Rank 0, holding the lock: the others do this next."""
        self._channel.broadcast(msgspec.msgpack.encode(order))

    def next(self) -> Order:
        """On the other ranks: wait for the next order and return it. Answers heartbeats."""
        while True:
            order = msgspec.msgpack.decode(self._channel.broadcast(None), type=Order)
            if order.name != "heartbeat":
                return order
            self._channel.answer()

    def close(self) -> None:
        self._closed.set()

    def _keep_alive(self) -> None:
        while not self._closed.wait(self._channel.timeout_s / BEATS):
            if not self.lock.acquire(blocking=False):
                continue  # an order is being done
            try:
                if not self._closed.is_set():
                    self.give(Order(name="heartbeat"))
                    self._channel.answer()
            except RuntimeError as error:
                logger.error("ranks do not answer: %s", error)
                exit_stuck("the answer of all ranks to a heartbeat", self._channel.timeout_s)
            finally:
                self.lock.release()


def gather_observed(channel: Channel, observed: Sequence[Observed]) -> list[Observed]:
    """The observations of all ranks in their order, on rank 0; [] on the others."""
    if channel.world == 1:
        return list(observed)
    data = msgspec.msgpack.encode([encode_arrays(seen) for seen in observed])
    return [
        Observed(**decode_arrays(arrays))
        for data in channel.gather(data)
        for arrays in msgspec.msgpack.decode(data, type=list[dict[str, Encoded]])
    ]


def without_rows(batch: PackedBatch) -> PackedBatch:
    return msgspec.structs.replace(batch, microbatches=())


def encode_arrays(struct: Microbatch | Observed) -> dict[str, Encoded]:
    arrays: dict[str, Any] = msgspec.structs.asdict(struct)
    return {name: encode_array(array) for name, array in arrays.items()}


def decode_arrays(encoded: dict[str, Encoded]) -> dict[str, Any]:
    return {name: decode_array(array) for name, array in encoded.items()}


class Rows(msgspec.Struct, frozen=True):
    """A rank's share of a batch.

    mine: its microbatches. most: largest number of a rank. filler: computed without effect while only other ranks have
    microbatches; None for a rank with `most`.
    """

    mine: tuple[Microbatch, ...]
    most: int
    filler: Microbatch | None

    def at(self, index: int) -> tuple[Microbatch, bool]:
        """The microbatch of this turn, and whether it counts."""
        if index < len(self.mine):
            return self.mine[index], True
        assert self.filler is not None
        return self.filler, False


class _Wire(msgspec.Struct, frozen=True):
    mine: tuple[dict[str, Encoded], ...]
    most: int
    filler: dict[str, Encoded] | None


def deal(batch: PackedBatch, num_ranks: int) -> list[Rows]:
    dealt = for_ranks(batch, num_ranks)
    most = max(len(mine) for mine in dealt)
    smallest = min((rows for of_rank in dealt for rows in of_rank), key=lambda rows: rows.tokens_BT.size)
    return [Rows(mine, most, smallest if len(mine) < most else None) for mine in dealt]


def send_rows(channel: Channel, dealt: Sequence[Rows]) -> Rows:
    """Rank 0: to every other rank its rows; returns its own. dealt: of every rank."""
    channel.scatter(_encode(dealt[rank]) if rank else b"" for rank in range(channel.world))
    return dealt[0]


def receive_rows(channel: Channel) -> Rows:
    wire = msgspec.msgpack.decode(channel.scatter(None), type=_Wire)
    filler = None if wire.filler is None else Microbatch(**decode_arrays(wire.filler))
    return Rows(tuple(Microbatch(**decode_arrays(rows)) for rows in wire.mine), wire.most, filler)


def _encode(rows: Rows) -> bytes:
    filler = None if rows.filler is None else encode_arrays(rows.filler)
    return msgspec.msgpack.encode(_Wire(tuple(encode_arrays(each) for each in rows.mine), rows.most, filler))
