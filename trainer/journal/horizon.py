"""What of a run stays: which checkpoints, and from where on `buffer` and `batches`. Pure; times are log-append times.

Kept are the newest few for resuming, the first of each of SLOTS equal spans of the horizon for replaying from about any
time in it, and the newest one that is older than the horizon, so that all inside it can be replayed.
"""

from collections.abc import Collection, Iterable

import msgspec

from trainer.config import SLOTS
from trainer.journal.checkpoint import CheckpointPlace, Manifest


class CheckpointTime(msgspec.Struct, frozen=True, order=True):
    """A checkpoint and when it was made.

    place: step and token. time_ms: log time of its Saved record.

    Example: CheckpointTime(place=CheckpointPlace(40, 17), time_ms=1763715600000)
    """

    place: CheckpointPlace
    time_ms: int


def kept(marks: Iterable[CheckpointTime], *, newest: int, keep_ms: int, slots: int = SLOTS) -> set[CheckpointPlace]:
    """Those that stay: never more than newest + slots + 2, of which the newest `newest` always.

    Spans begin at multiples of their length since the epoch, so that the first of a span stays the first as time goes on.
    """
    if newest < 3:
        raise ValueError(f"newest: got {newest}, expected at least 3 checkpoints")
    ordered = sorted(marks)
    if not ordered:
        return set()
    begins_ms = ordered[-1].time_ms - keep_ms
    slot_ms = max(1, -(-keep_ms // slots))
    stay = {one.place for one in ordered[-newest:]}
    first: dict[int, CheckpointPlace] = {}
    base = ordered[0]
    for one in ordered:
        if one.time_ms <= begins_ms:
            base = one
        else:
            first.setdefault(one.time_ms // slot_ms, one.place)
    return stay | set(first.values()) | {base.place}


def trim_below(manifests: Iterable[Manifest], stay: Collection[CheckpointPlace]) -> int:
    """Offset of `buffer` below which no checkpoint that stays needs anything; 0 without such checkpoints."""
    return min((one.oldest_offset for one in manifests if one.place in stay), default=0)


def journal_begin(manifests: Iterable[Manifest], stay: Collection[CheckpointPlace], keep_ms: int) -> tuple[int, int]:
    """Offset of `batches` that the journal may begin with, and the token it must have; (0, -1) while all of it is needed.

    The record before the first one that a kept checkpoint continues with, so that a reader from there on knows the lease
    in force. All below was written before the horizon: so it is 0 until a checkpoint is older than that, whatever other
    runs have written there.
    """
    left = [one for one in manifests if one.place in stay]
    begins_ms = max((one.time_ms for one in left), default=0) - keep_ms
    if all(one.time_ms > begins_ms for one in left):
        return 0, -1
    first = min(left, key=lambda one: one.position.journal_next).position
    return max(0, first.journal_next - 1), first.journal_token


def uses_below(manifests: Iterable[Manifest], stay: Collection[CheckpointPlace], keep_ms: int) -> int:
    """Offset of `buffer` below which everything was delivered before the horizon, so that nothing brings it again.

    Collect knows an answer no longer than the horizon, and what a restart reads again is either held or lies above. 0 while
    no checkpoint is older than the horizon: what the first one had read may still be delivered again.
    """
    left = [one for one in manifests if one.place in stay]
    begins_ms = max((one.time_ms for one in left), default=0) - keep_ms
    if all(one.time_ms > begins_ms for one in left):
        return 0
    return min(one.position.buffer_next for one in left)
