"""Pictures among packed tokens: their places in one sequence, in all of them, and in a microbatch.

Guarantee: a picture that sequences share with their prefix is computed once; every place of a picture is in the row that
holds it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np


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
    """The pixels of text alone."""
    return np.zeros((0, 3, 0, 0), np.float32)


def no_places() -> np.ndarray:
    """The places of text alone."""
    return np.zeros(0, np.int64)


def hang(pictures: Sequence[Pictures | None], start_S: np.ndarray, num_tokens: int) -> Gallery:
    """Number the places of the sequences that begin at `start_S` of `num_tokens`."""
    number = np.full(num_tokens, -1)
    shown = [(int(start), one) for start, one in zip(start_S, pictures, strict=True) if one is not None]
    if not shown:
        return Gallery(number, (), 1)
    at = np.concatenate([start + one.places_P for start, one in shown])
    number[at] = np.arange(len(at))
    pixels = tuple(each for _, one in shown for each in one.pixels)
    return Gallery(number, pixels, len(at) // len(pixels))


def of_nodes(gallery: Gallery, number: np.ndarray, index: np.ndarray) -> dict[str, np.ndarray]:
    """The picture fields of a microbatch. number: of each of its nodes. index: into B*T where the node lies."""
    nodes = np.flatnonzero(number >= 0)
    if not len(nodes):
        return {}
    nodes = nodes[np.argsort(number[nodes], kind="stable")]
    which = np.unique(number[nodes] // gallery.per_picture)
    return {"pixels_I3HW": np.stack([gallery.pixels[one] for one in which]), "places_P": index[nodes]}


def of_rows(pixels_I3HW: np.ndarray, places_P: np.ndarray, new_row: np.ndarray, num_T: int) -> dict[str, np.ndarray]:
    """The picture fields of some rows of a microbatch. new_row: of each row the row it becomes, -1 for none."""
    if not len(pixels_I3HW):
        return {"pixels_I3HW": pixels_I3HW, "places_P": places_P}
    places_IP = places_P.reshape(len(pixels_I3HW), -1)
    row_I = new_row[places_IP[:, 0] // num_T]
    kept = row_I >= 0
    moved = row_I[kept, None] * num_T + places_IP[kept] % num_T
    return {"pixels_I3HW": pixels_I3HW[kept], "places_P": moved.reshape(-1)}
