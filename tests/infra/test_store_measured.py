"""What is counted of a store: bytes and seconds of requests that worked, and how often it failed."""

import pytest

from infra.observe.metrics import Metrics
from infra.store.digests import digest_of
from infra.store.measured import MeasuredStore
from infra.store.memory import MemoryStore
from schemas.errors import NotInStore, StoreError


class UnreachableStore(MemoryStore):
    def put(self, key: str, data: bytes) -> None:
        raise StoreError("503")

    def get(self, key: str) -> bytes:
        raise StoreError("503")


def test_bytes_and_seconds_are_counted_for_both_ways_and_an_absent_object_is_no_failure() -> None:
    metrics = Metrics("x")
    store = MeasuredStore(MemoryStore(), metrics)
    store.put("a", b"12345")
    assert (store.get("a"), store.read("a", 1, 2)) == (b"12345", b"23")
    assert store.get_hashed("a", "blake3") == (b"12345", digest_of((b"12345",)))
    with pytest.raises(NotInStore):
        store.get("b")
    found = metrics.counters()
    assert found["store_bytes{verb=put}"] == 5 and found["store_bytes{verb=get}"] == 12
    assert found["store_seconds{verb=get}"] > 0 and not [name for name in found if "failed" in name]


def test_a_store_that_fails_is_counted() -> None:
    metrics = Metrics("x")
    store = MeasuredStore(UnreachableStore(), metrics)
    for call in (lambda: store.put("a", b""), lambda: store.get("a"), lambda: store.read("a", 0, 1)):
        with pytest.raises(StoreError):
            call()
    assert metrics.counters() == {"store_failed{verb=put}": 1.0, "store_failed{verb=get}": 2.0}
