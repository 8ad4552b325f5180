"""A learner's state: named tensors in pieces, each in the memory of one rank; their stored objects, and one hash of all.

    <folder>/state-00001-00000.bin     pieces of rank 1, one after the other, at most OBJECT_BYTES
    <folder>/index.msgpack             written once all ranks are done; a checkpoint's manifest names it and its hash

A piece is a byte range of one tensor, row-major and little-endian, cut into chunks of CHUNK_BYTES. The hash of a state
is made of the hashes of its chunks: so ranks that cut the same tensors elsewhere give another hash.

Guarantees: any byte range of any tensor can be read alone, by any number of ranks; nothing that is read is used before the
hashes of its chunks agree; an error names the missing or damaged object and the rank that wrote it. The hash covers the adapter
that the state is of.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from infra.policies.policy import Adapter, described
from infra.policies.tensors import ITEM_BYTES, Tensor
from infra.store.store import Store
from schemas.errors import NotInStore

CHUNK_BYTES = 256 * 1024
DIGEST_BYTES = 32


class Kind(msgspec.Struct, frozen=True):
    """Type and shape of a whole tensor.

    dtype: a safetensors name. shape: of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Layout = Mapping[str, Kind]


class Piece(msgspec.Struct, frozen=True):
    """Bytes of one tensor.

    name: of the tensor. start: first byte, row-major. data: the bytes from there on.
    """

    name: str
    start: int
    data: bytes | memoryview


