"""Claim checks: what comes back is what was deposited, or a BadFrame."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.blobs import MAGIC, Claim, deposit, is_claim, read_claim, redeem
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import decode
from schemas.errors import BadFrame, UnknownMajor


def test_a_deposited_frame_is_redeemed_whole_under_one_key(store_dir: Path) -> None:
    store = DirectoryStore(store_dir)
    value = deposit(store, b"HR" + bytes(2_000_000))
    assert is_claim(value)
    assert len(value) < 200
    assert deposit(store, b"HR" + bytes(2_000_000)) == value
    assert redeem(store, value) == b"HR" + bytes(2_000_000)
    assert list(store.keys("blobs/")) == [read_claim(value).key]


def test_a_blob_that_is_gone_or_altered_is_a_bad_frame(store_dir: Path) -> None:
    store = DirectoryStore(store_dir)
    value = deposit(store, b"frame")
    key = read_claim(value).key
    for data in (b"fraud", b"frame and more"):
        store.put(key, data)
        with pytest.raises(BadFrame, match="expected 5 bytes as hashed"):
            redeem(store, value)
    store.delete(key)
    with pytest.raises(BadFrame, match="is not in the store"):
        redeem(store, value)


def test_a_claim_reaches_nothing_but_blobs(store_dir: Path) -> None:
    store = DirectoryStore(store_dir)
    store.put("keys/secret", b"x")
    for claim in (Claim("keys/secret", "keys/secret", 1), Claim("blobs/../keys/secret", "../keys/secret", 1)):
        with pytest.raises(BadFrame):
            redeem(store, MAGIC + b"\x01" + msgspec.msgpack.encode(claim))


def test_a_claim_cannot_announce_more_than_a_frame_may_hold() -> None:
    claim = Claim("blobs/" + "0" * 64, "0" * 64, 1 << 40)
    with pytest.raises(BadFrame, match="128 MiB"):
        read_claim(MAGIC + b"\x01" + msgspec.msgpack.encode(claim))


def test_a_claim_of_a_newer_format_stops_its_reader() -> None:
    with pytest.raises(UnknownMajor, match="upgrade readers first"):
        read_claim(MAGIC + b"\x02anything")


def test_the_frame_decoder_refuses_a_claim() -> None:
    with pytest.raises(BadFrame):
        decode(MAGIC + b"\x01" + msgspec.msgpack.encode(Claim("k", "s", 1)))


WHOLE = deposit(MemoryStore(), b"frame")


@given(st.binary(max_size=80))
def test_arbitrary_claims_raise_nothing_else(data: bytes) -> None:
    with pytest.raises((BadFrame, UnknownMajor)):
        read_claim(MAGIC + data)


@given(st.lists(st.tuples(st.integers(2, len(WHOLE) - 1), st.integers(0, 255)), max_size=4))
def test_altered_claims_reach_blobs_or_raise_nothing_else(changes: list[tuple[int, int]]) -> None:
    altered = bytearray(WHOLE)
    for place, value in changes:
        altered[place] = value
    try:
        claim = read_claim(bytes(altered))
    except (BadFrame, UnknownMajor):
        return
    assert claim.key.startswith("blobs/") and ".." not in claim.key and claim.key.endswith(claim.sha256)
