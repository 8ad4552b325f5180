"""Keys go where Kafka's Java client puts them."""

from aiokafka.partitioner import murmur2 as reference
from hypothesis import given
from hypothesis import strategies as st

from infra.log.partitioner import murmur2, partition_for

# Expected values of Kafka's own UtilsTest (signed there).
JAVA = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def test_the_hash_is_javas() -> None:
    assert {key: murmur2(key) for key in JAVA} == {key: value & 0xFFFFFFFF for key, value in JAVA.items()}


@given(st.binary(max_size=64))
def test_the_hash_is_the_clients(data: bytes) -> None:
    assert murmur2(data) == reference(data)


@given(st.binary(max_size=64), st.integers(1, 64))
def test_every_key_has_a_partition(key: bytes, count: int) -> None:
    assert 0 <= partition_for(key, count) < count
