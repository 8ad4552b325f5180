"""XXH3 as a card computes it, here on the CPU: the kernel that mixes runs in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys

import numpy as np
import torch
import triton
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer.learners.card import mixing
from trainer.learners.card.xxh3 import BLOCK_BYTES, LEAST_BYTES, STRIPE_BYTES, hash_on_card, mix_on_host

EDGES = (LEAST_BYTES, STRIPE_BYTES * 5, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + STRIPE_BYTES)
KERNEL = """
import torch, xxhash
from trainer.learners.card.mixing import mix_on_card
from trainer.learners.card.xxh3 import hash_on_card
torch.manual_seed(0)
tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (300, 1025, 16 * 1024 + 1, 17 * 1024, 70_000)]
assert hash_on_card(tensors, mix_on_card) == [xxhash.xxh3_128_hexdigest(one.numpy().tobytes()) for one in tensors]
"""


def test_it_is_the_hash_that_a_host_computes_at_every_edge_of_a_block():
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in EDGES]
    expected = [xxhash.xxh3_128_hexdigest(one.numpy().tobytes()) for one in tensors]
    assert hash_on_card(tensors, mix_on_host) == expected


@given(st.lists(st.tuples(st.integers(LEAST_BYTES, 5000), st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
def test_it_is_the_hash_that_a_host_computes(made):
    data = [np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for size, seed in made]
    found = hash_on_card([torch.from_numpy(one) for one in data], mix_on_host)
    assert found == [xxhash.xxh3_128_hexdigest(one.tobytes()) for one in data]


def test_the_kernel_is_one_that_a_card_takes():
    """Compiled for an H100, which needs none."""
    arguments = dict.fromkeys(("sums", "first", "count", "start", "keys", "out"), "*i64")
    source = ASTSource(fn=mixing._mix, signature=arguments, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert made.asm["cubin"]


def test_the_kernel_mixes_as_it_is_done_block_by_block():
    own = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run((sys.executable, "-c", KERNEL), env=own, capture_output=True, text=True, timeout=300)
    assert not ran.returncode, ran.stderr[-3000:]
