"""Joins in the buffer: turns of a session that were closed together are drawn together, so that one row holds what they share.

Guarantees: what is drawn of a join is all that is held of it in the lane and was trained as often; it is drawn with the
priority of its best turn, counts with all of its experiences, and its turns have one weight. Without joins nothing changes. At
most MAX_AWAITED joins wait for what is on its way; beyond it the oldest are taken as they are.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from schemas import Experience
from trainer.buffer.draw import Candidate, Draw
from trainer.buffer.pool import Pool

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


Joins = dict[tuple[str, int], list[Candidate]]  # members by name and how often they were used


def joins_of(pool: Pool) -> Joins:
    """What is drawn together: the members of each join that were used as often."""
    found: Joins = {}
    for one in pool.chosen(pool.column("is_joined")):
        found.setdefault((one.join, one.uses), []).append(one)
    return found


def united(pool: Pool, joins: Joins) -> Pool:
    """The candidates, those of a join as one, at the position of its first."""
    if not joins:
        return pool
    kept_N = np.ones(len(pool), bool)
    wholes: dict[int, Candidate] = {}
    for place in np.flatnonzero(pool.column("is_joined")).tolist():
        one = pool[place]
        members = joins[one.join, one.uses]
        kept_N[place] = members[0] is one
        if kept_N[place] and len(members) > 1:
            wholes[place] = _as_one(members)
    return pool.replaced(wholes).chosen(kept_N)


def parted(draw: Draw, joins: Joins) -> Draw:
    """The draw from `united` with the members of each join, each with its weight."""
    if not joins:
        return draw
    taken = [
        msgspec.structs.replace(member, weight=one.weight)
        for one in draw.taken
        for member in (joins[one.join, one.uses] if one.join else (one,))
    ]
    return msgspec.structs.replace(draw, taken=tuple(taken))


def _as_one(members: Sequence[Candidate]) -> Candidate:
    return msgspec.structs.replace(
        members[0],
        num_experiences=sum(one.num_experiences for one in members),
        num_tokens=sum(one.num_tokens for one in members),
        min_version=min(one.min_version for one in members),
        priority=max(one.priority for one in members),
        has_signal=any(one.has_signal for one in members),
    )
