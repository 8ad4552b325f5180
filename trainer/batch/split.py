"""Dealing a packed batch out: to minibatches, or to ranks.

Guarantee: rows stay whole, so a sequence, and a pair, is in one part only; which rows go where is decided by their order
and the seed, for ranks by their order and width.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from trainer.batch.batch import Microbatch, PackedBatch, count_lanes, count_sequences
from trainer.batch.pictures import of_rows
from trainer.batch.routing import padded


def split(batch: PackedBatch, parts: int, *, seed: int | None = None) -> tuple[PackedBatch, ...]:
    """Deal the rows of a batch to at most `parts` batches, each with a like share of every lane.

    seed: None deals in order. Each part counts its own lanes. Fewer rows give fewer parts, at least one.
    """
    keys = [(m, row) for m, one in enumerate(batch.microbatches) for row in range(len(one.tokens_BT))]
    parts = max(1, min(parts, len(keys)))
    if seed is not None:
        keys = [keys[i] for i in np.random.default_rng(seed).permutation(len(keys))]
    keys.sort(key=lambda key: _row_lane(batch.microbatches[key[0]], key[1]))
    dealt = []
    for part in range(parts):
        mine = keys[part::parts]
        chosen = [
            _select_rows(one, rows)
            for m, one in enumerate(batch.microbatches)
            if (rows := sorted(row for of, row in mine if of == m))
        ]
        counts = {"lane_tokens": count_lanes(chosen), "lane_sequences": count_sequences(chosen)}
        dealt.append(msgspec.structs.replace(batch, microbatches=tuple(chosen), **counts))
    return tuple(dealt)


def for_ranks(batch: PackedBatch, ranks: int) -> list[tuple[Microbatch, ...]]:
    """The rows of a batch for each rank, in microbatches as full as `max_tokens` lets them be: R rows of width T on K ranks
    are at most ⌈⌈R/K⌉ / ⌊max_tokens/T⌋⌉ forwards. Ranks get as many rows as others, up to one, and rows of like widths.
    """
    budget = batch.max_tokens or max(one.tokens_BT.size for one in batch.microbatches)
    keys = [(m, row) for m, one in enumerate(batch.microbatches) for row in range(len(one.tokens_BT))]
    width = [one.tokens_BT.shape[1] for one in batch.microbatches]
    keys.sort(key=lambda key: -width[key[0]])
    dealt = []
    for rank in range(ranks):
        mine, filled = keys[rank::ranks], []
        while mine:
            count = max(1, budget // width[mine[0][0]])
            filled.append(_together(batch.microbatches, mine[:count]))
            mine = mine[count:]
        dealt.append(tuple(filled))
    return dealt


def widened(one: Microbatch, num_T: int) -> Microbatch:
    """A microbatch of text with its rows padded to `num_T` tokens."""
    old_T = one.tokens_BT.shape[1]
    if num_T == old_T:
        return one
    moved = {name: _moved(getattr(one, name), old_T, num_T, 0) for name in ("predecessor_N", "bootstrap_N")}
    return msgspec.structs.replace(
        one,
        tokens_BT=_widened(one.tokens_BT, num_T),
        positions_BT=_widened(one.positions_BT, num_T),
        reach_BT=_widened(one.reach_BT, num_T, own=True),
        experts_BTLk=padded(one.experts_BTLk, num_T),
        **moved,
    )


def _together(microbatches: Sequence[Microbatch], keys: Sequence[tuple[int, int]]) -> Microbatch:
    """One microbatch of rows of several, each given by its microbatch and its row; padded to the widest."""
    chosen = [(m, [row for of, row in keys if of == m]) for m in dict.fromkeys(m for m, _ in keys)]
    parts = [_select_rows(microbatches[m], rows) for m, rows in chosen]
    if len(parts) == 1:
        return parts[0]
    num_T = max(one.tokens_BT.shape[1] for one in parts)
    first = np.cumsum([0, *(len(one.tokens_BT) for one in parts)])
    joined = {
        name: np.concatenate([getattr(one, name) for one in parts])
        for name in msgspec.structs.asdict(parts[0])
        if name.endswith("_N")
    }
    for name in ("predecessor_N", "bootstrap_N", "places_P"):
        joined[name] = np.concatenate(
            [
                _moved(getattr(one, name), one.tokens_BT.shape[1], num_T, row)
                for one, row in zip(parts, first, strict=False)
            ]
        )
    pixels = [one.pixels_I3HW for one in parts if len(one.pixels_I3HW)]
    return Microbatch(
        tokens_BT=np.concatenate([_widened(one.tokens_BT, num_T) for one in parts]),
        positions_BT=np.concatenate([_widened(one.positions_BT, num_T) for one in parts]),
        reach_BT=np.concatenate([_widened(one.reach_BT, num_T, own=True) for one in parts]),
        pixels_I3HW=np.concatenate(pixels) if pixels else parts[0].pixels_I3HW,
        experts_BTLk=np.concatenate([padded(one.experts_BTLk, num_T) for one in parts]),
        **joined,
    )


def _moved(index: np.ndarray, num_T: int, new_T: int, row: int) -> np.ndarray:
    """Indexes into B*T where rows have another width, and `row` rows are before them; -1 stays."""
    moved: np.ndarray = np.where(index >= 0, (index // num_T + row) * new_T + index % num_T, -1)
    return moved


def _widened(values_BT: np.ndarray, num_T: int, *, own: bool = False) -> np.ndarray:
    """Padded with 0, or with one past each index: padding is seen by itself only."""
    found = np.tile(np.arange(1, num_T + 1) if own else np.zeros(num_T, np.int64), (len(values_BT), 1))
    found[:, : values_BT.shape[1]] = values_BT
    return found


def _select_rows(one: Microbatch, rows: list[int]) -> Microbatch:
    num_T = one.tokens_BT.shape[1]
    new_row = np.full(len(one.tokens_BT), -1)
    new_row[rows] = np.arange(len(rows))
    row_N = new_row[one.predecessor_N // num_T]
    chosen = np.flatnonzero(row_N >= 0)
    picked = {
        name: values[rows] if name.endswith("_BT") else values[chosen]
        for name, values in msgspec.structs.asdict(one).items()
        if name.endswith(("_BT", "_N"))
    }
    picked["predecessor_N"] = row_N[chosen] * num_T + picked["predecessor_N"] % num_T
    at = picked["bootstrap_N"]
    picked["bootstrap_N"] = np.where(at >= 0, row_N[chosen] * num_T + at % num_T, -1)
    picked["experts_BTLk"] = one.experts_BTLk[rows] if len(one.experts_BTLk) else one.experts_BTLk
    return Microbatch(**picked, **of_rows(one.pixels_I3HW, one.places_P, new_row, num_T))


def _row_lane(one: Microbatch, row: int) -> int:
    return int(one.lane_N[np.argmax(one.predecessor_N // one.tokens_BT.shape[1] == row)])
