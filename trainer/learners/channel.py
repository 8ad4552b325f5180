"""Bytes between the ranks of a learner, over gloo and never pickled; with one process every call returns its own bytes."""

from collections.abc import Iterable
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as distributed

Encoded = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


class Channel:
    """Collective calls between ranks, in one order on all of them; one thread at a time. alone: there are no other ranks."""

    def __init__(self, timeout_s: float = 0.0, *, alone: bool = False) -> None:
        self.rank: int = 0 if alone else distributed.get_rank()
        self.world: int = 1 if alone else distributed.get_world_size()
        self.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._group = None if self.world == 1 else distributed.new_group(backend="gloo", timeout=timeout)

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; the others give None."""
        if self.world == 1:
            assert data is not None, "rank 0 has the data to send"
            return data
        size = torch.tensor([len(data or b"")])
        distributed.broadcast(size, 0, group=self._group)
        buffer = _tensor(data) if data is not None else torch.empty(int(size), dtype=torch.uint8)
        distributed.broadcast(buffer, 0, group=self._group)
        return data if data is not None else _bytes(buffer)

    def scatter(self, parts: Iterable[bytes] | None) -> bytes:
        """To each rank its own of rank 0's parts, one after the other."""
        if self.rank:
            return self._received(0)
        mine = b""
        for rank, part in enumerate(parts or ()):
            if rank:
                self._send(part, rank)
            else:
                mine = part
        return mine

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in the order of ranks, on rank 0; nothing on the others."""
        if self.rank:
            self._send(data, 0)
            return []
        return [data, *(self._received(rank) for rank in range(1, self.world))]

    def everywhere(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""
        found = self.gather(data)
        sent = self.broadcast(None if self.rank else msgspec.msgpack.encode(found))
        return msgspec.msgpack.decode(sent, type=list[bytes])

    def sum(self, value: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, on its own device."""
        if self.world > 1:
            distributed.all_reduce(value)

    def answer(self) -> None:
        """Wait for all ranks. RuntimeError on rank 0 names the ranks that did not answer in time."""
        limit = timedelta(seconds=self.timeout_s)
        distributed.monitored_barrier(self._group, timeout=limit, wait_all_ranks=True)

    def _send(self, data: bytes, rank: int) -> None:
        distributed.send(torch.tensor([len(data)]), rank, group=self._group)
        distributed.send(_tensor(data), rank, group=self._group)

    def _received(self, rank: int) -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        distributed.recv(size, rank, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        distributed.recv(buffer, rank, group=self._group)
        return _bytes(buffer)


def encode_array(array: np.ndarray) -> Encoded:
    return array.dtype.str, array.shape, array.tobytes()


def decode_array(encoded: Encoded) -> np.ndarray:
    """The array again; writable."""
    dtype, shape, data = encoded
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(buffer: torch.Tensor) -> bytes:
    return buffer.numpy().tobytes()
