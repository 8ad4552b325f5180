"""Splits a packed batch into minibatches, among ranks, or into a row per sequence for models without tree attention.

Guarantees: rows stay whole, so a sequence or a pair is in exactly one part. Order and seed decide the minibatch of a row, order
and width its rank. Unpacked, every position with a target or a value is on exactly one path that counts for it; each path
computes its shared prefix again.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from trainer.batch.batch import Microbatch, PackedBatch, count_lanes, count_sequences
from trainer.batch.tree import picture_rows


def split(batch: PackedBatch, parts: int, *, seed: int | None = None) -> tuple[PackedBatch, ...]:
    """Split the rows of a batch into at most `parts` batches with similar shares of every lane.

    seed: seed of the order, None for the given order. Each part counts its own lanes. Fewer rows give fewer parts, at least
    one.
    """
    keys = [(m, row) for m, rows in enumerate(batch.microbatches) for row in range(len(rows.tokens_BT))]
    parts = max(1, min(parts, len(keys)))
    if seed is not None:
        keys = [keys[i] for i in np.random.default_rng(seed).permutation(len(keys))]
    keys.sort(key=lambda key: _row_lane(batch.microbatches[key[0]], key[1]))
    dealt = []
    for part in range(parts):
        mine = keys[part::parts]
        chosen = [
            _select_rows(microbatch, rows)
            for m, microbatch in enumerate(batch.microbatches)
            if (rows := sorted(row for of, row in mine if of == m))
        ]
        counts = {"lane_tokens": count_lanes(chosen), "lane_sequences": count_sequences(chosen)}
        dealt.append(msgspec.structs.replace(batch, microbatches=tuple(chosen), **counts))
    return tuple(dealt)


def for_ranks(batch: PackedBatch, ranks: int) -> list[tuple[Microbatch, ...]]:
    """Distribute the rows of a batch among ranks, in microbatches up to `max_tokens`: R rows of width T on K ranks need at most
    ⌈⌈R/K⌉ / ⌊max_tokens/T⌋⌉ forward passes. Row counts of ranks differ by at most one; a rank gets rows of similar width.
    """
    budget = batch.max_tokens or max(rows.tokens_BT.size for rows in batch.microbatches)
    keys = [(m, row) for m, rows in enumerate(batch.microbatches) for row in range(len(rows.tokens_BT))]
    width = [rows.tokens_BT.shape[1] for rows in batch.microbatches]
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


def _together(microbatches: Sequence[Microbatch], keys: Sequence[tuple[int, int]]) -> Microbatch:
    """One microbatch of rows of several, each given by its microbatch and its row; padded to the widest."""
    chosen = [(m, [row for of, row in keys if of == m]) for m in dict.fromkeys(m for m, _ in keys)]
    parts = [_select_rows(microbatches[m], rows) for m, rows in chosen]
    if len(parts) == 1:
        return parts[0]
    num_T = max(rows.tokens_BT.shape[1] for rows in parts)
    first = np.cumsum([0, *(len(rows.tokens_BT) for rows in parts)])
    joined = {
        name: np.concatenate([getattr(rows, name) for rows in parts])
        for name in msgspec.structs.asdict(parts[0])
        if name.endswith("_N")
    }
    for name in ("predecessor_N", "bootstrap_N", "places_P"):
        joined[name] = np.concatenate(
            [
                _moved(getattr(rows, name), rows.tokens_BT.shape[1], num_T, row)
                for rows, row in zip(parts, first, strict=False)
            ]
        )
    pixels = [rows.pixels_I3HW for rows in parts if len(rows.pixels_I3HW)]
    return Microbatch(
        tokens_BT=np.concatenate([_widened(rows.tokens_BT, num_T) for rows in parts]),
        positions_BT=np.concatenate([_widened(rows.positions_BT, num_T) for rows in parts]),
        reach_BT=np.concatenate([_widened(rows.reach_BT, num_T, own=True) for rows in parts]),
        pixels_I3HW=np.concatenate(pixels) if pixels else parts[0].pixels_I3HW,
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


def _select_rows(microbatch: Microbatch, rows: list[int]) -> Microbatch:
    num_T = microbatch.tokens_BT.shape[1]
    new_row = np.full(len(microbatch.tokens_BT), -1)
    new_row[rows] = np.arange(len(rows))
    row_N = new_row[microbatch.predecessor_N // num_T]
    chosen = np.flatnonzero(row_N >= 0)
    picked = {
        name: values[rows] if name.endswith("_BT") else values[chosen]
        for name, values in msgspec.structs.asdict(microbatch).items()
        if name.endswith(("_BT", "_N"))
    }
    picked["predecessor_N"] = row_N[chosen] * num_T + picked["predecessor_N"] % num_T
    at = picked["bootstrap_N"]
    picked["bootstrap_N"] = np.where(at >= 0, row_N[chosen] * num_T + at % num_T, -1)
    return Microbatch(**picked, **picture_rows(microbatch.pixels_I3HW, microbatch.places_P, new_row, num_T))


def _row_lane(rows: Microbatch, row: int) -> int:
    return int(rows.lane_N[np.argmax(rows.predecessor_N // rows.tokens_BT.shape[1] == row)])


class Paths(NamedTuple):
    """G sequences of a microbatch side by side, the longest of L tokens, P tokens together.

    tokens_GL: int64, padded on the right. node_P: int64, index into B*T of each token. cell_P: int64, index into G*L of the
    same. pixels_I3HW, places_P: see `Microbatch`, with indexes into G*L.
    """

    tokens_GL: np.ndarray
    node_P: np.ndarray
    cell_P: np.ndarray
    pixels_I3HW: np.ndarray
    places_P: np.ndarray


def unpacked(rows: Microbatch) -> list[Paths]:
    """The paths of a microbatch, grouped by length. A group of several has no more positions than the microbatch,
    padding included.
    """
    found = sorted(_paths(rows), key=len, reverse=True)
    return [_side_by_side(rows, group) for group in _grouped(found, rows.tokens_BT.size)]


def _paths(rows: Microbatch) -> Iterator[np.ndarray]:
    """Nodes of each sequence that is not a prefix of another, as indexes into B*T."""
    num_T = rows.tokens_BT.shape[1]
    read = np.unique(np.concatenate([rows.predecessor_N, rows.bootstrap_N[rows.bootstrap_N >= 0]]))
    for node in read.tolist():
        row, at = divmod(node, num_T)
        reach_T = rows.reach_BT[row]
        # If nodes follow a node in its tree, some of them are read, since a sequence ends at its last sampled token.
        if reach_T[at] == at + 1:
            yield row * num_T + np.flatnonzero(reach_T[: at + 1] > at)


def _grouped(paths: Sequence[np.ndarray], budget: int) -> Iterator[Sequence[np.ndarray]]:
    while paths:
        count = max(1, budget // len(paths[0]))
        yield paths[:count]
        paths = paths[count:]


def _side_by_side(rows: Microbatch, group: Sequence[np.ndarray]) -> Paths:
    width = len(group[0])
    tokens_GL = np.zeros((len(group), width), np.int64)
    node_P = np.concatenate(group)
    cell_P = np.concatenate([g * width + np.arange(len(path)) for g, path in enumerate(group)])
    tokens_GL.reshape(-1)[cell_P] = rows.tokens_BT.reshape(-1)[node_P]
    pixels, places = _shown(rows, node_P, cell_P)
    return Paths(tokens_GL, node_P, cell_P, pixels, places)


def _shown(rows: Microbatch, node_P: np.ndarray, cell_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pictures of the paths, each as often as it is on one."""
    if not len(rows.pixels_I3HW):
        return rows.pixels_I3HW, rows.places_P
    number = np.full(rows.tokens_BT.size, -1)
    number[rows.places_P] = np.arange(len(rows.places_P))
    per_picture = len(rows.places_P) // len(rows.pixels_I3HW)
    here = np.flatnonzero(number[node_P] >= 0)
    which = number[node_P[here]][::per_picture] // per_picture
    return rows.pixels_I3HW[which], cell_P[here]
