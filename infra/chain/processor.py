"""Interface of users' code: processors, feedback sources and scores, and their results.

A processor is pure and versioned: time comes from the record, seeds from its id, memory from what it declares. The
decorators only mark a function (or an options-as-fields struct with `__call__`) with its version; wiring is
configuration.

Three keyword-only parameters are not options, the chain fills them in: `memory` (a `Memory`, for a processor that
declares its size), `time_ms` (log-append time of the record) and `record_offset` (its offset, the same again on a
redelivery).
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
    """Returned by a processor to drop an experience. reason: a short constant phrase; it becomes a metric label.
    detail: more of it, for people.

    Example: Drop("too short")
    """

    reason: str
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a score, in place of a plain number.

    value: None leaves the score absent. reason: why, a short constant phrase that becomes a metric label. model: what
    answered.

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
    """Changes of a memory since it was last saved. gone: keys forgotten since; one also in `entries` was remembered anew."""

    gone: tuple[str, ...]
    entries: dict[str, Value]


class Memory:
    """Memory of one processor on one partition: a bounded mapping that forgets the oldest insertion first.

    Guarantees: two memories that saw the same writes in the same order are equal, byte for byte in `to_bytes`; one that is kept
    by its changes alone is equal to the one that was changed.
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
        """Value remembered under `key`."""
        return self._entries.get(key, default)

    def set(self, key: str, value: Value = True) -> None:
        """Remember; a known key keeps its age."""
        is_new = key not in self._entries
        self._entries[key] = value
        if self._changed is not None:
            if is_new:
                self._changed.pop(key, None)
            self._changed.setdefault(key, is_new)
        if is_new and len(self._entries) > self.limit:
            self.discard(next(iter(self._entries)))

    def discard(self, key: str) -> None:
        """Forget one key, if it is remembered."""
        if key in self._entries:
            del self._entries[key]
            if self._changed is not None:
                self._changed[key] = True

    def changes(self) -> MemoryChanges:
        """For what saves the memory: what changed since the last call; at the first one all entries are."""
        changed, self._changed = self._changed, {}
        if changed is None:
            return MemoryChanges((), dict(self._entries))
        entries = {key: self._entries[key] for key in changed if key in self._entries}
        return MemoryChanges(tuple(key for key, anew in changed.items() if anew), entries)

    def to_bytes(self) -> bytes:
        """All entries, oldest first, as msgpack."""
        return msgspec.msgpack.encode(list(self._entries.items()))

    @classmethod
    def from_bytes(cls, data: bytes, limit: int) -> "Memory":
        """The memory `to_bytes` wrote; entries over `limit` are forgotten, oldest first. Raises msgspec.DecodeError."""
        memory = cls(limit)
        memory._entries = dict(entries_in(data)[-limit:])
        return memory


def entries_in(data: bytes) -> list[tuple[str, Value]]:
    """The entries of which `to_bytes` made this, oldest first. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=list[tuple[str, Value]])


def processor(
    *, version: int, of: Unit | None = None, memory: int = 0, inline: bool = False
) -> Callable[[Marked], Marked]:
    """Mark a function (Experience, *, options) -> Experience | list[Experience] | Drop as a processor.

    of: what it takes. "group" (stage collect): the tuple of a group's experiences; it returns one as long, with Drop in place
    of a dropped member, and anything it makes follows behind. "batch" (stage batch): all that one optimizer step would train
    on, and as much comes back. "task" (stage tasks): a Task. By default it takes what its first parameter is named.
    What a processor makes has an id and a group of its own (`schemas.ids.synthetic_group`).

    Raise `version` whenever its decisions change: it is stamped on every experience it saw.
    memory: how many entries it remembers per partition; they come as the keyword-only parameter `memory`.
    inline: a promise that it returns within microseconds. Without it each call runs in a thread and is given up after
    its timeout; a hanging inline function stops its worker. A processor with memory always runs inline, in log order.
    """
    return _marked(Mark(kind="processor", version=version, memory=memory, inline=inline or memory > 0, of=of))


def feedback(*, version: int) -> Callable[[Marked], Marked]:
    """Mark a function (dict) -> Feedback | None as a feedback source's reading of one event; None ignores the event."""
    return _marked(Mark(kind="feedback", version=version))


def score(*, version: int, inline: bool = False) -> Callable[[Marked], Marked]:
    """Mark a function (Experience, *, options) -> float | Verdict | None as a score; None: it has no verdict. May be async.

    inline: as in `processor`.
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
