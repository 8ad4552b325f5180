"""Waiting groups: candidates with their columns, and the draw in issue order. Pure.

A draw reads the numbers of every candidate and takes few candidates, so the numbers are in arrays that the buffer updates; a
`Candidate` object is read only if it is drawn, dropped or part of a join.

Guarantees: groups of the usual lane are drawn in issue order. A group whose tokens are all more than `max_staleness` versions
old is never drawn (`trainer.batch.assemble` masks single old tokens). Each drop has a reason.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from schemas import Lane


class Candidate(msgspec.Struct, frozen=True):
    """A group in the buffer, from its header.

    group: id. lane: lane that trains it. offset: offset of its block in `buffer`. num_experiences: sequences of the block.
    sequence: issue order, -1 if it was not issued. revision: revision of the held copy. min_version, max_version: version of
    the oldest and of the newest sampled token, -1 for none. priority: relative priority. uses: number of uses. has_ratio: True
    if every span's logprobs are the policy's own. digest: digest of its record. is_pair: True for a preference pair. weight:
    factor of its loss terms, if the draw was not even. key_id: key that seals it, "" for none. retrained: as in Experience.
    num_tokens: sampled tokens. tenant, subject: owner and user of the data, "" for none. has_signal: True unless all its
    advantages are 0. join: name of the join, "" for none. is_taught: True if a teacher judged every sampled token. has_reward:
    True if every sequence has a reward.
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
    is_taught: bool = False
    has_reward: bool = True


class Draw(msgspec.Struct, frozen=True):
    """Result of a draw.

    taken: to train on, in order. dropped: never to be trained, with the reason. wait: draw nothing yet. held_back: experiences
    that waited because their tenant or user had its share.
    """

    taken: tuple[Candidate, ...] = ()
    dropped: tuple[tuple[Candidate, str], ...] = ()
    wait: bool = False
    held_back: int = 0


def stale(candidates: Iterable[Candidate], version: int, max_staleness: int) -> list[tuple[Candidate, str]]:
    """Return the candidates without a token to train within the bound, with the reason; of a pair, both sides must have one."""
    newest = [
        (candidate, candidate.min_version if candidate.is_pair else candidate.max_version) for candidate in candidates
    ]
    return [(candidate, "stale") for candidate, sampled_by in newest if version - sampled_by > max_staleness]