def find_layout(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    return {name: Kind(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def check_same(got: Layout, expected: Layout) -> None:
    """ValueError naming a tensor of a state that the model does not have, that is missing, or of another shape."""
    if odd := sorted(set(got) ^ set(expected)):
        what = "the model has none" if odd[0] in got else "it is missing"
        raise ValueError(f"state: {odd[0]}: {what} ({len(odd)} names differ)")
    for name, kind in expected.items():
        if got[name].shape != kind.shape:
            raise ValueError(f"state: {name}: got shape {got[name].shape}, expected {kind.shape}")


def whole_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Each whole tensor as one piece; nothing is copied."""
    return [Piece(name, 0, tensors[name].data) for name in sorted(tensors)]


def chunk_digests(data: bytes | memoryview) -> bytes:
    """Hashes of the chunks of a piece, one after the other, DIGEST_BYTES each."""
    view = memoryview(data)
    chunks = (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))
    return b"".join(hashlib.blake2b(chunk, digest_size=DIGEST_BYTES).digest() for chunk in chunks)


def state_hash(layout: Layout, digests: Mapping[str, bytes]) -> str:
    """Hash of a whole state, as the journal holds it. digests: of all chunks of each tensor, in order."""
    whole = hashlib.sha256()
    for name in sorted(layout):
        kind = layout[name]
        whole.update(msgspec.msgpack.encode((name, kind.dtype, kind.shape, CHUNK_BYTES)))
        whole.update(digests[name])
    return whole.hexdigest()


def whole_hash(tensors: Mapping[str, Tensor]) -> str:
    """`state_hash` of tensors in memory, each one piece: equal exactly where names, dtypes, shapes and bytes are."""
    return state_hash(find_layout(tensors), {name: chunk_digests(tensor.data) for name, tensor in tensors.items()})


OBJECT_BYTES = 64 * 1024 * 1024
READ_BYTES = 64 * 1024 * 1024


class StoredPiece(msgspec.Struct, frozen=True):
    """Location of some bytes of a tensor.

    start: first byte of the tensor. stop: the byte after the last. object: number of the object in the index. offset: first
    byte in the object. digests: of its chunks, see `chunk_digests`.
    """

    start: int
    stop: int
    object: int
    offset: int
    digests: bytes


class StoredObject(msgspec.Struct, frozen=True):
    """One object of a stored state.

    name: below the folder. size: in bytes. rank: that wrote it.
    """

    name: str
    size: int
    rank: int


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a stored state. dtype: a safetensors name. shape: of the whole tensor. pieces: in order, without gaps."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


class Index(msgspec.Struct, frozen=True):
    """Everything of a stored state but its bytes. objects: by number. tensors: by name."""

    objects: tuple[StoredObject, ...]
    tensors: dict[str, StoredTensor]


class Written(msgspec.Struct, frozen=True):
    """Objects that one rank stored. objects: its own, in order. pieces: by tensor, with numbers of these objects."""

    objects: tuple[StoredObject, ...]
    pieces: dict[str, tuple[StoredPiece, ...]]


def write_pieces(
    store: Store, folder: str, rank: int, pieces: Sequence[Piece], *, object_bytes: int = OBJECT_BYTES
) -> Written:
    """Store the pieces of one rank. Blocking. object_bytes: a multiple of CHUNK_BYTES."""
    objects: list[StoredObject] = []
    found: dict[str, list[StoredPiece]] = {}
    body: list[memoryview] = []
    size = 0

    def put() -> None:
        name = f"state-{rank:05d}-{len(objects):05d}.bin"
        store.put(f"{folder}/{name}", b"".join(body))
        objects.append(StoredObject(name, size, rank))

    for piece in pieces:
        for at in range(0, len(piece.data), object_bytes):
            part = memoryview(piece.data)[at : at + object_bytes]
            if size + len(part) > object_bytes:
                put()
                body, size = [], 0
            start = piece.start + at
            stored = StoredPiece(start, start + len(part), len(objects), size, chunk_digests(part))
            found.setdefault(piece.name, []).append(stored)
            body.append(part)
            size += len(part)
    if body:
        put()
    return Written(tuple(objects), {name: tuple(parts) for name, parts in found.items()})


def joined_index(layout: Layout, parts: Iterable[Written]) -> Index:
    """The index of a state from the pieces of all ranks. Raises ValueError naming an incomplete tensor."""
    objects: list[StoredObject] = []
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in layout}
    for part in parts:
        first = len(objects)
        objects += part.objects
        for name, stored in part.pieces.items():
            pieces[name] += [msgspec.structs.replace(piece, object=first + piece.object) for piece in stored]
    tensors = {}
    for name, kind in layout.items():
        ordered = tuple(sorted(pieces[name], key=lambda piece: piece.start))
        _check_whole(name, kind, ordered)
        tensors[name] = StoredTensor(kind.dtype, kind.shape, ordered)
    return Index(tuple(objects), tensors)


def write_whole(store: Store, folder: str, tensors: Mapping[str, Tensor]) -> Index:
    """Store a state that one process holds whole. Blocking."""
    return joined_index(find_layout(tensors), [write_pieces(store, folder, 0, whole_pieces(tensors))])


def index_hash(index: Index) -> str:
    """`state_hash` of a stored state."""
    return state_hash(
        {name: Kind(tensor.dtype, tensor.shape) for name, tensor in index.tensors.items()},
        {name: b"".join(piece.digests for piece in tensor.pieces) for name, tensor in index.tensors.items()},
    )


class StoredState(Mapping[str, Tensor]):
    """A state in the store: its layout here, its bytes read when they are asked for, and then verified.

    key, sha256: of the index, for others to open it by.
    """

    def __init__(self, store: Store, folder: str, index: Index, key: str, sha256: str) -> None:
        self._store = store
        self.folder = folder
        self.index = index
        self.key = key
        self.sha256 = sha256
        self.layout = {name: Kind(tensor.dtype, tensor.shape) for name, tensor in index.tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        kind = self.layout[name]
        return Tensor(kind.dtype, kind.shape, self.read(name, 0, kind.num_bytes))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes of a tensor. Raises StoreError, ValueError naming the object that is missing or damaged."""
        found = memoryview(bytearray(stop - start))
        for piece in self.index.tensors[name].pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first >= last:
                continue
            chunks = range((first - piece.start) // CHUNK_BYTES, -(-(last - piece.start) // CHUNK_BYTES))
            begin = piece.start + chunks.start * CHUNK_BYTES
            data = self._bytes(piece, begin, min(piece.start + chunks.stop * CHUNK_BYTES, piece.stop), name)
            if chunk_digests(data) != piece.digests[chunks.start * DIGEST_BYTES : chunks.stop * DIGEST_BYTES]:
                raise ValueError(
                    f"{self._place(piece)}: its bytes of {name} from {begin} on are not those that were written"
                )
            found[first - start : last - start] = data[first - begin : last - begin]
        return found

    def verified(self) -> "StoredState":
        """Itself, once `verify` found nothing wrong."""
        self.verify()
        return self

    def copy_to(self, folder: str) -> Index:
        """The same objects in another folder, one after the other; their index."""
        for stored in self.index.objects:
            self._store.put(f"{folder}/{stored.name}", self._store.get(f"{self.folder}/{stored.name}"))
        return self.index

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read one of `parts` shares of all bytes and compare the hashes; nothing is kept. Raises as `read` does."""
        pieces = [(name, piece) for name, tensor in self.index.tensors.items() for piece in tensor.pieces]
        for name, piece in pieces[part::parts]:
            self.read(name, piece.start, piece.stop)

    def _bytes(self, piece: StoredPiece, first: int, last: int, name: str) -> bytes:
        there = self.index.objects[piece.object]
        try:
            data = self._store.read(f"{self.folder}/{there.name}", piece.offset + first - piece.start, last - first)
        except NotInStore as error:
            raise ValueError(f"{self._place(piece)}: missing; it holds bytes of {name}") from error
        if len(data) != last - first:
            raise ValueError(f"{self._place(piece)}: cut short; it holds bytes of {name}, expected {there.size} in all")
        return data

    def _place(self, piece: StoredPiece) -> str:
        there = self.index.objects[piece.object]
        return f"{self.folder}/{there.name} (rank {there.rank})"


def encode_index(index: Index) -> bytes:
    return msgspec.msgpack.encode(index)


def open_state(store: Store, folder: str, key: str, sha256: str) -> StoredState:
    """The state that an index names. Raises StoreError, ValueError naming a damaged index or an incomplete tensor."""
    data = store.get(key)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{key}: its bytes are not those the manifest names")
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{key}: {error}") from error
    for name, tensor in index.tensors.items():
        _check_whole(name, Kind(tensor.dtype, tensor.shape), tensor.pieces)
    return StoredState(store, folder, index, key, sha256)


def _check_whole(name: str, kind: Kind, pieces: Sequence[StoredPiece]) -> None:
    at = 0
    for piece in pieces:
        if piece.start != at:
            raise ValueError(f"state: {name}: got a piece from byte {piece.start} on, expected one from {at} on")
        if len(piece.digests) != -(-(piece.stop - at) // CHUNK_BYTES) * DIGEST_BYTES:
            raise ValueError(f"state: {name}: got {len(piece.digests)} bytes of hashes for the piece from byte {at} on")
        at = piece.stop
    if at != kind.num_bytes:
        raise ValueError(f"state: {name}: got {at} bytes, expected {kind.num_bytes}")


ADAPTER = "adapter"


def adapter_state(adapter: Adapter | None) -> dict[str, Tensor]:
    """The part of a state that names the adapter; empty where the whole model is trained."""
    if adapter is None:
        return {}
    data = msgspec.json.encode(adapter)
    return {ADAPTER: Tensor("U8", (len(data),), data)}


def state_adapter(state: Mapping[str, Tensor]) -> Adapter | None:
    """The adapter of a state. Raises ValueError for one that is not as `adapter_state` writes it."""
    if ADAPTER not in state:
        return None
    try:
        return msgspec.json.decode(state[ADAPTER].data, type=Adapter)
    except msgspec.DecodeError as error:
        raise ValueError(f"state: {ADAPTER}: {error}") from error


def check_adapter(state: Mapping[str, Tensor], adapter: Adapter | None) -> None:
    """Raise ValueError for a state of another adapter, of another base, or of full weights where an adapter is trained."""
    if (held := state_adapter(state)) != adapter:
        raise ValueError(f"state: it is {described(held)}, expected {described(adapter)}")
