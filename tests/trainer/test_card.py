"""Tensors that stay on the card: what is published of them is what the host publishes. The CPU stands for the card here."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.policies.share import HashedTensors, VersionTensors
from infra.policies.tensors import from_torch_all
from infra.store.memory import MemoryStore
from schemas.errors import PolicyRefused
from trainer.learners.card import xxh3
from trainer.learners.card.tensors import LEAST_BYTES, CardCopies, CardTensors
from trainer.learners.card.xxh3 import BLOCK_BYTES, STRIPE_BYTES, hash_on_card, mix_on_host

SIZE = LEAST_BYTES // 2 + 1000  # values of 16 bits
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_card(values: dict[str, torch.Tensor]) -> VersionTensors:
    found = CardTensors()
    found.add(values)
    return found


def on_host(values: dict[str, torch.Tensor]) -> VersionTensors:
    return HashedTensors(from_torch_all(values))


def first_values(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    large, other = (torch.randn(SIZE).mul_(0.02).to(dtype).view(-1, 8) for _ in range(2))
    return {"a": large, "b": other, "tied": other, "small": torch.randn(40).to(dtype), "ids": torch.arange(9)}


def after(values: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """The values with a share of `a` changed, and one of `b`, which is tied."""
    generator = torch.Generator().manual_seed(seed)
    a, b = values["a"].clone(), values["b"].clone()
    moved = torch.rand(a.shape, generator=generator) < share
    a[moved] = a[moved] * 1.01 + 1e-4
    b[5, 3] += 1
    return values | {"a": a, "b": b, "tied": b}


def run_of(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Versions that change little, much, not at all, and nearly all."""
    versions = [first_values(dtype)]
    for seed, share in enumerate((0.01, 0.3, 0.0, 0.9)):
        versions.append(after(versions[-1], share, seed))
    return versions


def published(versions, places) -> MemoryStore:
    """What is in the store once all versions are published. places: where each of them is held."""
    store, previous = MemoryStore(), None
    for number, (values, place) in enumerate(zip(versions, places, strict=True)):
        new = NewVersion(policy="main", token=1, version=number, parent=number - 1, step=number)
        held = place(values)
        event = publish(store, new, held, previous=previous, probe=None)
        assert PolicyFetcher(store, "main").fetch(event).tensors == from_torch_all(values)
        previous = held
    return store


def objects(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.keys("policies")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_published_from_the_card_is_to_the_byte_what_the_host_publishes(dtype):
    versions = run_of(dtype)
    host = published(versions, [on_host] * 5)
    card = published(versions, [on_card] * 5)
    assert objects(host) == objects(card)


def test_later_steps_do_not_reach_what_was_taken():
    values = first_values(torch.bfloat16)
    taken, expected = on_card(values), from_torch_all(values)
    for each in values.values():
        each.zero_()
    assert {name: taken[name] for name in values} == expected
    assert taken.entries == HashedTensors(expected).entries


@pytest.mark.parametrize("name", ["a", "tied", "small"])
def test_nothing_is_published_that_is_not_finite(name):
    values = first_values(torch.bfloat16)
    bad = values[name].clone()
    bad.view(-1)[7] = float("inf")
    held = on_card(values | {name: bad})
    assert held.not_finite == name
    new = NewVersion(policy="main", token=1, version=0, parent=-1, step=0)
    with pytest.raises(PolicyRefused, match=name):
        publish(MemoryStore(), new, held, previous=None, probe=None)


def test_what_is_not_of_a_layout_in_rows_is_copied_as_the_host_copies_it():
    turned = {
        "a": torch.randn(1000, 1100).to(torch.bfloat16).T,
        "part": torch.randn(3000, 800).to(torch.bfloat16)[:, :400],
    }
    taken, expected = on_card(turned), from_torch_all(turned)
    assert {name: taken[name] for name in turned} == expected
    assert taken.entries == HashedTensors(expected).entries


def test_a_learner_on_a_cpu_keeps_no_copies_on_a_card():
    copies = CardCopies(torch.device("cpu"), wanted=True)
    copies.stepped = True
    assert copies.begin(1000) is None


EDGES = (
    xxh3.LEAST_BYTES,
    STRIPE_BYTES * 5,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    2 * BLOCK_BYTES + STRIPE_BYTES,
)
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
    expected = [xxhash.xxh3_128_hexdigest(each.numpy().tobytes()) for each in tensors]
    assert hash_on_card(tensors, mix_on_host) == expected


@given(st.lists(st.tuples(st.integers(xxh3.LEAST_BYTES, 5000), st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
def test_it_is_the_hash_that_a_host_computes(made):
    data = [np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for size, seed in made]
    found = hash_on_card([torch.from_numpy(each) for each in data], mix_on_host)
    assert found == [xxhash.xxh3_128_hexdigest(each.tobytes()) for each in data]


def test_the_kernel_mixes_as_it_is_done_block_by_block():
    own = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run((sys.executable, "-c", KERNEL), env=own, capture_output=True, text=True, timeout=300)
    assert not ran.returncode, ran.stderr[-3000:]
