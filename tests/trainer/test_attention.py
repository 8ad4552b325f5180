"""Attention over packed trees: every path against a dense mask, which path reads a row, and what it costs in memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import PEAK_MB
from tests.trainer.trainer_samples import long_microbatch, tiny_model
from trainer.learners import attention
from trainer.learners.attention import DENSE_TOKENS, Abilities, RowTrees, block_mask, dense_mask, reading_path, row_path
from trainer.learners.forward import PackedModel

WIDTH, HEADS, KEY_HEADS = 8, 4, 2


def random_tree(random: np.random.Generator, num_T: int, branching: float) -> tuple[np.ndarray, np.ndarray]:
    """reach and position of one row of trees laid out depth first, [T] each."""
    reach, position, path = np.zeros(num_T, np.int64), np.zeros(num_T, np.int64), []
    for node in range(num_T):
        while path and random.random() < branching:
            reach[path.pop()] = node
        position[node] = len(path)
        path.append(node)
    reach[path] = num_T
    return reach, position


def trees(seed: int, num_T: int, branching: float = 0.3, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    made = [random_tree(random, num_T, branching) for _ in range(rows)]
    return tuple(torch.from_numpy(np.stack(arrays)) for arrays in zip(*made, strict=True))


def visible(reach_BT: torch.Tensor, position_BT: torch.Tensor, window: int) -> torch.Tensor:
    """True where position i sees j by the promise, [B, T, T]."""
    mask = dense_mask(reach_BT)[:, 0]
    near = position_BT[:, :, None] - position_BT[:, None, :] < window
    return mask & near if window else mask


def plain_attention(query, key, value, mask, *, scaling, softcap=None, s_aux=None):
    """softmax(cap(QKᵀ·scale) with a sink beside) V, [B, T, H, D]."""
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


@pytest.mark.parametrize("num_T", [1, 257, 255, 256, 700])
@pytest.mark.parametrize("extra", ["", "window", "softcap", "sinks"])
def test_attention_in_blocks_and_its_gradients_are_those_of_a_dense_mask(num_T, extra):
    reach_BT, position_BT = trees(num_T, num_T, branching=0.02)
    window = 40 if extra == "window" else 0
    shapes = [(2, HEADS, num_T, WIDTH), (2, KEY_HEADS, num_T, WIDTH), (2, KEY_HEADS, num_T, WIDTH), (HEADS,)]
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float32, requires_grad=True) for shape in shapes]
    other = [each.detach().double().requires_grad_() for each in given]
    options = {"softcap": {"softcap": 2.0}, "sinks": {}}.get(extra, {})
    found, _ = attention.tree_attention(
        torch.nn.Identity(),
        *given[:3],
        None,
        tree=RowTrees(reach_BT, position_BT, "blocks"),
        scaling=0.3,
        sliding_window=window or None,
        **options | ({"s_aux": given[3]} if extra == "sinks" else {}),
    )
    mask = visible(reach_BT, position_BT, window)
    expected = plain_attention(
        *other[:3], mask, scaling=0.3, **options | ({"s_aux": other[3]} if extra == "sinks" else {})
    )
    assert (found - expected).abs().max() < 1e-5
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for each, exact in zip(given[: 4 if extra == "sinks" else 3], other, strict=False):
        assert (each.grad - exact.grad).abs().max() <= 1e-5 * max(1.0, float(exact.grad.abs().max()))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_T=st.integers(1, 600),
    branching=st.sampled_from([0.0, 0.005, 0.05, 0.5]),
    window=st.sampled_from([0, 1, 7, 130, 1000]),
)
def test_the_block_mask_of_flex_attention_shows_what_the_tree_shows(seed, num_T, branching, window):
    reach_BT, position_BT = trees(seed, num_T, branching)
    mask = block_mask(reach_BT, position_BT, window)
    expected = visible(reach_BT, position_BT, window)
    index = torch.arange(num_T)
    shown = mask.mask_mod(torch.arange(2)[:, None, None], 0, index[None, :, None], index[None, None, :])
    assert torch.equal(shown, expected)
    side = attention.FLEX_TOKENS
    for listed, num, whole in (
        (mask.kv_indices, mask.kv_num_blocks, False),
        (mask.full_kv_indices, mask.full_kv_num_blocks, True),
    ):
        for b in range(2):
            for a in range(num.shape[-1]):
                for c in listed[b, 0, a, : num[b, 0, a]].tolist():
                    tile = expected[b, a * side : (a + 1) * side, c * side : (c + 1) * side]
                    if whole:
                        assert tile.all()
                    expected[b, a * side : (a + 1) * side, c * side : (c + 1) * side] = False
    assert not expected.any(), "something that is seen lies in no block"


@pytest.mark.parametrize(
    ("device", "num_T", "family", "path"),
    [
        ("cpu", DENSE_TOKENS, Abilities(dense=True, tree=True), "dense"),
        ("cuda", DENSE_TOKENS, Abilities(dense=True, tree=True), "dense"),
        ("cpu", DENSE_TOKENS + 1, Abilities(dense=True, tree=True), "blocks"),
        ("cuda", DENSE_TOKENS + 1, Abilities(dense=True, tree=True), "flex"),
        ("cpu", 100, Abilities(dense=True, tree=True, window=100), "dense"),
        ("cpu", 101, Abilities(dense=True, tree=True, window=100), "blocks"),
        ("cpu", 101, Abilities(dense=True, tree=False, window=100), "unpacked"),
        ("cpu", 10, Abilities(dense=False, tree=True), "blocks"),
        ("cpu", DENSE_TOKENS + 1, Abilities(dense=True, tree=False), "dense"),
        ("cuda", 10, Abilities(dense=False, tree=False), "unpacked"),
    ],
)
def test_device_length_and_family_alone_choose_the_path(device, num_T, family, path):
    assert reading_path(device, num_T, family) == path


def gradients(packed: PackedModel, states: torch.Tensor) -> dict[str, torch.Tensor]:
    packed.module.zero_grad()
    torch.manual_seed(1)
    (states * torch.randn_like(states)).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in packed.module.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("num_T", [2, 33, 129, 257, 770, DENSE_TOKENS])
def test_rows_of_one_sequence_need_no_mask_and_keep_the_bits_they_had_under_one(tmp_path, key_heads, num_T):
    torch.set_num_threads(1)
    folder = tiny_model(tmp_path, "qwen3", num_key_value_heads=key_heads)
    packed = PackedModel(folder, dtype="float32", device="cpu")
    rows = long_microbatch(num_T, sequences=1)
    found = {}
    for path in ("dense", "causal"):
        states = packed._states(rows, path)
        found[path] = gradients(packed, states) | {"": states.detach()}
        packed.module.zero_grad()
    assert row_path(rows.reach_BT, "dense", packed._family) == "causal"
    for name, value in found["dense"].items():
        assert torch.equal(found["causal"][name], value), name


MEASURE = f"""{PEAK_MB}
import sys
import torch
from tests.trainer.trainer_samples import long_microbatch
from trainer.learners.forward import PackedModel

torch.set_num_threads(1)
folder, num_T, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
packed = PackedModel(folder, dtype="float32", device="cpu")
one = long_microbatch(num_T, sequences=8)
before = peak_mb()
with torch.no_grad():
    packed._states(one, path) if path == "dense" else packed.logprobs(one)
print(peak_mb() - before)
"""


def forward_mb(folder: str, num_T: int, path: str) -> float:
    """Peak memory of a forward above what the process held before, in a process of its own."""
    command = [sys.executable, "-c", MEASURE, folder, str(num_T), path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.full
def test_memory_of_a_forward_is_linear_in_the_length_of_a_row(tmp_path):
    folder = tiny_model(tmp_path, "qwen3", max_position_embeddings=32768)
    num_T, bound_mb = 8192, 80
    assert forward_mb(folder, num_T, "dense") > 3 * bound_mb
    short, long = (forward_mb(folder, num, "") for num in (num_T, 2 * num_T))
    assert short < bound_mb and long < 2 * bound_mb
