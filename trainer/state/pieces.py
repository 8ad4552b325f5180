"""A learner's state in pieces: flat byte ranges of named tensors, and one hash that does not depend on who holds which.

Every tensor's bytes, row-major and little-endian, are cut into chunks of CHUNK_BYTES from its first byte on. The hash of a
state is made of the hashes of its chunks. A rank hashes the chunks that begin in its own pieces; of a chunk that another
rank's piece goes on with, that rank hands over the rest (`tails`), so that no rank needs a whole tensor.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from infra.policies.tensors import ITEM_BYTES, Tensor

CHUNK_BYTES = 256 * 1024
DIGEST_BYTES = 32
KIND = "chunks "  # before the hash of a state: one without it is of whole tensors, as earlier releases wrote it


class Kind(msgspec.Struct, frozen=True):
    """What a tensor is, whole.

    dtype: a safetensors name. shape: of the whole tensor.

    Example: Kind("F32", (2, 3))
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Layout = Mapping[str, Kind]


class Piece(msgspec.Struct, frozen=True):
    """Bytes of one tensor.

    name: of the tensor. start: first byte, row-major. data: the bytes from there on.

    Example: Piece("model/lm_head.weight", 4096, data)
    """

    name: str
    start: int
    data: bytes | memoryview

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.start + len(self.data)


class Extent(msgspec.Struct, frozen=True):
    """Which bytes of a tensor a rank holds.

    name: of the tensor. start: first byte. stop: the byte after the last.

    Example: Extent("model/lm_head.weight", 4096, 8192)
    """

    name: str
    start: int
    stop: int


Digests = dict[str, dict[int, bytes]]  # of each tensor: number of a chunk → its hash


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Names, dtypes and shapes of whole tensors."""
    return {name: Kind(one.dtype, one.shape) for name, one in tensors.items()}


def check_same(got: Layout, expected: Layout) -> None:
    """ValueError naming a tensor of a state that the model does not have, that is missing, or of another shape."""
    if odd := sorted(set(got) ^ set(expected)):
        what = "the model has none" if odd[0] in got else "it is missing"
        raise ValueError(f"state: {odd[0]}: {what} ({len(odd)} names differ)")
    for name, kind in expected.items():
        if got[name].shape != kind.shape:
            raise ValueError(f"state: {name}: got shape {got[name].shape}, expected {kind.shape}")


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Each whole tensor as one piece; nothing is copied."""
    return [Piece(name, 0, tensors[name].data) for name in sorted(tensors)]


def tails(pieces: Iterable[Piece]) -> list[Piece]:
    """What of these pieces belongs to chunks that begin in other pieces: at most one beginning of each."""
    found = []
    for one in pieces:
        if over := -one.start % CHUNK_BYTES:
            found.append(Piece(one.name, one.start, memoryview(one.data)[:over]))
    return found


def owners(cut: Iterable[Piece], extents: Sequence[Sequence[Extent]]) -> list[list[Piece]]:
    """For each rank, those of the tails whose chunk begins in what it holds. extents: of each rank."""
    begins: dict[str, list[tuple[int, int, int]]] = {}
    for rank, held in enumerate(extents):
        for one in held:
            begins.setdefault(one.name, []).append((one.start, one.stop, rank))
    found: list[list[Piece]] = [[] for _ in extents]
    for tail in cut:
        first = tail.start // CHUNK_BYTES * CHUNK_BYTES
        found[next(rank for start, stop, rank in begins[tail.name] if start <= first < stop)].append(tail)
    return found


def chunk_digests(pieces: Iterable[Piece], layout: Layout, given: Iterable[Piece] = ()) -> Digests:
    """Hashes of the chunks that begin in these pieces. given: tails of others' pieces. ValueError where one is missing."""
    rest = {(one.name, one.start): one.data for one in given}
    found: Digests = {}
    for one in pieces:
        view, of_name = memoryview(one.data), found.setdefault(one.name, {})
        total = layout[one.name].num_bytes
        for chunk in range(-(-one.start // CHUNK_BYTES), -(-one.stop // CHUNK_BYTES)):
            begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, total)
            at = min(end, one.stop)
            digest = hashlib.blake2b(view[begin - one.start : at - one.start], digest_size=DIGEST_BYTES)
            while at < end:
                if (more := rest.get((one.name, at))) is None:
                    raise ValueError(f"state: {one.name}: nothing holds its bytes from {at} on")
                digest.update(more)
                at += len(more)
            of_name[chunk] = digest.digest()
    return found


def num_chunks(kind: Kind) -> int:
    """Into how many chunks a tensor is cut."""
    return -(-kind.num_bytes // CHUNK_BYTES)


def state_hash(layout: Layout, digests: Mapping[str, bytes]) -> str:
    """Hash of a whole state, as the journal holds it. digests: of all chunks of each tensor, in order, one after the other."""
    whole = hashlib.sha256()
    for name in sorted(layout):
        kind = layout[name]
        whole.update(msgspec.msgpack.encode((name, kind.dtype, kind.shape, CHUNK_BYTES)))
        whole.update(digests[name])
    return KIND + whole.hexdigest()


def whole_hash(tensors: Mapping[str, Tensor]) -> str:
    """`state_hash` of a state that is here whole: equal exactly where names, dtypes, shapes and bytes are."""
    layout = layout_of(tensors)
    found = chunk_digests(pieces_of(tensors), layout)
    return state_hash(layout, {name: joined(layout[name], found.get(name, {}), name) for name in layout})


def joined(kind: Kind, chunks: Mapping[int, bytes], name: str) -> bytes:
    """The hashes of all chunks in order. ValueError naming the first chunk that has none."""
    for chunk in range(num_chunks(kind)):
        if chunk not in chunks:
            raise ValueError(f"state: {name}: chunk {chunk} of {num_chunks(kind)} is held by no rank")
    return b"".join(chunks[chunk] for chunk in range(num_chunks(kind)))
