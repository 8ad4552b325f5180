"""Freed memory goes back to the machine."""

import subprocess
import sys

import pytest

MEASURED = """
import ctypes
from infra.cli.bench.peak import _status_bytes
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
before = _status_bytes("VmRSS")
blocks = [block(8 * 2**20) for _ in range(40)]
libc.malloc(64)
for one in blocks[:-1]:
    libc.free(one)
print((_status_bytes("VmRSS") - before) // 2**20)
"""


def held_mib(*, giving: bool) -> int:
    code = MEASURED.format(giving=giving)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages as Linux does")
def test_large_blocks_that_were_freed_are_given_back_though_later_ones_stay() -> None:
    assert held_mib(giving=False) > 200, "this allocator gives back by itself: the call is not needed"
    assert held_mib(giving=True) < 16
