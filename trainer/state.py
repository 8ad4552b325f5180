"""A learner's state: flat byte ranges of named tensors, one hash whatever ranks hold them, and its stored objects.

    <folder>/state-00001-00000.bin     pieces of rank 1, one after the other, at most OBJECT_BYTES
    <folder>/index.msgpack             written once all ranks are done; a checkpoint's manifest names it and its hash

Every tensor's bytes, row-major and little-endian, are cut into chunks of CHUNK_BYTES from its first byte on. The hash of a
state is made of the hashes of its chunks. A rank hashes the chunks that begin in its own pieces; of a chunk that another
rank's piece goes on with, that rank hands over the rest (`tails`), so that no rank needs a whole tensor.

Guarantees: any byte range of any tensor can be read alone, by any number of ranks; nothing that is read is used before the
hashes of its chunks agree; an error names what is missing or damaged and the rank that wrote it. The hash covers the adapter
that the state is of.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

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
    """The bytes of a tensor that a rank holds.

    name: of the tensor. start: first byte. stop: the byte after the last.

    Example: Extent("model/lm_head.weight", 4096, 8192)
    """

    name: str
    start: int
    stop: int


Digests = dict[str, dict[int, bytes]]  # of each tensor: number of a chunk → its hash


def find_layout(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Names, dtypes and shapes of whole tensors."""
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


def tails(pieces: Iterable[Piece]) -> list[Piece]:
    """Beginnings of these pieces that belong to chunks that begin in other pieces."""
    found = []
    for piece in pieces:
        if over := -piece.start % CHUNK_BYTES:
            found.append(Piece(piece.name, piece.start, memoryview(piece.data)[:over]))
    return found


def owners(cut: Iterable[Piece], extents: Sequence[Sequence[Extent]]) -> list[list[Piece]]:
    """For each rank, those of the tails whose chunk begins in what it holds. extents: of each rank."""
    begins: dict[str, list[tuple[int, int, int]]] = {}
    for rank, held in enumerate(extents):
        for extent in held:
            begins.setdefault(extent.name, []).append((extent.start, extent.stop, rank))
    found: list[list[Piece]] = [[] for _ in extents]
    for tail in cut:
        first = tail.start // CHUNK_BYTES * CHUNK_BYTES
        found[next(rank for start, stop, rank in begins[tail.name] if start <= first < stop)].append(tail)
    return found


