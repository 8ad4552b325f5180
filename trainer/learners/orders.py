"""How rank 0 tells the other ranks what to do: named orders with a batch or tensors, as bytes, never pickled."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as distributed

from schemas.fields import Lane
from trainer.batch.batch import Microbatch, PackedBatch
from trainer.health.diagnostics import Observed
from trainer.learners.learner import Phase

Encoded = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


class WireBatch(msgspec.Struct, frozen=True):
    """A PackedBatch as bytes."""

    microbatches: tuple[dict[str, Encoded], ...]
    lane_tokens: dict[Lane, int]
    lane_sequences: dict[Lane, int]
    num_sequences: int
    version: int
    exact: bool


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One collective call. state: tensors as safetensors bytes.

    Example: Order(name="begin_phase", phase="train")
    """

    name: str
    batch: WireBatch | None = None
    learning_rate: float = 0.0
    seed: int = 0
    phase: Phase = "train"
    sequences: tuple[tuple[int, ...], ...] = ()
    state: bytes = b""


def encode_batch(batch: PackedBatch) -> WireBatch:
    """A batch as it travels."""
    return WireBatch(
        tuple(_encode_arrays(one) for one in batch.microbatches),
        dict(batch.lane_tokens),
        dict(batch.lane_sequences),
        batch.num_sequences,
        batch.version,
        batch.exact,
    )


def decode_batch(wire: WireBatch) -> PackedBatch:
    """The batch again."""
    return PackedBatch(
        microbatches=tuple(Microbatch(**_decode_arrays(one)) for one in wire.microbatches),
        lane_tokens=wire.lane_tokens,
        lane_sequences=wire.lane_sequences,
        num_sequences=wire.num_sequences,
        version=wire.version,
        exact=wire.exact,
    )


def broadcast(order: Order | None, device: torch.device) -> Order:
    """Rank 0 gives an order, the others (None) receive it. Collective."""
    data = msgspec.msgpack.encode(order) if order is not None else b""
    size = torch.tensor([len(data)], device=device)
    distributed.broadcast(size, 0)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    buffer = buffer.to(device)
    distributed.broadcast(buffer, 0)
    return order or msgspec.msgpack.decode(buffer.cpu().numpy().tobytes(), type=Order)


def gather_observed(observed: list[Observed], device: torch.device) -> list[Observed]:
    """What every rank observed, in the order of ranks, on every rank. Collective."""
    return [
        Observed(**_decode_arrays(one))
        for data in _gather(msgspec.msgpack.encode([_encode_arrays(one) for one in observed]), device)
        for one in msgspec.msgpack.decode(data, type=list[dict[str, Encoded]])
    ]


def gather_arrays(
    microbatches: Sequence[Microbatch], logprobs: Sequence[np.ndarray], device: torch.device
) -> tuple[list[Microbatch], list[np.ndarray]]:
    """The microbatches of every rank with an array for each, in the order of ranks, on every rank. Collective."""
    mine = [_encode_arrays(one) | {"": _encoded(array)} for one, array in zip(microbatches, logprobs, strict=True)]
    every: list[Microbatch] = []
    arrays: list[np.ndarray] = []
    for data in _gather(msgspec.msgpack.encode(mine), device):
        for one in msgspec.msgpack.decode(data, type=list[dict[str, Encoded]]):
            found = _decode_arrays(one)
            arrays.append(found.pop(""))
            every.append(Microbatch(**found))
    return every, arrays


def _gather(data: bytes, device: torch.device) -> list[bytes]:
    """Bytes of every rank. Collective."""
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(sizes, torch.tensor([len(data)], device=device))
    longest = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\x00")), dtype=torch.uint8).to(device)
    buffers = [torch.empty_like(mine) for _ in sizes]
    distributed.all_gather(buffers, mine)
    return [buffer[: int(size)].cpu().numpy().tobytes() for size, buffer in zip(sizes, buffers, strict=True)]


def _encode_arrays(one: msgspec.Struct) -> dict[str, Encoded]:
    arrays: dict[str, Any] = msgspec.structs.asdict(one)
    return {name: _encoded(array) for name, array in arrays.items()}


def _encoded(array: np.ndarray) -> Encoded:
    return array.dtype.str, array.shape, array.tobytes()


def _decode_arrays(encoded: dict[str, Encoded]) -> dict[str, Any]:
    return {
        name: np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        for name, (dtype, shape, data) in encoded.items()
    }
