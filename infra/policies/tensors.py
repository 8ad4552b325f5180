"""A tensor as bytes: dtype, shape and data, without torch, so that weights can be hashed, diffed and stored anywhere.

The file format is safetensors, read and written here without the library so that the floor needs neither it nor torch;
reading is bounded and strict (no gaps, no overlaps, no unknown dtypes) and never copies the data.
"""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from infra.store.store import joined

if TYPE_CHECKING:
    import torch


Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 16  # more share the memory's bandwidth, not the work


def in_threads(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = MAX_THREADS,
    size: Callable[[Item], int] = lambda item: 0,
) -> list[Result]:
    """`work` of each item, in order. Raises the error of the first item that failed; items not begun then are left out.

    most: threads, for items that need much memory. size: the largest items begin, so that none of them is left for the end.
    """
    listed = list(items)
    threads = min(len(listed), most, len(os.sched_getaffinity(0)))
    if threads < 2:
        return [work(item) for item in listed]
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tensors")
    try:
        begun = {
            at: pool.submit(work, listed[at]) for at in sorted(range(len(listed)), key=lambda at: -size(listed[at]))
        }
        return [begun[at].result() for at in range(len(listed))]
    finally:
        pool.shutdown(cancel_futures=True)


ITEM_BYTES: dict[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
MAX_HEADER_BYTES = 16 * 1024 * 1024  # of a model with 100,000 tensors
MAX_RANK = 16
CHUNK_VALUES = 2**18

# The bits of the exponent: all set means infinity or NaN.
_EXPONENT_BITS: dict[str, int] = {
    "F64": 0x7FF0_0000_0000_0000, "F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80, "F8_E5M2": 0x7C,
}  # fmt: skip

_NUMPY_NAMES: dict[str, str] = {
    "F64": "<f8", "I64": "<i8", "U64": "<u8", "F32": "<f4", "I32": "<i4", "U32": "<u4", "F16": "<f2", "I16": "<i2",
    "U16": "<u2", "I8": "|i1", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_FROM_NUMPY: dict[str, str] = {name: dtype for dtype, name in _NUMPY_NAMES.items()}

_TORCH_NAMES: dict[str, str] = {
    "F64": "float64", "I64": "int64", "U64": "uint64", "F32": "float32", "I32": "int32", "U32": "uint32",
    "F16": "float16", "BF16": "bfloat16", "I16": "int16", "U16": "uint16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_FROM_TORCH: dict[str, str] = {f"torch.{name}": dtype for dtype, name in _TORCH_NAMES.items()}


class Tensor(msgspec.Struct, frozen=True):
    """Values of one tensor. dtype: a safetensors name. shape: () for one value. data: little-endian, row-major, exactly
    as many bytes as needed.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype: got {self.dtype!r}, expected one of {', '.join(ITEM_BYTES)}")
        if len(self.shape) > MAX_RANK:
            raise ValueError(f"shape: got {len(self.shape)} dimensions, expected at most {MAX_RANK}")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if min(self.shape, default=0) < 0 or len(self.data) != expected:
            what = f"{self.dtype}{list(self.shape)}"
            raise ValueError(f"data: got {len(self.data)} bytes, expected {expected} for {what}")

    @property
    def num_bytes(self) -> int:
        return len(self.data)


def bits(tensor: Tensor) -> np.ndarray:
    """The raw patterns, flat: [num_elements] unsigned integers of the element's width, read-only, not copied."""
    return np.frombuffer(tensor.data, dtype=f"<u{ITEM_BYTES[tensor.dtype]}")


def chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """Views of the raw patterns in order, small enough that arrays made of a view stay in the processor's cache."""
    patterns = bits(tensor)
    for start in range(0, patterns.size, CHUNK_VALUES):
        yield patterns[start : start + CHUNK_VALUES]


def are_finite(patterns: np.ndarray, dtype: str) -> bool:
    """True if no pattern of a dtype means infinity or NaN."""
    if dtype not in FLOATS or not patterns.size:
        return True
    # An exponent of ones is the largest there is: of positive values the patterns are largest as signed integers, of negative
    # ones as unsigned. Two maxima are a tenth of the work of a comparison by value, and take no memory. E4M3 has no infinities,
    # and NaN is all ones.
    least = 0x7F if dtype == "F8_E4M3" else _EXPONENT_BITS[dtype]
    sign = 1 << 8 * patterns.itemsize - 1
    return bool(patterns.max() < sign | least and patterns.view(f"<i{patterns.itemsize}").max() < least)


def from_numpy(array: np.ndarray) -> Tensor:
    """A copy of an array. ValueError for dtypes safetensors does not have."""
    # ascontiguousarray would make a scalar one-dimensional; tobytes writes any layout as row-major.
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    name = little_endian.dtype.str
    if name not in _FROM_NUMPY:
        raise ValueError(f"array: got dtype {array.dtype}, expected one of {', '.join(_FROM_NUMPY)}")
    return Tensor(_FROM_NUMPY[name], array.shape, little_endian.tobytes())


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values; read-only and not copied, but for BF16, which is widened to float32 (exactly).

    ValueError for 8-bit floats, which numpy does not have: `bits` gives their patterns.
    """
    if tensor.dtype == "BF16":
        return (bits(tensor).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    if tensor.dtype not in _NUMPY_NAMES:
        raise ValueError(f"tensor: got {tensor.dtype}, expected a dtype numpy has; use bits()")
    return np.frombuffer(tensor.data, dtype=_NUMPY_NAMES[tensor.dtype]).reshape(tensor.shape)


def from_torch(tensor: "torch.Tensor") -> Tensor:
    """A copy of a torch tensor on any device; later in-place changes do not reach it."""
    return from_torch_all({"": tensor})[""]


class Blocks:
    """Memory for copies of versions. A block is used again when its last copy is gone: the kernel clears new pages."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def take(self, num_bytes: int) -> np.ndarray:
        """[num_bytes] uint8 of any content, taken as long as an array or a buffer of it is referred to."""
        block = self._free.pop() if self._free else np.empty(0, np.uint8)
        block = block if len(block) == num_bytes else np.empty(num_bytes, np.uint8)
        taken = np.frombuffer(block.data, np.uint8)  # the base of each of its views, since its own base is no array
        weakref.finalize(taken, self._free.append, block)
        return taken


def from_torch_all(values: Mapping[str, "torch.Tensor"], blocks: Blocks | None = None) -> dict[str, Tensor]:
    """A copy of each, by name, made in threads.

    The copies share one block of memory: small blocks would leave gaps in the heap when a version goes.
    """
    import torch

    *starts, num_bytes = accumulate((-(-int(tensor.nbytes) // 16) * 16 for tensor in values.values()), initial=0)
    block = (blocks or Blocks()).take(max(1, num_bytes))

    def copied(start: int, tensor: "torch.Tensor") -> Tensor:
        copy = block[start : start + int(tensor.nbytes)]
        torch.from_numpy(copy).view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        copy.flags.writeable = False
        return Tensor(_dtype_name(tensor), tuple(tensor.shape), copy.data if copy.size else b"")

    items = zip(starts, values.values(), strict=True)
    copies = in_threads(lambda item: copied(*item), items, size=lambda item: int(item[1].nbytes))
    return dict(zip(values, copies, strict=True))


def in_place(tensor: "torch.Tensor") -> Tensor:
    """A torch tensor of the host's memory without a copy: later in-place changes reach it."""
    import torch

    if not tensor.is_contiguous():
        return from_torch(tensor)
    data = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return Tensor(_dtype_name(tensor), tuple(tensor.shape), data if len(data) else b"")


def _dtype_name(tensor: "torch.Tensor") -> str:
    name = str(tensor.dtype)
    if name not in _FROM_TORCH:
        raise ValueError(f"tensor: got {name}, expected one of {', '.join(_FROM_TORCH)}")
    return _FROM_TORCH[name]


def to_torch(tensor: Tensor) -> "torch.Tensor":
    """A copy as a CPU torch tensor that owns its memory."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES[tensor.dtype])
    if not tensor.num_bytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)


def save_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> memoryview:
    """The tensors as one safetensors file, read-only; the same tensors always give the same bytes."""
    return joined(list(pieces_of(tensors, metadata)))


def layout(
    listing: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Head of a safetensors file, and start and stop of the data of each tensor behind it, in order.

    listing: dtype and shape by name. ValueError for a name or a dtype that safetensors does not have.
    """
    if "__metadata__" in listing:
        raise ValueError("tensors: '__metadata__' is a reserved name")
    if unknown := sorted({dtype for dtype, _ in listing.values()} - ITEM_BYTES.keys()):
        raise ValueError(f"dtype: got {unknown[0]!r}, expected one of {', '.join(ITEM_BYTES)}")
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, tuple[int, int]] = {}
    offset = 0
    # Widest first, as the safetensors library writes them, so that every tensor starts aligned to its width.
    for name in sorted(listing, key=lambda name: (-ITEM_BYTES[listing[name][0]], name)):
        dtype, shape = listing[name]
        places[name] = offset, offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places[name]}
        offset = places[name][1]
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, places


def pieces_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Like `save_tensors`, in pieces for a file's `writelines`: its head, and the data of each tensor, not copied."""
    header, places = layout({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    yield header
    yield from (tensors[name].data for name in places)


_Size = Annotated[int, Meta(ge=0, le=2**48)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=MAX_RANK)]
    data_offsets: tuple[_Size, _Size]


def load_tensors(data: bytes | memoryview) -> dict[str, Tensor]:
    """The tensors of one safetensors file, as views of `data`. ValueError names the fault."""
    view = memoryview(data).toreadonly()
    if len(view) < 8:
        raise ValueError(f"safetensors: got {len(view)} bytes, expected at least 8")
    header_bytes = int.from_bytes(view[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(view) - 8):
        raise ValueError(f"safetensors: header of {header_bytes} bytes does not fit into {len(view)}")
    try:
        header = msgspec.json.decode(view[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items() if name != "__metadata__"
        }
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"safetensors: header is not valid: {error}") from error
    body = view[8 + header_bytes :]
    tensors: dict[str, Tensor] = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start != position or stop < start or stop > len(body):
            raise ValueError(
                f"safetensors: {name} at {start}:{stop}, expected a start at {position} within {len(body)}"
            )
        try:
            tensors[name] = Tensor(entry.dtype, entry.shape, body[start:stop])
        except ValueError as error:
            raise ValueError(f"safetensors: {name}: {error}") from error
        position = stop
    if position != len(body):
        raise ValueError(f"safetensors: {len(body) - position} bytes after the last tensor")
    return tensors
