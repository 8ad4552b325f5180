"""Recorded routing among packed tokens: the experts of each node of the trees.

Guarantee: a node that sequences share has one routing, that of the first of them in the tree's order, also where that one
recorded none and another did.
"""

from collections.abc import Sequence

import numpy as np

from schemas import Experience
from schemas.wire.routing import ABSENT, Experts, routing
from trainer.batch.tree import Tree


def no_experts() -> np.ndarray:
    """The experts of a batch that the model's own routers route."""
    return np.zeros((0, 0, 0, 0), np.int16)


def recorded(experiences: Sequence[Experience]) -> list[Experts | None]:
    """Of each sequence [num_tokens, layers, k]; None where none was recorded, or its shape is not that of the first that has
    one, and where no token has a ratio: a demonstration is not sampled, whatever it was made from. Raises BadFrame.
    """
    found = [routing(one) if any(span.ratio for span in one.spans) else None for one in experiences]
    shape = next((one.shape[1:] for one in found if one is not None), None)
    return [one if one is not None and one.shape[1:] == shape else None for one in found]


def of_rows(
    experts: Sequence[Experts | None], trees: Sequence[Tree], rows: Sequence[Sequence[int]], num_T: int
) -> np.ndarray:
    """The experts of a microbatch, [B, T, layers, k]. experts: of each sequence. rows: the trees of each."""
    shape = next((one.shape[1:] for one in experts if one is not None), None)
    if shape is None:
        return no_experts()
    found = np.full((len(rows), num_T, *shape), ABSENT, np.int16)
    for r, row in enumerate(rows):
        begin = 0
        for tree in (trees[index] for index in row):
            stops = [*tree.firsts[1:], tree.size]
            for s, first, stop in zip(tree.sequences, tree.firsts, stops, strict=True):
                own = experts[s]
                if own is not None and stop > first:
                    at = int(tree.position[first])
                    found[r, begin + first : begin + stop] = own[at : at + stop - first]
            begin += tree.size
    return found


def padded(experts_BTLk: np.ndarray, num_T: int) -> np.ndarray:
    """Rows of `num_T` tokens: what pads them was never routed."""
    found = np.full((len(experts_BTLk), num_T, *experts_BTLk.shape[2:]), ABSENT, np.int16)
    found[:, : experts_BTLk.shape[1]] = experts_BTLk
    return found


def laid_out(experts_BTLk: np.ndarray, node_P: np.ndarray, cell_P: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The experts of nodes, indexes into B*T, in cells of other rows, [*shape, layers, k]."""
    of_token = experts_BTLk.shape[2:]
    if not len(experts_BTLk):
        return experts_BTLk
    found = np.full((*shape, *of_token), ABSENT, np.int16)
    found.reshape(-1, *of_token)[cell_P] = experts_BTLk.reshape(-1, *of_token)[node_P]
    return found