def chunk_digests(pieces: Iterable[Piece], layout: Layout, given: Iterable[Piece] = ()) -> Digests:
    """Hashes of the chunks that begin in these pieces. given: tails of others' pieces. ValueError where one is missing."""
    rest = {(piece.name, piece.start): piece.data for piece in given}
    found: Digests = {}
    for piece in pieces:
        view, of_name = memoryview(piece.data), found.setdefault(piece.name, {})
        total = layout[piece.name].num_bytes
        for chunk in range(-(-piece.start // CHUNK_BYTES), -(-piece.stop // CHUNK_BYTES)):
            begin, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, total)
            at = min(end, piece.stop)
            digest = hashlib.blake2b(view[begin - piece.start : at - piece.start], digest_size=DIGEST_BYTES)
            while at < end:
                if (more := rest.get((piece.name, at))) is None:
                    raise ValueError(f"state: {piece.name}: nothing holds its bytes from {at} on")
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
    return whole.hexdigest()


def whole_hash(tensors: Mapping[str, Tensor]) -> str:
    """`state_hash` of a state that is here whole: equal exactly where names, dtypes, shapes and bytes are."""
    layout = find_layout(tensors)
    found = chunk_digests(whole_pieces(tensors), layout)
    return state_hash(layout, {name: joined(layout[name], found.get(name, {}), name) for name in layout})


def joined(kind: Kind, chunks: Mapping[int, bytes], name: str) -> bytes:
    """The hashes of all chunks in order. ValueError naming the first chunk that has none."""
    for chunk in range(num_chunks(kind)):
        if chunk not in chunks:
            raise ValueError(f"state: {name}: chunk {chunk} of {num_chunks(kind)} is held by no rank")
    return b"".join(chunks[chunk] for chunk in range(num_chunks(kind)))


OBJECT_BYTES = 64 * 1024 * 1024
READ_BYTES = 64 * 1024 * 1024


class StoredPiece(msgspec.Struct, frozen=True):
    """Location of some bytes of a tensor.

    start: first byte of the tensor. stop: the byte after the last. object: number of the object in the index. offset: first
    byte in the object.
    """

    start: int
    stop: int
    object: int
    offset: int


class StoredObject(msgspec.Struct, frozen=True):
    """One object of a stored state.

    name: below the folder. size: in bytes. rank: that wrote it.
    """

    name: str
    size: int
    rank: int


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a stored state.

    dtype: a safetensors name. shape: of the whole tensor. pieces: in order, without gaps. digests: of its chunks, one after
    the other, DIGEST_BYTES each.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    digests: bytes


class Index(msgspec.Struct, frozen=True):
    """Everything of a stored state but its bytes.

    chunk_bytes: length of a chunk. objects: by number. tensors: by name.
    """

    chunk_bytes: int
    objects: tuple[StoredObject, ...]
    tensors: dict[str, StoredTensor]


class Written(msgspec.Struct, frozen=True):
    """Objects that one rank stored.

    objects: its own, in order. pieces: by tensor, with numbers of these objects. digests: of the chunks that begin in them.
    """

    objects: tuple[StoredObject, ...]
    pieces: dict[str, tuple[StoredPiece, ...]]
    digests: Digests


def write_pieces(
    store: Store,
    folder: str,
    rank: int,
    pieces: Sequence[Piece],
    digests: Digests,
    *,
    object_bytes: int = OBJECT_BYTES,
) -> Written:
    """Store the pieces of one rank. Blocking."""
    objects: list[StoredObject] = []
    found: dict[str, list[StoredPiece]] = {}
    body: list[memoryview] = []
    size = 0

    def put() -> None:
        name = f"state-{rank:05d}-{len(objects):05d}.bin"
        store.put(f"{folder}/{name}", b"".join(body))
        objects.append(StoredObject(name, size, rank))

    for piece in pieces:
        view, at = memoryview(piece.data), 0
        while at < len(view):
            part = view[at : at + object_bytes - size]
            begin = piece.start + at
            found.setdefault(piece.name, []).append(StoredPiece(begin, begin + len(part), len(objects), size))
            body.append(part)
            at, size = at + len(part), size + len(part)
            if size == object_bytes:
                put()
                body, size = [], 0
    if body:
        put()
    return Written(tuple(objects), {name: tuple(parts) for name, parts in found.items()}, digests)


def joined_index(layout: Layout, parts: Iterable[Written]) -> Index:
    """The index of a state from what all ranks wrote. ValueError naming a tensor that is not there whole."""
    objects: list[StoredObject] = []
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in layout}
    chunks: Digests = {name: {} for name in layout}
    for part in parts:
        first = len(objects)
        objects += part.objects
        for name, stored in part.pieces.items():
            pieces[name] += [msgspec.structs.replace(piece, object=first + piece.object) for piece in stored]
        for name, of_name in part.digests.items():
            chunks[name] |= of_name
    tensors = {}
    for name, kind in layout.items():
        ordered = tuple(sorted(pieces[name], key=lambda piece: piece.start))
        _check_whole(name, kind, ordered)
        tensors[name] = StoredTensor(kind.dtype, kind.shape, ordered, joined(kind, chunks[name], name))
    return Index(CHUNK_BYTES, tuple(objects), tensors)


def write_whole(store: Store, folder: str, tensors: Mapping[str, Tensor]) -> Index:
    """Store a state that one process holds whole. Blocking."""
    layout, pieces = find_layout(tensors), whole_pieces(tensors)
    return joined_index(layout, [write_pieces(store, folder, 0, pieces, chunk_digests(pieces, layout))])


