"""A version whose tensors stay on the GPU that trains it: changes are found there, and only these come to the host.

Guarantee: what is published is to the byte what HashedTensors of the same values publish.

A copy lies on the GPU from when it is taken until the version after it is published: of a published tensor its size once, and
twice while a version is published. Small tensors, and those of other dtypes, are copied to the host at once.
`trainer.weights_on_card` turns it off.
"""

import functools
import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from infra.policies.delta import K1_SHARE, SAMPLE_VALUES, Encoded, Move, encode_moves
from infra.policies.manifest import TensorEntry
from infra.policies.share import HashedTensors, VersionTensors, encode_changed
from infra.policies.tensors import CopiedTensors, Rooms, Tensor, from_torch, in_threads, place_of
from trainer.learners.card.xxh3 import Mix, hash_on_card, mix_on_host

logger = logging.getLogger(__name__)

LEAST_BYTES = 2**20  # of a tensor that stays on the card
AT_ONCE = 2**25  # values that are compared in one go
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
PATTERNS = {2: torch.int16, 4: torch.int32}
THREADS = 4  # that encode: each holds what it compares beside the tensors


class CardTensors:
    """VersionTensors on a GPU. `add` runs in the thread that trains; another thread may call the rest.

    stream: of the card, on which all but the copies is done, so that steps go on meanwhile; None on a CPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._copied = CopiedTensors()
        self._card: dict[str, torch.Tensor] = {}
        self._stream = stream

    def add(self, values: Mapping[str, torch.Tensor], rooms: Rooms | None = None) -> None:
        """Copy more; tied ones once, for each of their names. rooms: for those that go to the host."""
        small: dict[str, torch.Tensor] = {}
        same: dict[Hashable, torch.Tensor] = {}
        for name, value in values.items():
            if value.nbytes < LEAST_BYTES or value.dtype not in DTYPES:
                small[name] = value
                continue
            key = place_of(value)
            if key not in same:
                same[key] = value.detach().clone(memory_format=torch.contiguous_format)
            self._card[name] = same[key]
        self._copied.add(small, rooms)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    @functools.cached_property
    def _host(self) -> HashedTensors:
        return HashedTensors(self._copied)

    @functools.cached_property
    def _looks(self) -> dict[str, tuple[str, bool]]:
        """Hash of each on the card, and whether it is finite."""
        once = list({id(tensor): tensor for tensor in self._card.values()}.values())
        with self._beside():
            hashes = hash_on_card(once, self._mix) if once else []
            finite = [_is_finite(tensor) for tensor in once]
        found = {id(tensor): look for tensor, look in zip(once, zip(hashes, finite, strict=True), strict=True)}
        return {name: found[id(tensor)] for name, tensor in self._card.items()}

    @property
    def _mix(self) -> Mix:
        if self._stream is None:
            return mix_on_host
        from trainer.learners.card.mixing import mix_on_card

        return mix_on_card

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @functools.cached_property
    def entries(self) -> tuple[TensorEntry, ...]:
        own = [
            TensorEntry(name, DTYPES[tensor.dtype], tuple(tensor.shape), self._looks[name][0])
            for name, tensor in self._card.items()
        ]
        return tuple(sorted([*own, *self._host.entries], key=lambda entry: entry.name))

    @functools.cached_property
    def not_finite(self) -> str:
        return next((name for name, (_, finite) in self._looks.items() if not finite), self._host.not_finite)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor in host memory, copied anew at each call."""
        if name not in self._card:
            return self._host[name]
        with self._beside():
            return from_torch(self._card[name])

    def same_as(self, name: str) -> Hashable:
        return id(self._card[name]) if name in self._card else self._host.same_as(name)

    def encoded_since(self, old: VersionTensors) -> dict[str, Encoded]:
        """16-bit tensors that both have on the card are compared there; the others are encoded on the host."""
        tried: dict[str, Encoded | None] = {}
        if isinstance(old, CardTensors):
            hashes = {entry.name: entry.xxh3 for entry in old.entries}
            names = [
                name
                for name, value in self._card.items()
                if value.element_size() == 2
                and hashes.get(name) not in (None, self._looks[name][0])
                and (held := old._card.get(name)) is not None
                and (held.dtype, held.shape) == (value.dtype, value.shape)
            ]
            found = in_threads(
                lambda name: self._encoded(old._card[name], self._card[name]),
                names,
                most=THREADS,
                size=lambda name: self._card[name].nbytes,
                same=lambda name: (old.same_as(name), self.same_as(name)),
            )
            tried = dict(zip(names, found, strict=True))
        encoded = {name: encoded for name, encoded in tried.items() if encoded is not None}
        return encoded | encode_changed(self, old, tried)

    def base(self) -> "CardTensors":
        kept = CardTensors(self._stream)
        kept._card = {name: value for name, value in self._card.items() if value.element_size() == 2}
        kept.__dict__ |= {"_host": self._host.base(), "entries": self.entries}
        return kept

    def _encoded(self, old: torch.Tensor, new: torch.Tensor) -> Encoded | None:
        """None where many values changed: the tensor is then raw."""
        with self._beside():
            before, after = _patterns(old), _patterns(new)
            stride = -(-before.numel() // SAMPLE_VALUES)
            if float((before[::stride] != after[::stride]).float().mean()) >= K1_SHARE:
                return None
            return encode_moves(new.numel(), moves(old, new))


def _patterns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(PATTERNS[tensor.element_size()])


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(part.isfinite().all()) for part in torch.split(tensor.view(-1), AT_ONCE))


