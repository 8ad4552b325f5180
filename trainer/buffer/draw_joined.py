"""Joins in the buffer: turns of a session that were closed together are drawn together, so that one row holds what they share.

Guarantees: what is drawn of a join is all that is held of it in the lane and was trained as often; it is drawn with the
priority of its best turn, counts with all of its experiences, and its turns have one weight. Without joins nothing changes. At
most MAX_AWAITED joins wait for what is on its way; beyond it the oldest are taken as they are.
"""

from collections.abc import Sequence

import msgspec

from schemas import Experience
from trainer.buffer.draw import Candidate, Draw

MAX_AWAITED = 1024


class Awaited:
    """Names of the joins of which more is on its way. A turn that comes again, after the last of its join, awaits nothing."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._whole: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def heard(self, one: Experience) -> None:
        """One more has come; the last of a join says that no other follows."""
        if one.join is None or one.revision:
            return
        if not one.join.more:
            self._names.pop(one.join.name, None)
            _remember(self._whole, one.join.name)
        elif one.join.name not in self._whole:
            _remember(self._names, one.join.name)

    def clear(self) -> None:
        """Nothing is on its way."""
        self._names.clear()


def _remember(names: dict[str, None], name: str) -> None:
    names[name] = None
    if len(names) > MAX_AWAITED:
        del names[next(iter(names))]


def united(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, those of a join as one, in the place of its first."""
    parts = _parts(candidates)
    if len(parts) == len(candidates):
        return list(candidates)
    return [members[0] if len(members) == 1 else _as_one(members) for members in parts.values()]


def parted(draw: Draw, candidates: Sequence[Candidate]) -> Draw:
    """The draw from `united(candidates)` with the members of each join, each with its weight."""
    parts = _parts(candidates)
    if len(parts) == len(candidates):
        return draw
    taken = [
        msgspec.structs.replace(member, weight=one.weight) for one in draw.taken for member in parts[_part_of(one)]
    ]
    return msgspec.structs.replace(draw, taken=tuple(taken))


def _parts(candidates: Sequence[Candidate]) -> dict[tuple[str, int], list[Candidate]]:
    found: dict[tuple[str, int], list[Candidate]] = {}
    for one in candidates:
        found.setdefault(_part_of(one), []).append(one)
    return found


def _part_of(one: Candidate) -> tuple[str, int]:
    """What a candidate is drawn together with: its join as often used, or itself. Names of joins are never empty."""
    return (one.join, one.uses) if one.join else ("", one.offset)


def _as_one(members: Sequence[Candidate]) -> Candidate:
    return msgspec.structs.replace(
        members[0],
        num_experiences=sum(one.num_experiences for one in members),
        num_tokens=sum(one.num_tokens for one in members),
        min_version=min(one.min_version for one in members),
        priority=max(one.priority for one in members),
        has_signal=any(one.has_signal for one in members),
    )
