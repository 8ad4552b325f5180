"""Marks: what frames of older formats wrote into `meta` of an experience, read as the fields it has now.

Only such a frame's `meta` is looked at, and it stays as it is. What a mark says counts where it counted then: one of
another type than headrace wrote says nothing.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from schemas.experience import Experience
from schemas.fields import Kind

_TEXTS = ("task", "parent", "failure", "part_reason")


def with_fields_of_marks(experience: Experience) -> Experience:
    """The experience of an older frame, with its marks as fields."""
    meta = experience.meta
    kind = _kind(experience)
    if not meta and kind == "answer":
        return experience
    fields: dict[str, Any] = {name: text for name in _TEXTS if isinstance(text := meta.get(name), str)}
    finish = meta.get("finish")
    cut = meta.get("truncated", finish if finish != "stop" else None)
    if isinstance(cut, str):
        fields["truncated"] = cut
    if isinstance(answer := meta.get("answer"), str):
        fields["answer"] = answer
    return structs.replace(
        experience,
        kind=kind,
        held_out=meta.get("split") == "validation",
        turn=_count(meta, "messages", -1) if meta.get("session") is True else -1,
        carried=_count(meta, "turn", 0) if experience.lane == "live" else 0,
        trial=_count(meta, "trial", -1),
        **fields,
    )


def _kind(experience: Experience) -> Kind:
    if experience.meta.get("withdrawn") is True:
        return "withdrawal"
    match experience.meta.get("pair"):
        case "chosen":
            return "chosen"
        case "rejected":
            return "rejected"
    return "demonstration" if experience.lane == "expert" else "answer"


def _count(meta: Mapping[str, object], name: str, otherwise: int) -> int:
    """The next number, of 0 or more."""
    value = meta.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