def draw_in_order(
    candidates: Sequence[Candidate], *, num_groups: int, version: int, max_staleness: int, hold_for: int | None = None
) -> Draw:
    """The `num_groups` oldest-issued groups within the staleness bound.

    hold_for: issue number of a missing group worth waiting for (`worth_waiting_for`): nothing is drawn past it.
    """
    dropped = stale(candidates, version, max_staleness)
    gone = {candidate.offset for candidate, _ in dropped}
    fresh = sorted(
        (candidate for candidate in candidates if candidate.offset not in gone),
        key=lambda candidate: (candidate.sequence, candidate.offset),
    )
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
    absent: Sequence[int], candidates: Sequence[Candidate], *, version: int, max_staleness: int
) -> list[int]:
    """Return the missing groups whose first tokens would exceed the bound if this draw did not wait for them, oldest first.

    Their versions are estimated by their successors in issue order, which started no earlier. Groups whose first tokens
    exceeded the bound already are not waited for.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.sequence)
    found = []
    for number in absent:
        successor = next((candidate for candidate in ordered if candidate.sequence > number), None)
        if successor is not None and version - successor.min_version == max_staleness:
            found.append(number)
    return found


Party = tuple[str, ...]  # (tenant,) or (tenant, subject)

COLUMNS = {
    "offset": np.uint64,
    "priority": np.float64,
    "num_experiences": np.int64,
    "num_tokens": np.int64,
    "uses": np.int64,
    "tenant": np.int32,  # code of its tenant
    "user": np.int32,  # code of its tenant and subject
    "has_tenant": np.bool_,
    "has_subject": np.bool_,
    "has_ratio": np.bool_,
    "is_pair": np.bool_,
    "is_joined": np.bool_,
    "is_taught": np.bool_,
    "has_reward": np.bool_,
}
FIRST_ROWS = 64

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Pool:
    """N candidates in an order.

    row_N: int64, row of each candidate in `held` and in the columns. held: candidates by row, None in a free row. columns:
    columns by name, see COLUMNS. codes: codes of tenants and users.
    """

    row_N: np.ndarray
    held: Sequence[Candidate | None]
    columns: Columns
    codes: dict[Party, int]

    def __len__(self) -> int:
        return len(self.row_N)

    def __getitem__(self, place: int) -> Candidate:
        return self._held(int(self.row_N[place]))

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._held, self.row_N.tolist())

    def chosen(self, which: np.ndarray | slice) -> "Pool":
        """The candidates at these places, in their order, or where a mask is set."""
        return Pool(self.row_N[which], self.held, self.columns, self.codes)

    def replaced(self, others: Mapping[int, Candidate]) -> "Pool":
        """The same with others at these places."""
        more, row_N = _columns(others.values(), self.codes), self.row_N.copy()
        row_N[list(others)] = np.arange(len(self.held), len(self.held) + len(others))
        columns = {
            name: np.concatenate([column[: len(self.held)], more[name]]) for name, column in self.columns.items()
        }
        return Pool(row_N, (*self.held, *others.values()), columns, self.codes)

    def column(self, name: str) -> np.ndarray:
        """One of COLUMNS, in this order. [N]"""
        column: np.ndarray = self.columns[name][self.row_N]
        return column

    def _held(self, row: int) -> Candidate:
        candidate = self.held[row]
        assert candidate is not None, "a pool names candidates only"
        return candidate


class LaneRows:
    """The candidates of a lane in order of arrival, by the offset of their block. Not thread-safe.

    Memory: at most twice that of the held candidates, plus the names of their tenants and users. A returned pool does not
    change: the first later change copies the rows.
    """

    def __init__(self) -> None:
        self._row: dict[int, int] = {}  # offset → row
        self._held: list[Candidate | None] = []
        self._is_held = np.zeros(FIRST_ROWS, np.bool_)
        self._columns: Columns = {name: np.zeros(FIRST_ROWS, dtype) for name, dtype in COLUMNS.items()}
        self._codes: dict[Party, int] = {}
        self._is_shared = False

    def __len__(self) -> int:
        return len(self._row)

    def __contains__(self, offset: int) -> bool:
        return offset in self._row

    def __getitem__(self, offset: int) -> Candidate:
        candidate = self._held[self._row[offset]]
        assert candidate is not None, "a held candidate has a row"
        return candidate

    def __iter__(self) -> Iterator[Candidate]:
        return (candidate for candidate in self._held if candidate is not None)

    def put(self, candidate: Candidate) -> None:
        """Add a candidate; it replaces a candidate with the same offset."""
        self._own()
        row = self._row.get(candidate.offset)
        if row is None:
            row = self._row[candidate.offset] = len(self._held)
            self._held.append(None)
            if row == len(self._is_held):
                self._is_held = _doubled(self._is_held)
                self._columns = {name: _doubled(column) for name, column in self._columns.items()}
        self._held[row] = candidate
        self._is_held[row] = True
        for column, value in zip(self._columns.values(), _values(candidate, self._codes), strict=True):
            column[row] = value

    def pop(self, offset: int) -> Candidate:
        """Remove a candidate. Raises KeyError if the pool holds none with that offset."""
        candidate = self[offset]
        self._own()
        row = self._row.pop(offset)
        self._held[row] = None
        self._is_held[row] = False
        if len(self._held) > 2 * len(self._row) + FIRST_ROWS:
            self._close_gaps()
        return candidate

    def pool(self) -> Pool:
        self._is_shared = True
        return Pool(np.flatnonzero(self._is_held), self._held, self._columns, self._codes)

    def _own(self) -> None:
        if self._is_shared:
            self._held = self._held.copy()
            self._columns = {name: column.copy() for name, column in self._columns.items()}
            self._is_shared = False

    def _close_gaps(self) -> None:
        fresh = LaneRows()
        for candidate in self:
            fresh.put(candidate)
        self._row, self._held, self._is_held = fresh._row, fresh._held, fresh._is_held
        self._columns, self._codes, self._is_shared = fresh._columns, fresh._codes, False


def make_pool(candidates: Iterable[Candidate]) -> Pool:
    held = tuple(candidates)
    codes: dict[Party, int] = {}
    return Pool(np.arange(len(held)), held, _columns(held, codes), codes)


def _columns(candidates: Iterable[Candidate], codes: dict[Party, int]) -> Columns:
    rows = [_values(candidate, codes) for candidate in candidates]
    return {name: np.array([row[place] for row in rows], dtype) for place, (name, dtype) in enumerate(COLUMNS.items())}


def _values(candidate: Candidate, codes: dict[Party, int]) -> tuple[float, ...]:
    """A candidate's value of each of COLUMNS."""
    tenant = codes.setdefault((candidate.tenant,), len(codes))
    user = codes.setdefault((candidate.tenant, candidate.subject), len(codes))
    return (
        candidate.offset, candidate.priority, candidate.num_experiences, candidate.num_tokens, candidate.uses, tenant, user,
        bool(candidate.tenant), bool(candidate.subject), candidate.has_ratio, candidate.is_pair, bool(candidate.join),
        candidate.is_taught, candidate.has_reward,
    )  # fmt: skip


def _doubled(column: np.ndarray) -> np.ndarray:
    return np.concatenate([column, np.zeros_like(column)])


def lowest(rank_N: np.ndarray, num: int) -> np.ndarray:
    """Return the places of the `num` lowest ranks, or a few more, by rank; ties by place. [≥ num]"""
    if num >= len(rank_N):
        return np.argsort(rank_N, kind="stable")
    near = np.flatnonzero(rank_N <= np.partition(rank_N, num - 1)[num - 1])
    return near[np.argsort(rank_N[near], kind="stable")]


def enough(pool: Pool, num_experiences: int) -> int:
    """Return a number of groups that always has `num_experiences` plus a group, or the number of all groups."""
    size_N = pool.column("num_experiences")
    return min(len(pool), -(-(num_experiences + int(size_N.max())) // max(1, int(size_N.min()))))
