"""Claim check: frames too large for the log lie in the object store under their hash; the record says where.

    claim    magic "HC" · format u8 · msgpack [key, sha256, size]

Guarantee: a frame is read back as it was written (size and sha256 are verified), and a claim reaches no key but
`blobs/<day>-<its hash>`. The day is the day of the deposit: a frame sent again on a later day is another object, so that the
old object can be removed (`blob_prune.py`) while the frame is sent again. Blocking, as the store is: call from a thread.
"""

import hashlib
import re
import time

import msgspec

from infra.observe.failpoint import reach
from infra.store.store import BLOBS, Store
from schemas.errors import BadFrame, NotInStore, UnknownMajor
from schemas.wire.frame import MAX_TOTAL_BYTES

MAGIC = b"HC"
FORMAT = 1
_KEY = re.compile(r"blobs/(\d{6})-([0-9a-f]{64})")


class Claim(msgspec.Struct, array_like=True, frozen=True):
    """Key and hash of a frame in the store. size: in bytes."""

    key: str
    sha256: str
    size: int


def is_claim(value: bytes) -> bool:
    """True if a record's value is a claim instead of a frame."""
    return value[:2] == MAGIC


def epoch_day(seconds: float) -> int:
    """Day of a moment, counted from the epoch as its seconds are."""
    return int(seconds // 86_400)


def day_of_key(key: str) -> int | None:
    """Day of the deposit of the frame under a key; None for images."""
    match = _KEY.fullmatch(key)
    return int(match[1]) if match else None


def deposit(store: Store, frame: bytes, *, day: int | None = None) -> bytes:
    """Store a frame; returns the value of the record that claims it. Within a day the same frame has the same key.

    day: of the sending, by default today.
    """
    sha256 = hashlib.sha256(frame).hexdigest()
    day = epoch_day(time.time()) if day is None else day
    claim = Claim(f"{BLOBS}{day:06d}-{sha256}", sha256, len(frame))
    reach("blobs.before_upload")
    store.put(claim.key, frame)
    reach("blobs.after_upload")
    return MAGIC + bytes([FORMAT]) + msgspec.msgpack.encode(claim)


def read_claim(value: bytes) -> Claim:
    """The decoded claim; raises BadFrame, UnknownMajor."""
    if len(value) > 3 and value[2] > FORMAT:
        raise UnknownMajor(f"claim of format {value[2]}; this reader knows {FORMAT}: upgrade readers first")
    try:
        claim = msgspec.msgpack.decode(value[3:], type=Claim)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadFrame(f"claim: {error}") from error
    match = _KEY.fullmatch(claim.key)
    if match is None or match[2] != claim.sha256 or not 0 <= claim.size <= MAX_TOTAL_BYTES:
        raise BadFrame(
            f"claim: got key {claim.key!r} of {claim.size} bytes, expected {BLOBS}<day>-<sha256>, at most 128 MiB"
        )
    return claim


def redeem(store: Store, value: bytes) -> bytes:
    """The frame that a claim names.

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
