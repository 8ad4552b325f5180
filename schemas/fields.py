"""Types of fields of records: bounded numbers, names and lists, and the words that a field may hold."""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta as Bounds

# Every list has a bound, since a decoder makes room for as many items as a frame of five bytes may announce.
_MAX_FLOAT = 1.7976931348623157e308
Finite = Annotated[float, Bounds(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
Weight = Annotated[float, Bounds(ge=0, le=_MAX_FLOAT)]
Id = Annotated[str, Bounds(min_length=1, max_length=1024)]
Count = Annotated[int, Bounds(ge=0)]
Number = Annotated[int, Bounds(ge=-1)]  # -1 for none
Ids = Annotated[tuple[Id, ...], Bounds(max_length=65_536)]
Counts = Annotated[dict[str, Count], Bounds(max_length=65_536)]
Numbers = Annotated[dict[str, float], Bounds(max_length=4096)]  # measurements: infinite where what they measure is

Lane = Literal["usual", "live", "expert", "synthetic", "human"]
LANES: tuple[Lane, ...] = get_args(Lane)
Kind = Literal["answer", "demonstration", "chosen", "rejected", "withdrawal"]
End = Literal["terminal", "truncated", "failed"]
Outcome = Literal["buffered", "dropped", "superseded"]
Channel = Literal["candidate", "canary", "stable"]
PolicyEventKind = Literal["lease", "published", "promoted", "pinned", "rolled_back", "orphaned", "refused", "held"]
DirectiveKind = Literal["lease", "drain", "pause", "continue", "eval", "forget", "open"]
# Of a role: it gets ready, does its work, or ended in order.
Life = Literal["starting", "working", "ended"]
# Of the master: issuing has not begun, goes on, has ended while groups are outstanding, and nothing is outstanding any more
# because an operator drains; the last evals are answered, and all is over; or an operator pauses learning.
MasterPhase = Literal["warming up", "issuing", "draining", "drained", "evaluating", "done", "paused"]
FeedbackKind = Literal["value", "label", "correction", "retraction"]
CANARY_MISSING = "canary_missing_s"  # gauge of Progress: for how long no canary was heard of, 0 where that is no alarm
VERSION_PASSED = "version passed"  # reason of a closure: no engine can answer this eval any more
# Reasons of drop markers: so many other episodes of the group have ended that it waits for no more, or the group is over.
ENOUGH = "enough others"
GROUP_OVER = "group over"
# What the event of a version keeps of the step before it, for as long as the log: values of these names, and of each lane
# those that end so. Reports, which have all values, are kept for a day.
KEPT_FIGURES = (
    "reward_mean", "loss", "grad_norm", "/staleness_mean", "/entropy", "/k3", "/kl_reference", "/clip_positive",
    "/clip_negative", "/ess",
)  # fmt: skip
CANCELLED = frozenset({ENOUGH, GROUP_OVER})
Meta = Annotated[dict[str, str | int | Finite | bool | None], Bounds(max_length=1024)]


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all records: immutable, keyword-only, absent fields are defaults."""


def is_kept_figure(name: str) -> bool:
    """True if the event of a version keeps this value.

    >>> is_kept_figure("live/entropy"), is_kept_figure("live/mismatch_k3"), is_kept_figure("loss")
    (True, False, True)
    """
    return name in KEPT_FIGURES or f"/{name.partition('/')[2]}" in KEPT_FIGURES
