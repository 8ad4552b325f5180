"""Packed trees taken apart again: one row for each sequence, for models that read nothing else.

Guarantee: every position that is read (where a token is sampled, or a state valued) is on exactly one path that counts for
it; what sequences share is computed in each of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from trainer.batch.batch import Microbatch
from trainer.batch.routing import laid_out


class Paths(NamedTuple):
    """G sequences of a microbatch side by side, the longest of L tokens, P tokens together.

    tokens_GL: int64, padded on the right. node_P: int64, index into B*T of each token. cell_P: int64, index into G*L of the
    same. pixels_I3HW, places_P, experts: see `Microbatch`, with indexes into G*L.
    """

    tokens_GL: np.ndarray
    node_P: np.ndarray
    cell_P: np.ndarray
    pixels_I3HW: np.ndarray
    places_P: np.ndarray
    experts: np.ndarray


def unpacked(one: Microbatch) -> list[Paths]:
    """All that is read of a microbatch, sequences of like length together, no more tokens at once than it has itself
    unless one sequence does.
    """
    found = sorted(_paths(one), key=len, reverse=True)
    return [_side_by_side(one, group) for group in _grouped(found, one.tokens_BT.size)]


def _paths(one: Microbatch) -> Iterator[np.ndarray]:
    """Nodes of each sequence that is not a prefix of another, as indexes into B*T."""
    num_T = one.tokens_BT.shape[1]
    read = np.unique(np.concatenate([one.predecessor_N, one.bootstrap_N[one.bootstrap_N >= 0]]))
    for node in read.tolist():
        row, at = divmod(node, num_T)
        reach_T = one.reach_BT[row]
        # Of what follows a node in its tree something is read, since a sequence ends at its last sampled token.
        if reach_T[at] == at + 1:
            yield row * num_T + np.flatnonzero(reach_T[: at + 1] > at)


def _grouped(paths: Sequence[np.ndarray], budget: int) -> Iterator[Sequence[np.ndarray]]:
    while paths:
        count = max(1, budget // len(paths[0]))
        yield paths[:count]
        paths = paths[count:]


def _side_by_side(one: Microbatch, group: Sequence[np.ndarray]) -> Paths:
    width = len(group[0])
    tokens_GL = np.zeros((len(group), width), np.int64)
    node_P = np.concatenate(group)
    cell_P = np.concatenate([g * width + np.arange(len(path)) for g, path in enumerate(group)])
    tokens_GL.reshape(-1)[cell_P] = one.tokens_BT.reshape(-1)[node_P]
    pixels, places = _shown(one, node_P, cell_P)
    return Paths(tokens_GL, node_P, cell_P, pixels, places, laid_out(one.experts_BTLk, node_P, cell_P, tokens_GL.shape))


def _shown(one: Microbatch, node_P: np.ndarray, cell_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pictures of the paths, each as often as it is on one."""
    if not len(one.pixels_I3HW):
        return one.pixels_I3HW, one.places_P
    number = np.full(one.tokens_BT.size, -1)
    number[one.places_P] = np.arange(len(one.places_P))
    per_picture = len(one.places_P) // len(one.pixels_I3HW)
    here = np.flatnonzero(number[node_P] >= 0)
    which = number[node_P[here]][::per_picture] // per_picture
    return one.pixels_I3HW[which], cell_P[here]
