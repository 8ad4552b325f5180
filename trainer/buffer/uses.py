"""How often groups were trained: counted by key, and forgotten when nothing can bring them again.

Guarantee: what is held or can still be delivered again keeps its count across restarts; its size is that of what arrived
within the kept horizon.
"""

import hashlib
from collections.abc import Collection, Iterator

import msgspec

COUNTS = 2**32  # more uses than any group is given
KEY_BYTES = 16
REVISIONS = 256  # of a group, that an earlier release may have counted each for itself


def use_key(group: str, retrained: int, lane: str) -> bytes:
    """What uses are counted by: 16 bytes. retrained: how often a late verdict sent the group to be trained again."""
    return _hashed(group, f"retrained {retrained}" if retrained else "0", lane)


def keys_of(group: str, revision: int, retrained: int, lane: str) -> list[bytes]:
    """All keys a block's uses may lie under, its own first: an earlier release counted each revision by itself."""
    keys = [use_key(group, retrained, lane)]
    if not retrained:
        keys += [_hashed(group, str(number), lane) for number in range(1, min(revision, REVISIONS) + 1)]
    return keys


class Known(msgspec.Struct, frozen=True):
    """How often a key was used.

    count: of uses. offset: the newest of `buffer` at which its group was delivered.
    """

    count: int
    offset: int


class Uses:
    """Key → times trained, and where it was last delivered. One consumer; not thread-safe."""

    def __init__(self) -> None:
        self._packed: dict[bytes, int] = {}  # offset * COUNTS + count: half the memory of a pair

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[tuple[bytes, Known]]:
        return ((key, _known(packed)) for key, packed in self._packed.items())

    def copy(self) -> "Uses":
        """A copy of the counts as they are now."""
        other = Uses()
        other._packed = dict(self._packed)
        return other

    def put(self, key: bytes, known: Known) -> None:
        """Set what a checkpoint kept."""
        self._packed[key] = known.offset * COUNTS + known.count

    def times(self, key: bytes) -> int:
        """How often it was trained."""
        return self._packed.get(key, 0) % COUNTS

    def of_group(self, group: str, revision: int, retrained: int, lane: str, offset: int) -> int:
        """How often a block delivered at `offset` was trained, as any revision of its group; remembers the delivery."""
        found = [key for key in keys_of(group, revision, retrained, lane) if key in self._packed]
        for key in found:
            self.put(key, Known(self.times(key), max(offset, _known(self._packed[key]).offset)))
        return sum(self.times(key) for key in found)

    def add(self, key: bytes, offset: int) -> None:
        """One more use of what lies at `offset`."""
        known = _known(self._packed.get(key, 0))
        self.put(key, Known(known.count + 1, max(offset, known.offset)))

    def forget_below(self, offset: int, held: Collection[bytes]) -> int:
        """Let go of what was last delivered below `offset` and is not held any more; how many went."""
        gone = [key for key, packed in self._packed.items() if packed // COUNTS < offset and key not in held]
        for key in gone:
            del self._packed[key]
        return len(gone)


def _known(packed: int) -> Known:
    return Known(packed % COUNTS, packed // COUNTS)


def _hashed(group: str, number: str, lane: str) -> bytes:
    return hashlib.blake2b(f"{group}\x00{number}\x00{lane}".encode(), digest_size=KEY_BYTES).digest()
