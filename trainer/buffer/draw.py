"""Which groups a step trains on: pure decisions over what the buffer holds.

Guarantees: groups of the usual lane are drawn in issue order, and none all of whose tokens are more than `max_staleness`
versions behind is ever drawn (of the others, `trainer.batch.age` leaves such tokens out); what is dropped has a reason.
Neither a clock nor a random source is owned here.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from schemas import Lane


class Candidate(msgspec.Struct, frozen=True):
    """One group in the buffer, from its header alone.

    group: its id. lane: that trains it. offset: of its block in `buffer`. num_experiences: sequences of the block. sequence:
    issue order, -1 where it was not issued. revision: of the copy held. min_version, max_version: of the oldest and newest
    sampled token, -1 without one. priority: how often it is drawn, relative to others. uses: how often it was trained.
    has_ratio: every span's logprob is the policy's own. digest: of its record. is_pair: the two sides of a preference pair.
    weight: multiplies its loss terms, where the draw was not fair. key_id: what it is sealed under, "" for an open block.
    retrained: see Experience. num_tokens: sampled ones. tenant, subject: whose data, "" for data without one. has_signal: not
    all of its advantages are 0. join: name of what it is drawn together with, "" for alone.

    Example: Candidate(group="add-3745.2", lane="usual", offset=981, sequence=412, min_version=11, num_experiences=16)
    """

    group: str
    lane: Lane
    offset: int
    num_experiences: int
    sequence: int = -1
    revision: int = 0
    min_version: int = -1
    priority: float = 1.0
    uses: int = 0
    has_ratio: bool = True
    digest: bytes = b""
    is_pair: bool = False
    weight: float = 1.0
    key_id: str = ""
    retrained: int = 0
    num_tokens: int = 0
    tenant: str = ""
    subject: str = ""
    has_signal: bool = True
    join: str = ""
    max_version: int = -1


class Draw(msgspec.Struct, frozen=True):
    """What a draw decided.

    taken: to train on, in order. dropped: never to be trained, with the reason. wait: draw nothing yet. held_back: experiences
    that waited because their tenant or user had its share.
    """

    taken: tuple[Candidate, ...] = ()
    dropped: tuple[tuple[Candidate, str], ...] = ()
    wait: bool = False
    held_back: int = 0


def stale(candidates: Iterable[Candidate], version: int, max_staleness: int) -> list[tuple[Candidate, str]]:
    """Those of which no token can be trained within the bound, with the reason; of a pair each must be."""
    newest = [(one, one.min_version if one.is_pair else one.max_version) for one in candidates]
    return [(one, "stale") for one, sampled_by in newest if version - sampled_by > max_staleness]


def unfit(candidates: Iterable[Candidate], *, ratio: bool, pairs: bool) -> list[tuple[Candidate, str]]:
    """Those a lane's loss cannot learn from, with the reason. ratio: it forms importance ratios. pairs: it compares."""
    found = [(one, "not a pair") for one in candidates if not one.is_pair] if pairs else []
    if ratio:
        found += [(one, "no ratio") for one in candidates if not one.has_ratio and (one.is_pair or not pairs)]
    return found


def draw_in_order(
    candidates: Sequence[Candidate],
    *,
    num_groups: int,
    version: int,
    max_staleness: int,
    hold_for: int | None = None,
) -> Draw:
    """The `num_groups` oldest-issued groups within the staleness bound.

    hold_for: issue number of a missing group worth waiting for (`worth_waiting_for`): nothing is drawn past it.
    """
    dropped = stale(candidates, version, max_staleness)
    gone = {one.offset for one, _ in dropped}
    fresh = sorted((one for one in candidates if one.offset not in gone), key=lambda one: (one.sequence, one.offset))
    taken = fresh[:num_groups]
    if len(taken) < num_groups or (hold_for is not None and taken[-1].sequence > hold_for):
        return Draw(dropped=tuple(dropped), wait=True)
    return Draw(taken=tuple(taken), dropped=tuple(dropped))


def missing(sequences: Sequence[int], closed: Iterable[int], floor: int) -> list[int]:
    """Issue numbers from `floor` up to the newest arrival that neither arrived nor were closed, oldest first."""
    if not sequences:
        return []
    known = {*sequences, *closed}
    return [number for number in range(floor, max(sequences)) if number not in known]


def worth_waiting_for(
    absent: Sequence[int],
    candidates: Sequence[Candidate],
    *,
    version: int,
    max_staleness: int,
    given_up: Mapping[int, float],
) -> int | None:
    """The oldest missing group whose first tokens would pass the bound if this draw went by without it, or None.

    Its versions are unknown until it comes, so those of its successors in issue order are taken: it started no later than
    they did. Of one whose first tokens have passed it already, the rest is not waited for. given_up: groups waited for
    long enough already.
    """
    ordered = sorted(candidates, key=lambda one: one.sequence)
    for number in absent:
        if number in given_up:
            continue
        successor = next((one for one in ordered if one.sequence > number), None)
        if successor is not None and version - successor.min_version == max_staleness:
            return number
    return None
