"""Digests of stored objects: what names an object by its content, and what its bytes are held against.

Guarantee: a digest says which algorithm made it, as in "blake3:9a", so none passes for one of another. BLAKE3 is written, which
one thread makes several times as fast as SHA-256; SHA-256, which earlier manifests have, is read as before.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from blake3 import blake3

WRITTEN = "blake3"
LETTERS = 32  # of a digest in an object's name: 128 bits


class Hasher(Protocol):
    """A digest that is being made."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Take the next bytes; other threads run meanwhile."""

    def hexdigest(self) -> str:
        """Of all bytes so far, hexadecimal."""


def hasher(algorithm: str) -> Hasher:
    """ValueError for an algorithm that is not known."""
    match algorithm:
        case "blake3":
            return blake3()
        case "sha256":
            return hashlib.sha256()
    raise ValueError(f"digest: got algorithm {algorithm!r}, expected blake3 or sha256: upgrade headrace here first")


def digest_of(pieces: Sequence[bytes | memoryview], algorithm: str = WRITTEN) -> str:
    """The digest of all pieces, one after the other.

    >>> digest_of([b"some ", b"bytes"]) == digest_of([b"some bytes"])
    True
    """
    made = hasher(algorithm)
    for piece in pieces:
        made.update(piece)
    return finished(algorithm, made)


def finished(algorithm: str, made: Hasher) -> str:
    """The digest of all that a hasher of this algorithm took."""
    return f"{algorithm}:{made.hexdigest()}"


def algorithm_of(digest: str) -> str:
    """The name before the colon; ValueError where it is not known."""
    algorithm = digest.partition(":")[0]
    hasher(algorithm)
    return algorithm


def name_of(digest: str) -> str:
    """How an object of this digest is named.

    >>> name_of("blake3:" + 64 * "9")
    'blake3-99999999999999999999999999999999'
    """
    algorithm, _, letters = digest.partition(":")
    return f"{algorithm}-{letters[:LETTERS]}"


def begins_with(name: str) -> str:
    """What the digest of an object of this name begins with: a name without an algorithm is of SHA-256.

    >>> begins_with("blake3-99"), begins_with("99")
    ('blake3:99', 'sha256:99')
    """
    algorithm, _, letters = name.rpartition("-")
    return f"{algorithm or 'sha256'}:{letters}"
