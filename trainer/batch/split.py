"""Dealing a packed batch out: to minibatches, or to ranks.

Guarantee: rows stay whole, so a sequence, and a pair, is in one part only; which rows go where is decided by their order
and the seed.
"""

import msgspec
import numpy as np

from trainer.batch.batch import Microbatch, PackedBatch, count_lanes, count_sequences
from trainer.batch.pictures import of_rows


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
    return Microbatch(**picked, **of_rows(one.pixels_I3HW, one.places_P, new_row, num_T))


def _row_lane(one: Microbatch, row: int) -> int:
    return int(one.lane_N[np.argmax(one.predecessor_N // one.tokens_BT.shape[1] == row)])
