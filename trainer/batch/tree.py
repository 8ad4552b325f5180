"""Trees of shared prefixes: the sequences of a group laid out depth first, what they share once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Branch(NamedTuple):
    """One sequence as it goes into a tree.

    sequence: index into the packed items. tokens: [num], its inputs. at_N: indexes of its sampled tokens. together: it may not
    be parted from the one before. numbers: [num] of the picture places there, -1 for a token of text; () for text alone.
    is_turn: it is a turn of a session, whose earlier turns take no room beside it.
    """

    sequence: int
    tokens: np.ndarray
    at_N: np.ndarray
    together: bool
    numbers: np.ndarray
    is_turn: bool = False


class Tree(NamedTuple):
    """Nodes in depth-first order.

    token: id of each node. position: its depth. reach: one past its last descendant. number: of a picture place, [0] for text
    alone. sequences: indexes into the packed items. predecessors: of each sequence the nodes before its sampled tokens. ends:
    of each its last input. firsts: of each the first node that no sequence before it has.
    """

    token: np.ndarray
    position: np.ndarray
    reach: np.ndarray
    number: np.ndarray
    sequences: list[int]
    predecessors: list[np.ndarray]
    ends: list[int]
    firsts: list[int]

    @property
    def size(self) -> int:
        """Nodes."""
        return len(self.token)


def in_order(branches: Sequence[Branch]) -> list[Branch]:
    """As they are laid out: those that share more are nearer to each other."""
    if len(branches) < 2:
        return list(branches)
    # Big-endian, so that bytes sort as tokens do.
    return sorted(branches, key=lambda one: (one.tokens.astype(">u4").tobytes(), one.sequence))


def grow(branches: Sequence[Branch], max_tokens: int) -> Iterator[Tree]:
    """The trees of one group: more than one where it has more than `max_tokens` nodes, and its longest turn too. branches:
    in order.
    """
    left = list(branches)
    while left:
        tree, count = _grow_one(left, max_tokens)
        yield tree
        left = left[count:]


def _grow_one(branches: Sequence[Branch], max_tokens: int) -> tuple[Tree, int]:
    """A tree of the first branches, and how many."""
    taken: list[tuple[Branch, int]] = []  # and how much of it is there already
    size = 0
    for one in branches:
        shared = _shared(taken[-1][0], one) if taken else 0
        room = max(max_tokens, len(one.tokens)) if one.is_turn else max_tokens  # alone it would take as much
        if taken and size + len(one.tokens) - shared > room and not one.together:
            break
        taken.append((one, shared))
        size += len(one.tokens) - shared
    reach, position, path = (np.zeros(size, np.int64) for _ in range(3))
    ranges = np.arange(size)
    predecessors, ends, firsts = [], [], []
    node = depth = 0  # nodes so far, and how many of `path` are those of the sequence before
    for one, shared in taken:
        num = len(one.tokens)
        stop = node + num - shared
        reach[path[shared:depth]] = node
        path[shared:num] = ranges[node:stop]
        position[node:stop] = ranges[shared:num]
        predecessors.append(path[one.at_N - 1])
        ends.append(int(path[num - 1]))
        firsts.append(node)
        node, depth = stop, num
    reach[path[:depth]] = node
    token = np.concatenate([one.tokens[shared:] for one, shared in taken]).astype(np.int64)
    number = np.concatenate([one.numbers[shared:] for one, shared in taken])
    sequences = [one.sequence for one, _ in taken]
    return Tree(token, position, reach, number, sequences, predecessors, ends, firsts), len(taken)


def _shared(one: Branch, other: Branch) -> int:
    """Inputs two sequences begin with alike."""
    num = min(len(one.tokens), len(other.tokens))
    differs = one.tokens[:num] != other.tokens[:num]
    first = int(differs.argmax())
    return first if differs[first] else num
