"""Guarantees of every object store: one suite, every implementation, real S3 servers included."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from infra.cli.check.connect import object_fault
from infra.observe.metrics import Metrics
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.open import MeasuredStore
from infra.store.s3 import S3Store, fixed_keys
from infra.store.store import MAX_KEY_BYTES, Store
from schemas.errors import NotInStore
from tests import minio
from tests.infra.every_kind import Shelf
from tests.infra.test_store_s3 import limited
from tests.minio import MinioServer
from tests.starts import content_name

MakeStore = Callable[[str], Store]  # from a prefix: stores of one maker share their bucket or folder


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


STORES = ["memory", "plugin", "directory", "measured", "moto", pytest.param("minio", marks=pytest.mark.slow)]


@pytest.fixture(params=STORES)
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    bucket = f"contract-{abs(hash(request.node.name)) % 10**12}"
    match request.param:
        case "memory":
            shared: dict[str, Store] = {}
            return lambda prefix: shared.setdefault(prefix, MemoryStore())
        case "plugin":
            shelves: dict[str, Store] = {}
            return lambda prefix: shelves.setdefault(prefix, Shelf())
        case "directory":
            return lambda prefix: DirectoryStore(tmp_path / "store" / prefix)
        case "measured":
            return lambda prefix: MeasuredStore(DirectoryStore(tmp_path / "store" / prefix), Metrics("contract"))
        case "moto":
            endpoint = request.getfixturevalue("moto_endpoint")
            server = MinioServer(endpoint, "test", "test-secret")
            return lambda prefix: server.store(bucket, prefix)
        case _:
            server = request.getfixturevalue("minio_server")
            return lambda prefix: server.store(bucket, prefix)


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store("app")


@pytest.mark.parametrize("size", [0, 1, 70_000, 6_000_000])
def test_an_object_named_by_its_content_comes_back_and_goes_with_its_deletion(store: Store, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    key = f"policies/main/17/anchors/3/{content_name(data)}.safetensors"
    store.put(key, data)
    assert store.get(key) == store.get(key) == data
    assert store.read(key, size // 2, 9) == data[size // 2 : size // 2 + 9] and store.size(key) == size
    store.delete(key)
    with pytest.raises(NotInStore):
        store.get(key)


@pytest.mark.slow
def test_an_object_larger_than_one_part_comes_back_as_it_was_put(store: Store) -> None:
    data = np.random.default_rng(0).bytes(20 * 1024 * 1024)
    store.put("large", memoryview(data))
    assert store.get("large") == data


def test_an_absent_key_is_not_in_store(store: Store) -> None:
    store.put("folder/key", b"x")
    for absent in ("nothing", "folder", "folder/key2", "folder/key/below", "other/key"):
        with pytest.raises(NotInStore, match=absent):
            store.get(absent)
        with pytest.raises(NotInStore, match=absent):
            store.size(absent)


def test_a_range_of_an_object_is_read_without_the_rest(store: Store) -> None:
    store.put("a/1", b"0123456789")
    store.put("a/empty", b"")
    assert store.read("a/1", 0, 10) == b"0123456789"
    assert store.read("a/1", 3, 4) == b"3456"
    assert store.read("a/1", 8, 100) == b"89"
    assert store.read("a/1", 3, 0) == store.read("a/1", 10, 5) == store.read("a/1", 99, 5) == b""
    assert store.read("a/empty", 0, 5) == b""
    with pytest.raises(NotInStore, match="absent"):
        store.read("absent", 0, 5)


def test_deleting_twice_is_fine_and_leaves_neighbours(store: Store) -> None:
    store.put("a/1", b"x")
    store.put("a/2", b"y")
    for _ in range(2):
        store.delete("a/1")
    with pytest.raises(NotInStore):
        store.get("a/1")
    assert list(store.keys("")) == ["a/2"]


def test_keys_are_sorted_and_begin_with_the_prefix(store: Store) -> None:
    keys = ["a/1", "a/10", "a/2", "a-b", "ab/c/d", "b", "ä/ö"]
    for key in reversed(keys):
        store.put(key, b"x")
    assert list(store.keys("")) == sorted(keys)
    assert list(store.keys("a/")) == ["a/1", "a/10", "a/2"]
    assert list(store.keys("a/1")) == ["a/1", "a/10"]
    assert list(store.keys("ab/c")) == ["ab/c/d"]
    assert list(store.keys("zzz/")) == []


BAD_KEYS = [
    "", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", ".hidden", "a/.hidden/b", "a\\b", "a\nb", "a\0b",
    "x" * 256, "y/" * 500 + "z", "a" * (MAX_KEY_BYTES + 1), "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_some_store_could_not_hold_is_refused(store: Store, key: str) -> None:
    for call in (
        lambda: store.put(key, b""),
        lambda: store.get(key),
        lambda: store.size(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(ValueError, match="key"):
            call()


def test_stores_with_different_prefixes_do_not_see_each_other(make_store: MakeStore) -> None:
    first, second = make_store("one"), make_store("two/deep")
    first.put("k", b"1")
    second.put("k", b"2")
    assert (first.get("k"), second.get("k")) == (b"1", b"2")
    assert list(first.keys("")) == list(second.keys("")) == ["k"]


def test_a_reader_sees_an_object_whole_while_it_is_replaced(store: Store) -> None:
    contents = [bytes([value]) * 300_000 for value in range(8)]
    store.put("k", contents[0])
    writer = threading.Thread(target=lambda: [store.put("k", content) for content in contents])
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(store.get("k"))
    writer.join()
    assert all(data in contents for data in seen)
    assert store.get("k") == contents[-1]


def test_bytes_and_seconds_are_counted_both_ways_and_an_absent_object_is_no_failure() -> None:
    metrics = Metrics("x")
    store = MeasuredStore(MemoryStore(), metrics)
    store.put("a", b"12345")
    assert (store.get("a"), store.read("a", 1, 2)) == (b"12345", b"23")
    with pytest.raises(NotInStore):
        store.get("b")
    found = metrics.counters()
    assert found["store_bytes{verb=put}"] == 5 and found["store_bytes{verb=get}"] == 7
    assert found["store_seconds{verb=get}"] > 0 and not [name for name in found if "failed" in name]


def test_check_connect_finds_every_right_and_leaves_nothing_behind(store: Store) -> None:
    assert object_fault(store, "checks/check-1") == "" and list(store.keys("")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allowed", "denied"),
    [
        (("GetObject", "PutObject"), ("list", "delete")),
        (("GetObject", "ListBucket"), ("put",)),
        (("PutObject", "ListBucket", "DeleteObject"), ("get",)),
    ],
)
def test_check_connect_names_what_a_policy_of_the_bucket_does_not_allow(
    minio_server: MinioServer, allowed: tuple[str, ...], denied: tuple[str, ...]
) -> None:
    whole = minio_server.store("policy", "app")
    role = limited(minio_server, allowed, "policy")
    credentials = fixed_keys(role.access_key, role.secret_key, role.session_token)
    confined = S3Store(
        "policy", prefix="app", endpoint=minio_server.endpoint, credentials=credentials, region=minio.REGION
    )
    said = object_fault(confined, "checks/check-1")
    assert [verb for verb in ("put", "list", "get", "delete") if f"may not {verb}" in said] == list(denied)
    assert said.count("AccessDenied") == len(denied) and role.secret_key not in said
    whole.delete("checks/check-1")