def moves(old: torch.Tensor, new: torch.Tensor) -> Iterator[Move]:
    """Changed values, in host memory."""
    pairs = zip(torch.split(_patterns(old), AT_ONCE), torch.split(_patterns(new), AT_ONCE), strict=True)
    for index, (before, after) in enumerate(pairs):
        at = (before != after).nonzero().view(-1)
        if at.numel():
            yield _numpy(before[at]), _numpy(after[at]), (at + index * AT_ONCE).to(torch.int32).cpu().numpy()


def _numpy(patterns: torch.Tensor) -> np.ndarray:
    found: np.ndarray = patterns.cpu().numpy().view(np.uint16)
    return found


ROOM = 3  # copies: two while a version is published, and what it takes to compare them


class CardCopies:
    """Copies of one learner or rank. wanted: by its settings. stepped: it took a step, which shows how much memory is left."""

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self.stepped = False
        self._device = device
        self._wanted = wanted and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    def begin(self, num_bytes: int) -> CardTensors | None:
        """The next copy, still empty; None where it is to go to the host: before the first step, and where steps leave less
        than ROOM copies. num_bytes: of a copy.
        """
        if not (self._wanted and self.stepped):
            return None
        if self._stream is None:
            self._wanted = has_room(left_by_steps(self._device), num_bytes)
            if not self._wanted:
                return None
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CardTensors(self._stream)

    def take(self, values: Mapping[str, torch.Tensor], rooms: Rooms) -> CardTensors | None:
        """A copy of a whole policy; see `begin`. rooms: for what goes to the host."""
        found = self.begin(sum({tensor.data_ptr(): tensor.nbytes for tensor in values.values()}.values()))
        if found is not None:
            found.add(values, rooms)
        return found


def has_room(left: int, num_bytes: int) -> bool:
    """True if copies of `num_bytes` fit into the memory that steps leave on the GPU; the log says so if not."""
    if left < ROOM * num_bytes:
        logger.info(
            "weights_on_card: got %.2f GB that steps leave, expected %.2f for %d copies: versions are compared on the host",
            left / 1e9, ROOM * num_bytes / 1e9, ROOM,
        )  # fmt: skip
        return False
    return True


def left_by_steps(device: torch.device) -> int:
    """Bytes of the card that no tensor took at the peak of the steps so far."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total - torch.cuda.max_memory_allocated(device)
