"""What a draw chooses from: candidates in an order, and what it decides by as columns.

A draw looks at the numbers of every candidate and takes few of them, so the numbers lie in arrays that the buffer keeps as
blocks come and go; a `Candidate` is touched only where it is drawn, dropped or part of a join.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.buffer.draw import Candidate

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
}
FIRST_ROWS = 64

Columns = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Pool:
    """N candidates in an order.

    row_N: int64, where each lies in `held` and in the columns. held: candidates by row, None in a free one. columns:
    by name, see COLUMNS. codes: of tenants and users.

    Example: pool.chosen(pool.column("uses") < 4)[0].group
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
        one = self.held[row]
        assert one is not None, "a pool names candidates only"
        return one


class LaneRows:
    """The candidates of one lane in order of arrival, by the offset of their block. Not thread-safe.

    Its memory is that of at most twice what is held, and of the names of their tenants and users. A pool stays as it was:
    the first change after it is of a copy.
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
        one = self._held[self._row[offset]]
        assert one is not None, "what is held has a row"
        return one

    def __iter__(self) -> Iterator[Candidate]:
        return (one for one in self._held if one is not None)

    def put(self, one: Candidate) -> None:
        """Take in a candidate; it replaces one with the same offset."""
        self._own()
        row = self._row.get(one.offset)
        if row is None:
            row = self._row[one.offset] = len(self._held)
            self._held.append(None)
            if row == len(self._is_held):
                self._is_held = _doubled(self._is_held)
                self._columns = {name: _doubled(column) for name, column in self._columns.items()}
        self._held[row] = one
        self._is_held[row] = True
        for column, value in zip(self._columns.values(), _values(one, self._codes), strict=True):
            column[row] = value

    def pop(self, offset: int) -> Candidate:
        """Let go of a candidate. KeyError where none is held with that offset."""
        one = self[offset]
        self._own()
        row = self._row.pop(offset)
        self._held[row] = None
        self._is_held[row] = False
        if len(self._held) > 2 * len(self._row) + FIRST_ROWS:
            self._close_gaps()
        return one

    def pool(self) -> Pool:
        """All of them, as they are now."""
        self._is_shared = True
        return Pool(np.flatnonzero(self._is_held), self._held, self._columns, self._codes)

    def _own(self) -> None:
        if self._is_shared:
            self._held = self._held.copy()
            self._columns = {name: column.copy() for name, column in self._columns.items()}
            self._is_shared = False

    def _close_gaps(self) -> None:
        fresh = LaneRows()
        for one in self:
            fresh.put(one)
        self._row, self._held, self._is_held = fresh._row, fresh._held, fresh._is_held
        self._columns, self._codes, self._is_shared = fresh._columns, fresh._codes, False


def pool_of(candidates: Iterable[Candidate]) -> Pool:
    """These candidates in their order, whatever their offsets."""
    held = tuple(candidates)
    codes: dict[Party, int] = {}
    return Pool(np.arange(len(held)), held, _columns(held, codes), codes)


def _columns(candidates: Iterable[Candidate], codes: dict[Party, int]) -> Columns:
    rows = [_values(one, codes) for one in candidates]
    return {name: np.array([row[place] for row in rows], dtype) for place, (name, dtype) in enumerate(COLUMNS.items())}


def _values(one: Candidate, codes: dict[Party, int]) -> tuple[float, ...]:
    """A candidate's value of each of COLUMNS."""
    tenant = codes.setdefault((one.tenant,), len(codes))
    user = codes.setdefault((one.tenant, one.subject), len(codes))
    return (
        one.offset, one.priority, one.num_experiences, one.num_tokens, one.uses, tenant, user,
        bool(one.tenant), bool(one.subject), one.has_ratio, one.is_pair, bool(one.join),
    )  # fmt: skip


def _doubled(column: np.ndarray) -> np.ndarray:
    return np.concatenate([column, np.zeros_like(column)])


def lowest(rank_N: np.ndarray, num: int) -> np.ndarray:
    """Places of the `num` lowest ranks, or of a few more, by rank; of equal ones the first place comes first. [≥ num]"""
    if num >= len(rank_N):
        return np.argsort(rank_N, kind="stable")
    near = np.flatnonzero(rank_N <= np.partition(rank_N, num - 1)[num - 1])
    return near[np.argsort(rank_N[near], kind="stable")]


def enough(pool: Pool, num_experiences: int) -> int:
    """A number of groups of which any so many are worth `num_experiences` and one group more, or all there are."""
    size_N = pool.column("num_experiences")
    return min(len(pool), -(-(num_experiences + int(size_N.max())) // max(1, int(size_N.min()))))
