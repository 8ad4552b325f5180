"""Memory: freed blocks that go back to the machine, and the map that forgets."""

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
