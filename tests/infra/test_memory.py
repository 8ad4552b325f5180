"""Memory: freed blocks, shared heaps, seldom searches, and the map that forgets."""

import os
import subprocess
import sys

import pytest

from infra.newest import Newest

MEASURED = """
import ctypes
from tests.memory import status_bytes
from infra.roles.memory import give_back_large_blocks
if {giving}:
    assert give_back_large_blocks()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def block(num_bytes):
    at = libc.malloc(num_bytes)
    ctypes.memset(at, 1, num_bytes)
    return at
libc.free(block(31 * 2**20))  # of a size that glibc remembers
before = status_bytes("VmRSS")
blocks = [block(8 * 2**20) for _ in range(40)]
libc.malloc(64)
for one in blocks[:-1]:
    libc.free(one)
print((status_bytes("VmRSS") - before) // 2**20)
"""


def held_mib(*, giving: bool) -> int:
    code = MEASURED.format(giving=giving)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages as Linux does")
def test_large_blocks_that_were_freed_are_given_back_though_later_ones_stay() -> None:
    assert held_mib(giving=False) > 200, "this allocator gives back by itself: the call is not needed"
    assert held_mib(giving=True) < 16


THREADS = 8
COUNTED = """
import ctypes, os, sys, tempfile, threading
from infra.roles.memory import share_heaps
if {sharing}:
    assert share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
all_there = threading.Barrier({threads})
def allocate():
    all_there.wait()
    libc.malloc(100_000)
    all_there.wait()
threads = [threading.Thread(target=allocate) for _ in range({threads})]
for one in threads:
    one.start()
for one in threads:
    one.join()
libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "info")
    file = libc.fopen(path.encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(open(path).read().count("<heap nr="))
"""


def heaps(*, sharing: bool) -> int:
    code = COUNTED.format(sharing=sharing, threads=THREADS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


SEARCHED = """
import gc
from infra.roles.memory import NEW_OBJECTS, search_seldom
if {seldom}:
    search_seldom()
gc.collect()
searches = []
gc.callbacks.append(lambda phase, info: phase == "start" and searches.append(info["generation"]))
held = [[] for _ in range(NEW_OBJECTS // 2)]
print(len(searches))
"""


def searches(*, seldom: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SEARCHED.format(seldom=seldom)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_the_entry_used_longest_ago_is_forgotten() -> None:
    newest = Newest[str, int](2)
    newest.put("a", 1)
    newest.put("b", 2)
    assert newest.get("a") == 1
    newest.put("c", 3)
    assert [*newest] == ["a", "c"] and newest.get("b") is None and "b" not in newest


def test_sizes_never_add_up_to_more_than_the_bound() -> None:
    newest = Newest[str, bytes](max_size=10, size=len)
    newest.put("a", bytes(4))
    newest.put("b", bytes(4))
    newest.put("a", bytes(6))
    assert [*newest] == ["b", "a"] and newest.total_size == 10
    newest.put("c", bytes(3))
    assert [*newest] == ["a", "c"] and newest.total_size == 9
    newest.put("too large", bytes(11))
    assert len(newest) == 0 and newest.total_size == 0
