"""Checks of a step's result: each fault is a reason that names the field.

Only changed parts are checked, so a step that leaves an experience alone costs nothing and an edit of the header never
decodes the bulk.
"""

import math
import operator
from collections.abc import Sequence

import msgspec
import numpy as np

from infra.chain.processor import Drop
from schemas import BadFrame, Experience, ids
from schemas.experience import MAX_MEMBERS, encode_headers, is_withdrawal

# Identity and ownership of an experience: no step may change these fields.
IDENTITY = (
    "id", "group", "episode", "group_size", "part", "last", "origin", "tenant", "subject", "key_id", "attempt",
    "sequence", "suite", "revision", "stamps", "kind", "task", "held_out", "turn", "carried", "trial", "parent", "failure",
    "truncated", "part_reason", "retrained", "ends_session", "join",
)  # fmt: skip
_identity = operator.attrgetter(*IDENTITY)
MAX_REASON_CHARS = 80
# Reasons of drops that are a step's own fault, not its decision.
STEP_FAULTS = frozenset(
    f"{noun} {what}" for noun in ("score", "processor") for what in ("failed", "timed out", "returned nonsense")
)
NUMBERS = ("reward", "advantage", "priority", "weight")
_numbers = operator.attrgetter("reward", "advantage", "priority")
_others = operator.attrgetter(
    "num_tokens", "spans", "end", "lane", "scores", "meta", "bulk", "answer", "edit", "weight", "notes", "advantages"
)


def accepted(before: Experience, result: object) -> Experience | str:
    """`result` as the next state of `before` (numpy numbers become plain numbers), or its fault in words."""
    if not isinstance(result, Experience):
        return f"got {type(result).__name__}, expected Experience or Drop"
    was, now = _identity(before), _identity(result)
    if was != now:
        field = next(index for index in range(len(IDENTITY)) if was[index] != now[index])
        return f"{IDENTITY[field]}: got {now[field]!r}, expected it unchanged ({was[field]!r})"
    return _sound(before, result)


def accepted_new(result: object, parents: Sequence[Experience]) -> Experience | str:
    """`result` as an experience made from `parents`, or its fault in words."""
    if not isinstance(result, Experience):
        return f"got {type(result).__name__} among the results, expected Experience"
    if any(result.group == parent.group for parent in parents):
        return f"group: {result.group!r} is the parents' own; expected another (schemas.ids.synthetic_group)"
    try:
        group = ids.experience_group(result.id)
    except ValueError as error:
        return f"id: {error}"
    if group != result.group:
        return f"id: got {result.id!r}, expected one of group {result.group!r}"
    # A withdrawal says nothing of anybody: it names no key, and outlives one that is destroyed.
    says_nothing = is_withdrawal(result) and not result.num_tokens and not result.messages
    for field in ("tenant", "subject") if says_nothing else ("tenant", "subject", "key_id"):
        if getattr(result, field) not in {getattr(parent, field) for parent in parents}:
            return f"{field}: got {getattr(result, field)!r}, expected the parents'"
    return _sound(None, result)


def drop_fault(drop: Drop) -> str:
    """Fault of a Drop, "" for none: its reason becomes a metric label."""
    if not isinstance(drop.reason, str) or not 0 < len(drop.reason) <= MAX_REASON_CHARS:
        return f"Drop.reason: got {str(drop.reason)[:60]!r}, expected a phrase of 1 to {MAX_REASON_CHARS} characters"
    return ""


def header_fault(experience: Experience) -> str:
    """Fault of the header, "" for none; a step may also have written into `meta` in place."""
    try:
        experience.check_header()
    except ValueError as error:
        return str(error)
    except Exception as error:  # an object of a shape that cannot even be looked at
        return f"cannot be encoded: {type(error).__name__}: {error}"
    return ""


def header_faults(experiences: Sequence[Experience]) -> list[str]:
    """`header_fault` of each; sound ones, as nearly all are, are looked at together."""
    found: list[str] = []
    for start in range(0, len(experiences), MAX_MEMBERS):
        some = tuple(experiences[start : start + MAX_MEMBERS])
        try:
            encode_headers(some)
        except Exception:  # one of them is not sound
            found += map(header_fault, some)
        else:
            found += [""] * len(some)
    return found


def _sound(before: Experience | None, after: Experience) -> Experience | str:
    """Header, and bulk where it is not the very bulk (and the very spans) of `before`."""
    if before is not None and _only_numbers_differ(before, after):
        return after
    numbers = {
        field: float(value)
        for field in NUMBERS
        if isinstance(value := getattr(after, field), np.floating | np.integer | int) and type(value) is not float
    }
    if numbers:
        after = msgspec.structs.replace(after, **numbers)
    fault = header_fault(after)
    if fault:
        return fault
    if after.priority < 0:
        return f"priority: got {after.priority!r}, expected 0 or more"
    if before is None or after.bulk is not before.bulk or after.spans is not before.spans:
        try:
            after.check_bulk()
        except (BadFrame, ValueError) as error:
            return str(error)
    return after


def _only_numbers_differ(before: Experience, after: Experience) -> bool:
    """True if two experiences of the same identity differ only in finite numbers. The common case, checked without encoding."""
    reward, advantage, priority = _numbers(after)
    return (
        all(map(operator.is_, _others(before), _others(after)))
        and (reward is None or (type(reward) is float and math.isfinite(reward)))
        and (advantage is None or (type(advantage) is float and math.isfinite(advantage)))
        and type(priority) is float
        and 0 <= priority < math.inf
    )