def index_hash(index: Index) -> str:
    """`state_hash` of a stored state."""
    return state_hash(
        {name: Kind(tensor.dtype, tensor.shape) for name, tensor in index.tensors.items()},
        {name: tensor.digests for name, tensor in index.tensors.items()},
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
        """One tensor, whole."""
        kind = self.layout[name]
        return Tensor(kind.dtype, kind.shape, self.read(name, 0, kind.num_bytes))

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def read(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes of a tensor. Raises StoreError, ValueError naming the object that is missing or damaged."""
        tensor, kind = self.index.tensors[name], self.layout[name]
        begin = start // CHUNK_BYTES * CHUNK_BYTES
        end = min(-(-stop // CHUNK_BYTES) * CHUNK_BYTES, kind.num_bytes)
        found = memoryview(bytearray(end - begin))
        for piece in tensor.pieces:
            first, last = max(begin, piece.start), min(end, piece.stop)
            if first < last:
                found[first - begin : last - begin] = self._bytes(piece, first, last, name)
        for chunk in range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)):
            at = chunk * CHUNK_BYTES - begin
            digest = hashlib.blake2b(found[at : at + CHUNK_BYTES], digest_size=DIGEST_BYTES).digest()
            if digest != tensor.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]:
                first = chunk * CHUNK_BYTES
                held = [
                    self._place(part)
                    for part in tensor.pieces
                    if part.start < first + CHUNK_BYTES and first < part.stop
                ]
                raise ValueError(
                    f"{' or '.join(held)}: its bytes of {name} from {first} on are not those that were written"
                )
        return found[start - begin : stop - begin]

    def verified(self) -> "StoredState":
        """Itself, once `verify` found nothing wrong."""
        self.verify()
        return self

    def only(self, names: Collection[str]) -> "StoredState":
        """The state without other tensors."""
        kept = {name: tensor for name, tensor in self.index.tensors.items() if name in names}
        index = msgspec.structs.replace(self.index, tensors=kept)
        return StoredState(self._store, self.folder, index, self.key, self.sha256)

    def copy_to(self, folder: str) -> Index:
        """The same objects in another folder, one after the other; their index."""
        for stored in self.index.objects:
            self._store.put(f"{folder}/{stored.name}", self._store.get(f"{self.folder}/{stored.name}"))
        return self.index

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read one of `parts` equal shares of all bytes and compare the hashes; nothing is kept. Raises as `read` does."""
        for name, kind in self.layout.items():
            chunks = num_chunks(kind)
            start, stop = (chunks * at // parts * CHUNK_BYTES for at in (part, part + 1))
            for at in range(start, min(stop, kind.num_bytes), READ_BYTES):
                self.read(name, at, min(at + READ_BYTES, stop, kind.num_bytes))

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
    """The index as an object."""
    return msgspec.msgpack.encode(index)


def open_state(store: Store, folder: str, key: str, sha256: str) -> StoredState:
    """The state that an index names. Raises StoreError, ValueError naming what is missing or damaged."""
    data = store.get(key)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{key}: its bytes are not those the manifest names")
    try:
        index = msgspec.msgpack.decode(data, type=Index)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{key}: {error}") from error
    if index.chunk_bytes != CHUNK_BYTES:
        raise ValueError(f"{key}: got chunks of {index.chunk_bytes} bytes, expected {CHUNK_BYTES}")
    for name, tensor in index.tensors.items():
        kind = Kind(tensor.dtype, tensor.shape)
        _check_whole(name, kind, tensor.pieces)
        if len(tensor.digests) != num_chunks(kind) * DIGEST_BYTES:
            raise ValueError(
                f"{key}: {name}: got {len(tensor.digests)} bytes of hashes, expected {num_chunks(kind)} hashes"
            )
    return StoredState(store, folder, index, key, sha256)


def _check_whole(name: str, kind: Kind, pieces: Sequence[StoredPiece]) -> None:
    at = 0
    for piece in pieces:
        if piece.start != at:
            raise ValueError(f"state: {name}: got a piece from byte {piece.start} on, expected one from {at} on")
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
