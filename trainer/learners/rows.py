"""Each rank's rows of a batch: dealt on rank 0, sent to their rank alone.

Ranks with fewer microbatches than another compute one that counts for nothing (the smallest of the batch), since every
forward and backward is collective.
"""

from collections.abc import Sequence

import msgspec

from trainer.batch.batch import Microbatch, PackedBatch
from trainer.batch.split import for_ranks
from trainer.learners.orders import Channel, Encoded, decode_arrays, encode_arrays


class Rows(msgspec.Struct, frozen=True):
    """What one rank computes of a batch.

    mine: its microbatches. most: how many the rank with most has. filler: computed in the turns that this rank has no
    microbatch for; None where this rank has most.
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
    """The rows of a batch for each rank, or for each group of ranks that compute the same."""
    dealt = for_ranks(batch, num_ranks)
    most = max(len(one) for one in dealt)
    smallest = min((one for of_rank in dealt for one in of_rank), key=lambda one: one.tokens_BT.size)
    return [Rows(mine, most, smallest if len(mine) < most else None) for mine in dealt]


def send_rows(channel: Channel, dealt: Sequence[Rows]) -> Rows:
    """Rank 0: to every other rank its rows; returns its own. dealt: of every rank, or of every group of consecutive ranks."""
    size = channel.world // len(dealt)
    channel.scatter(_encode(dealt[rank // size]) if rank else b"" for rank in range(channel.world))
    return dealt[0]


def receive_rows(channel: Channel) -> Rows:
    """The other ranks."""
    wire = msgspec.msgpack.decode(channel.scatter(None), type=_Wire)
    filler = None if wire.filler is None else Microbatch(**decode_arrays(wire.filler))
    return Rows(tuple(Microbatch(**decode_arrays(one)) for one in wire.mine), wire.most, filler)


def _encode(rows: Rows) -> bytes:
    filler = None if rows.filler is None else encode_arrays(rows.filler)
    return msgspec.msgpack.encode(_Wire(tuple(encode_arrays(one) for one in rows.mine), rows.most, filler))
