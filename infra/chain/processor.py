"""Interface of users' code: processors, feedback sources and scores, and their results.

A processor is pure and versioned: it draws seeds from the record's id, and declares its memory. The decorators only mark a
function (or an options-as-fields struct with `__call__`) with its version; wiring is configuration. Two keyword-only parameters
are no options, the chain passes them: `memory` (a `Memory`, for a processor that declares its size) and `record_offset`
(the offset of the record, the same again on a redelivery).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

Marked = TypeVar("Marked", bound=Callable[..., Any])
Kind = Literal["processor", "score", "feedback"]
Unit = Literal["experience", "group", "batch", "task"]
MARK_ATTRIBUTE = "__headrace_mark__"
Value = str | int | float | bool | list[int | float | str] | None


class Drop(msgspec.Struct, frozen=True):
    """Return value of a processor that drops an experience. reason: short constant phrase, which becomes a metric label.
    detail: details for people.

    Example: Drop("too short")
    """

    reason: str
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Return value of a score, in place of a number.

    value: the verdict, None for no score. reason: short constant phrase, which becomes a metric label. model: model that
    judged.

    Example: Verdict(value=0.8, model="judge-1")
    """

    value: float | None = None
    reason: str = ""
    model: str = ""


class Mark(msgspec.Struct, frozen=True):
    """Declaration of a decorator. memory: entries remembered per partition, 0 for none. inline, of: see `processor`."""

    kind: Kind
    version: int
    memory: int = 0
    inline: bool = False
    of: Unit | None = None


class MemoryChanges(NamedTuple):
    """Changes of a memory since it was last saved. gone: keys forgotten since; a key also in `entries` came back."""

    gone: tuple[str, ...]
    entries: dict[str, Value]


class Memory:
    """Memory of a processor on a partition: a bounded mapping that forgets the oldest entries first.

    Guarantees: the same writes in the same order give equal memories, byte for byte in `to_bytes`; applying `changes` to a copy
    gives an equal memory.
    """

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"limit: got {limit}, expected 1 or more")
        self.limit = limit
        self._entries: dict[str, Value] = {}
        # By key, in the order in which they came: whether it was forgotten since, or is new. None: not asked for yet.
        self._changed: dict[str, bool] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str, default: Value = None) -> Value:
        """Return the value of `key`, or the default."""
        return self._entries.get(key, default)

    def set(self, key: str, value: Value = True) -> None:
        """Set a value; an existing key keeps its age."""
        is_new = key not in self._entries
        self._entries[key] = value
        if self._changed is not None:
            if is_new:
                self._changed.pop(key, None)
            self._changed.setdefault(key, is_new)
        if is_new and len(self._entries) > self.limit:
            self.discard(next(iter(self._entries)))

    def discard(self, key: str) -> None:
        """Remove a key, if it exists."""
        if key in self._entries:
            del self._entries[key]
            if self._changed is not None:
                self._changed[key] = True

    def changes(self) -> MemoryChanges:
        """Return the changes since the last call; at the first call all entries."""
        changed, self._changed = self._changed, {}
        if changed is None:
            return MemoryChanges((), dict(self._entries))
        entries = {key: self._entries[key] for key in changed if key in self._entries}
        return MemoryChanges(tuple(key for key, anew in changed.items() if anew), entries)

    def to_bytes(self) -> bytes:
        """Return all entries, oldest first, as msgpack."""
        return msgspec.msgpack.encode(list(self._entries.items()))

    @classmethod
    def from_bytes(cls, data: bytes, limit: int) -> "Memory":
        """The memory `to_bytes` wrote; entries over `limit` are forgotten, oldest first. Raises msgspec.DecodeError."""
        memory = cls(limit)
        memory._entries = dict(entries_in(data)[-limit:])
        return memory


def entries_in(data: bytes) -> list[tuple[str, Value]]:
    """The entries from which `to_bytes` made this, oldest first. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=list[tuple[str, Value]])


def processor(
    *, version: int, of: Unit | None = None, memory: int = 0, inline: bool = False
) -> Callable[[Marked], Marked]:
    """Mark a function (Experience, *, options) -> Experience | Drop as a processor.

    version: raise it when a decision changes; headrace records it in every experience. of: kind of input, by default the name
    of the first parameter. "experience". "group" (stage collect): the tuple of a group's experiences; return a tuple of the
    same length, with Drop for dropped members, then new experiences. "batch" (stage batch): all experiences of a step; return
    as many. "task" (stage tasks): a Task. memory: maximum entries per partition of the keyword-only parameter `memory`. inline:
    promise to return within microseconds. Without it each call runs in a thread with a timeout; a hanging inline function stops
    its worker. A processor with memory always runs inline, in log order.

    New experiences need their own id and group (`schemas.ids.synthetic_group`).
    """
    return _marked(Mark(kind="processor", version=version, memory=memory, inline=inline or memory > 0, of=of))


def feedback(*, version: int) -> Callable[[Marked], Marked]:
    """Mark a function (dict) -> Feedback | None as the reader of a feedback source's events. None ignores the event. version:
    raise it when the reading changes.
    """
    return _marked(Mark(kind="feedback", version=version))


def score(*, version: int, inline: bool = False) -> Callable[[Marked], Marked]:
    """Mark a function (Experience, *, options) -> float | Verdict | None as a score; None for no verdict. The function may be
    async.

    version: raise it when a verdict changes. inline: as in `processor`.
    """
    return _marked(Mark(kind="score", version=version, inline=inline))


def declared_mark(function: Callable[..., Any]) -> Mark:
    """The decorator's declaration; raises ValueError for a function that was never marked."""
    bare = function.func if isinstance(function, functools.partial) else function
    mark = getattr(bare, MARK_ATTRIBUTE, None)
    if not isinstance(mark, Mark):
        name = getattr(bare, "__qualname__", type(bare).__qualname__)
        raise ValueError(f"{name} is not marked: expected @processor, @score or @feedback with a version")
    return mark


def _marked(mark: Mark) -> Callable[[Marked], Marked]:
    if mark.version < 1:
        raise ValueError(f"version: got {mark.version}, expected 1 or more")
    if mark.memory < 0:
        raise ValueError(f"memory: got {mark.memory}, expected 0 or more entries")

    def attach(function: Marked) -> Marked:
        setattr(function, MARK_ATTRIBUTE, mark)
        return function

    return attach
