"""Trees of shared prefixes: the sequences of a group laid out depth first, with pictures at their nodes.

Guarantees: a prefix that sequences share is laid out once, a shared picture is computed once, and every place of a picture is
in the row that holds it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np


class Branch(NamedTuple):
    """One sequence as it goes into a tree.

    sequence: index into the packed items. tokens: [num], its inputs. at_N: indexes of its sampled tokens. together: it may not
    be parted from the one before. numbers: [num] of the picture places there, -1 for a token of text; () for text alone.
    is_turn: True for a turn of a session, whose earlier turns take no room in its row.
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
        return len(self.token)


def in_order(branches: Sequence[Branch]) -> list[Branch]:
    """Sort branches, so that branches with longer common prefixes are nearer to each other."""
    if len(branches) < 2:
        return list(branches)
    # Big-endian, so that bytes sort as tokens do.
    return sorted(branches, key=lambda branch: (branch.tokens.astype(">u4").tobytes(), branch.sequence))


def grow(branches: Sequence[Branch], max_tokens: int) -> Iterator[Tree]:
    """Yield the trees of a group in order; a group above `max_tokens` nodes and above its longest turn gives several trees."""
    left = list(branches)
    while left:
        tree, count = _grow_one(left, max_tokens)
        yield tree
        left = left[count:]


def _grow_one(branches: Sequence[Branch], max_tokens: int) -> tuple[Tree, int]:
    """A tree of the first branches, and how many."""
    taken: list[tuple[Branch, int]] = []  # and how much of it is there already
    size = 0
    for branch in branches:
        shared = _shared(taken[-1][0], branch) if taken else 0
        room = max(max_tokens, len(branch.tokens)) if branch.is_turn else max_tokens  # alone it would take as much
        if taken and size + len(branch.tokens) - shared > room and not branch.together:
            break
        taken.append((branch, shared))
        size += len(branch.tokens) - shared
    reach, position, path = (np.zeros(size, np.int64) for _ in range(3))
    ranges = np.arange(size)
    predecessors, ends, firsts = [], [], []
    node = depth = 0  # nodes so far, and how many nodes of `path` belong to the sequence before
    for branch, shared in taken:
        num = len(branch.tokens)
        stop = node + num - shared
        reach[path[shared:depth]] = node
        path[shared:num] = ranges[node:stop]
        position[node:stop] = ranges[shared:num]
        predecessors.append(path[branch.at_N - 1])
        ends.append(int(path[num - 1]))
        firsts.append(node)
        node, depth = stop, num
    reach[path[:depth]] = node
    token = np.concatenate([branch.tokens[shared:] for branch, shared in taken]).astype(np.int64)
    number = np.concatenate([branch.numbers[shared:] for branch, shared in taken])
    sequences = [branch.sequence for branch, _ in taken]
    return Tree(token, position, reach, number, sequences, predecessors, ends, firsts), len(taken)


def _shared(branch: Branch, other: Branch) -> int:
    """Inputs two sequences begin with alike."""
    num = min(len(branch.tokens), len(other.tokens))
    differs = branch.tokens[:num] != other.tokens[:num]
    first = int(differs.argmax())
    return first if differs[first] else num


class Pictures(msgspec.Struct, frozen=True):
    """The pictures at the image tokens of one sequence.

    names: hashes of its I images. places_P: int64, indexes of its tokens, picture after picture, equally many each. pixels:
    [3, H, W] float32 of each, as the vision tower takes it.
    """

    names: tuple[str, ...]
    places_P: np.ndarray
    pixels: tuple[np.ndarray, ...]


class Gallery(msgspec.Struct, frozen=True):
    """The pictures of all sequences, numbered in the order of the sequences.

    number: of each token of the sequences end to end, the number of its place over all pictures, -1 for a token of text.
    pixels: [3, H, W] of each. per_picture: places of one.
    """

    number: np.ndarray
    pixels: tuple[np.ndarray, ...]
    per_picture: int


def no_pixels() -> np.ndarray:
    return np.zeros((0, 3, 0, 0), np.float32)


def no_places() -> np.ndarray:
    return np.zeros(0, np.int64)


def hang(pictures: Sequence[Pictures | None], start_S: np.ndarray, num_tokens: int) -> Gallery:
    """Number the places of the sequences that begin at `start_S` of `num_tokens`."""
    number = np.full(num_tokens, -1)
    shown = [(int(start), each) for start, each in zip(start_S, pictures, strict=True) if each is not None]
    if not shown:
        return Gallery(number, (), 1)
    at = np.concatenate([start + pictures.places_P for start, pictures in shown])
    number[at] = np.arange(len(at))
    pixels = tuple(each for _, pictures in shown for each in pictures.pixels)
    return Gallery(number, pixels, len(at) // len(pixels))


def picture_fields(gallery: Gallery, number: np.ndarray, index: np.ndarray) -> dict[str, np.ndarray]:
    """The picture fields of a microbatch. number: of each of its nodes. index: into B*T where the node lies."""
    nodes = np.flatnonzero(number >= 0)
    if not len(nodes):
        return {}
    nodes = nodes[np.argsort(number[nodes], kind="stable")]
    which = np.unique(number[nodes] // gallery.per_picture)
    return {"pixels_I3HW": np.stack([gallery.pixels[picture] for picture in which]), "places_P": index[nodes]}


def picture_rows(
    pixels_I3HW: np.ndarray, places_P: np.ndarray, new_row: np.ndarray, num_T: int
) -> dict[str, np.ndarray]:
    """The picture fields of some rows of a microbatch. new_row: of each row the row it becomes, -1 for none."""
    if not len(pixels_I3HW):
        return {"pixels_I3HW": pixels_I3HW, "places_P": places_P}
    places_IP = places_P.reshape(len(pixels_I3HW), -1)
    row_I = new_row[places_IP[:, 0] // num_T]
    kept = row_I >= 0
    moved = row_I[kept, None] * num_T + places_IP[kept] % num_T
    return {"pixels_I3HW": pixels_I3HW[kept], "places_P": moved.reshape(-1)}
