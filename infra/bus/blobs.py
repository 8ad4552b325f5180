"""Claim check: frames too large for the log lie in the object store under their hash; the record says where.

    claim    magic "HC" · format u8 · msgpack [key, sha256, size]

Guarantee: what is read back is what was written (size and sha256 are verified), and a claim reaches no key but
`blobs/<its hash>`. Blocking, as the store is: call from a thread.
"""

import hashlib

import msgspec

from infra.failpoint import reach
from infra.store import Store
from schemas.errors import BadFrame, NotInStore, UnknownMajor
from schemas.frame import MAX_TOTAL_BYTES

MAGIC = b"HC"
FORMAT = 1
PREFIX = "blobs/"


class Claim(msgspec.Struct, array_like=True, frozen=True):
    """Where a frame lies. Example: Claim("blobs/9f...", "9f...", 1048577)."""

    key: str
    sha256: str
    size: int


def is_claim(value: bytes) -> bool:
    """Whether a record's value is a claim instead of a frame."""
    return value[:2] == MAGIC


def deposit(store: Store, frame: bytes) -> bytes:
    """Store a frame; returns the value of the record that claims it. The same frame always has the same key."""
    sha256 = hashlib.sha256(frame).hexdigest()
    claim = Claim(PREFIX + sha256, sha256, len(frame))
    reach("blobs.before_upload")
    store.put(claim.key, frame)
    reach("blobs.after_upload")
    return MAGIC + bytes([FORMAT]) + msgspec.msgpack.encode(claim)


def read_claim(value: bytes) -> Claim:
    """What a claim says; raises BadFrame, UnknownMajor."""
    if len(value) > 3 and value[2] > FORMAT:
        raise UnknownMajor(f"claim of format {value[2]}; this reader knows {FORMAT}: upgrade readers first")
    try:
        claim = msgspec.msgpack.decode(value[3:], type=Claim)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadFrame(f"claim: {error}") from error
    if claim.key != PREFIX + claim.sha256 or not 0 <= claim.size <= MAX_TOTAL_BYTES:
        raise BadFrame(
            f"claim: got key {claim.key!r} of {claim.size} bytes, expected {PREFIX}<sha256>, at most 128 MiB"
        )
    return claim


def redeem(store: Store, value: bytes) -> bytes:
    """The frame a claim stands for.

    Raises BadFrame where it is gone or altered (trying again cannot help), StoreError where the store failed (it can).
    """
    claim = read_claim(value)
    try:
        size = store.size(claim.key)
        frame = store.get(claim.key) if size == claim.size else b""
    except NotInStore as error:
        raise BadFrame(f"claim: {claim.key} is not in the store") from error
    except ValueError as error:  # a key no store can hold
        raise BadFrame(f"claim: {error}") from error
    if size != claim.size or hashlib.sha256(frame).hexdigest() != claim.sha256:
        raise BadFrame(f"claim: {claim.key} has {size} bytes or another hash, expected {claim.size} bytes as hashed")
    return frame
