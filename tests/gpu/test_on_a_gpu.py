"""Checks that need a GPU: FlexAttention's kernels, products of bfloat16 with float32 sums, memory of long rows.

`make test-gpu` runs the rows of `cuda`. The fast tests run the same checks on the CPU at a tiny size, where a long row is read
in blocks of queries instead of by FlexAttention. Bounds in bfloat16 are twice to three times what the CPU finds.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from infra.model.model import load_into, model_tensors
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import decode_manifest
from infra.policies.policy import Policy
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_torch, to_numpy
from infra.store.memory import MemoryStore
from tests.trainer.trainer_samples import long_microbatch, random_items, tiny_model
from trainer.batch.batch import Microbatch, PackedBatch, count_lanes, count_sequences, pack
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.attention import Path as ReadingPath
from trainer.learners.forward import PackedModel
from trainer.learners.head import Head, LinearLogprobs
from trainer.learners.torch import TorchLearner

CPU, CUDA = "cpu", "cuda"
ON_CARD = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
)


def cuda(*values: Any) -> Any:
    """Values of a test's row on the card."""
    return pytest.param(CUDA, *values, marks=ON_CARD)


on_card = pytest.mark.parametrize("device", [cuda()])
on_both = pytest.mark.parametrize("device", [CPU, cuda()])

LANES = {"usual": LaneConfig(loss="grpo", weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}


class CheckScale(msgspec.Struct, frozen=True):
    """Size of a check: of the random Qwen3, of its vocabulary for the head alone, and tokens of a row."""

    hidden: int = 32
    layers: int = 2
    vocabulary: int = 512
    row: int = 300


TINY = CheckScale()
LARGE = CheckScale(hidden=512, layers=4, vocabulary=151_936, row=4096)


def model_of(folder: Path, scale: CheckScale) -> str:
    """Heads of 16 at least: FlexAttention's kernels take no smaller ones."""
    return tiny_model(
        folder,
        "qwen3",
        hidden_size=scale.hidden,
        intermediate_size=3 * scale.hidden,
        num_hidden_layers=scale.layers,
        head_dim=max(16, scale.hidden // 4),
        initializer_range=0.2 * (32 / scale.hidden) ** 0.5,
        max_position_embeddings=2**17,
    )


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def _gradients(packed: PackedModel, one: Microbatch, path: ReadingPath) -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of the logprobs."""
    weight_N = torch.from_numpy(np.random.default_rng(0).normal(size=len(one.target_N))).float().to(packed.device)
    torch.autograd.backward((packed._logprobs_by(one, path) * weight_N).sum())
    return {name: value.grad for name, value in packed.module.named_parameters() if value.grad is not None}


GRADIENTS = [
    *((CPU, TINY, path, "float32", 1e-5) for path in ("blocks", "unpacked")),
    *((CPU, TINY, path, "bfloat16", 0.04) for path in ("dense", "blocks", "unpacked")),
    *(
        cuda(scale, path, dtype, bound)
        for scale in (TINY, LARGE)
        for path in ("dense", "flex", "unpacked")
        for dtype, bound in (("float32", 1e-3), ("bfloat16", 0.08))
    ),
]


@pytest.mark.parametrize(("device", "scale", "path", "dtype", "bound"), GRADIENTS)
def test_gradients_of_every_path_are_those_of_a_dense_mask_in_float32(tmp_path, device, scale, path, dtype, bound):
    """The furthest gradient of all weights."""
    model, one = model_of(tmp_path, scale), long_microbatch(scale.row, sequences=4)
    expected = _gradients(PackedModel(model, dtype="float32", device=device), one, "dense")
    found = _gradients(PackedModel(model, dtype=dtype, device=device), one, path)
    assert found.keys() == expected.keys() and found
    assert max(apart(found[name], gradient) for name, gradient in expected.items()) < bound


def head_apart(device: str, scale: CheckScale, dtype: torch.dtype, softcap: float, size: int) -> tuple[float, float]:
    """Distance of a sliced head's values, and of its furthest gradient, from torch's own in float64."""
    torch.manual_seed(0)
    num_N = 48
    hidden = torch.randn(num_N, scale.hidden).to(device, dtype).requires_grad_()
    weight = (torch.randn(scale.vocabulary, scale.hidden) / scale.hidden**0.5).to(device, dtype).requires_grad_()
    bias = torch.randn(scale.vocabulary).to(device, dtype).requires_grad_()
    target_N = torch.randint(0, scale.vocabulary, (num_N,)).to(device)
    temperature_N = (0.5 + torch.rand(num_N)).to(device)
    slopes = torch.randn(2, num_N).to(device)
    head = Head(torch.nn.Linear(1, 1), softcap=softcap, max_logits=1)
    found = torch.stack(LinearLogprobs.apply(hidden, weight, bias, target_N, temperature_N, head, size))
    (found * slopes).sum().backward(retain_graph=True)
    given, total = (hidden, weight, bias), torch.zeros_like(weight, dtype=torch.float32)
    head.total = lambda: total
    assert torch.autograd.grad((found * slopes).sum(), weight, allow_unused=True) == (None,)
    assert torch.equal(total.to(dtype), weight.grad)
    exact = [value.detach().double().requires_grad_() for value in given]
    logits = torch.nn.functional.linear(*exact)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logprobs = torch.log_softmax(logits / temperature_N.double()[:, None], -1)
    entropy_N = -(logprobs.exp() * logprobs).sum(-1)
    expected = torch.stack((logprobs.gather(1, target_N[:, None]).squeeze(1), entropy_N))
    (expected * slopes).sum().backward()
    return (
        float((found - expected).detach().abs().max()),
        max(apart(mine.grad, other.grad) for mine, other in zip(given, exact, strict=True)),
    )


HEADS = [
    *(
        (CPU, TINY, dtype, softcap, size, 1e-5, bound)
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8))
        for softcap in (0.0, 3.0)
        for size in (1, 20, 512, 1000)
    ),
    *(
        cuda(LARGE, dtype, softcap, 4000, *bounds)
        for softcap in (0.0, 3.0)
        for dtype, *bounds in ((torch.float32, 1e-4, 1e-4), (torch.bfloat16, 1e-3, 2**-6))
    ),
]


@pytest.mark.parametrize(("device", "scale", "dtype", "softcap", "size", "values_bound", "gradients_bound"), HEADS)
def test_the_head_in_slices_is_that_of_float64(device, scale, dtype, softcap, size, values_bound, gradients_bound):
    values, gradients = head_apart(device, scale, dtype, softcap, size)
    assert values < values_bound and gradients < gradients_bound


def opened(device: str, model: str, dtype: str, **settings: object) -> TorchLearner:
    return TorchLearner(model, TrainerConfig(lanes=LANES, threads=0, dtype=dtype, **settings), device=device)  # type: ignore[arg-type]


@on_both
def test_steps_in_bfloat16_lose_what_float32_loses_on_the_cpu(tmp_path, device):
    model = model_of(tmp_path, TINY)
    learners = [opened(device, model, "bfloat16"), opened(CPU, model, "float32")]
    for step in range(3):
        batch = pack(random_items(step), max_tokens=1000, version=5)
        mine, other = (learner.step(batch, learning_rate=1e-4, seed=step) for learner in learners)
        assert mine.finite and other.finite and abs(mine.loss - other.loss) < 2e-2


@on_both
def test_weights_travel_from_a_learner_to_a_model(tmp_path, device):
    """Versions of a learner, the first whole and the second as a delta, are loaded to the bit by a model."""
    model = model_of(tmp_path, TINY)
    learner, reader = opened(device, model, "bfloat16"), PackedModel(model, dtype="bfloat16", device=device)
    store = MemoryStore()
    fetcher, previous = PolicyFetcher(store, "main"), None
    for version in range(2):
        assert learner.step(pack(random_items(version), max_tokens=1000), learning_rate=1e-6, seed=version).finite
        tensors = learner.tensors()
        new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
        event = publish(store, new, tensors, previous=previous, probe=learner.probe(((1, 5, 9),)))
        policy = fetcher.fetch(event)
        assert policy.tensors == tensors
        check_loaded(reader, policy)
        previous = tensors
        assert [one.kind for one in decode_manifest(store.get(event.manifest)).sources][:1] == [
            ("anchor", "delta")[version]
        ]


def check_loaded(reader: PackedModel, policy: Policy) -> None:
    load_into(reader.module, policy.tensors)
    assert model_tensors(reader.module) == policy.tensors
    assert policy.probe is not None
    for tokens, expected in zip(policy.probe.sequences, policy.probe.logprobs, strict=True):
        assert np.allclose(reader.sequence_logprobs(tokens), expected, atol=1e-5)


@on_both
def test_bits_of_every_trained_dtype_are_copied_and_later_changes_do_not_reach_them(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        held = torch.randn(300, 7, device=device).to(dtype)
        copied = from_torch(held.T)
        expected = held.T.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        held.zero_()
        assert bytes(copied.data) == expected and copied.shape == (7, 300)


@pytest.mark.parametrize(("device", "bound"), [(CPU, 0.0), cuda(1e-5)])
def test_a_saved_state_goes_on_where_it_was(tmp_path, device, bound):
    model = model_of(tmp_path, TINY)
    first, second = (opened(device, model, "bfloat16") for _ in range(2))
    first.step(pack(random_items(0), max_tokens=1000), learning_rate=1e-4, seed=0)
    saved = first.save()
    second.restore(saved)
    assert second.save() == saved
    states: list[dict[str, Tensor]] = []
    for one in (first, second):
        assert one.step(pack(random_items(1), max_tokens=1000), learning_rate=1e-4, seed=1).finite
        states.append(one.save())
    names = [name for name in states[0] if name.startswith("model/")]
    assert max(float(np.abs(to_numpy(states[0][name]) - to_numpy(states[1][name])).max()) for name in names) <= bound


CHECKPOINTED = [(CPU, TINY, "float32", 0.0), cuda(LARGE, "float32", 1e-3), cuda(LARGE, "bfloat16", 0.02)]


@pytest.mark.parametrize(("device", "scale", "dtype", "bound"), CHECKPOINTED)
def test_activations_computed_again_give_the_same_gradients(tmp_path, device, scale, dtype, bound):
    model, one = model_of(tmp_path, scale), long_microbatch(scale.row, sequences=4)
    path: ReadingPath = "flex" if device == CUDA else "blocks"
    found = []
    for again in (False, True):
        packed = PackedModel(model, dtype=dtype, device=device, activation_checkpointing=again)
        found.append(_gradients(packed, one, path))
    assert max(apart(found[1][name], found[0][name]) for name in found[0]) <= bound


def row_batch(num_tokens: int) -> PackedBatch:
    """One row of so many tokens, as a step takes it."""
    one = long_microbatch(num_tokens, sequences=8, sampled=num_tokens // 32)
    lanes = {"lane_tokens": count_lanes((one,)), "lane_sequences": count_sequences((one,))}
    return PackedBatch(microbatches=(one,), num_sequences=8, version=5, **lanes)  # type: ignore[arg-type]


def step_bytes(device: str, model: str, lengths: Sequence[int], *, again: bool) -> dict[int, int]:
    """Bytes at the peak of a step in bfloat16 on one row of each length. again: activations are computed again."""
    learner = opened(device, model, "bfloat16", activation_checkpointing=again)
    found = {}
    for num_tokens in lengths:
        cuda_peak()
        assert learner.step(row_batch(num_tokens), learning_rate=1e-6, seed=0).finite
        found[num_tokens] = cuda_peak()
    return found


def cuda_peak() -> int:
    """Most bytes that tensors took since it was asked last."""
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


LENGTHS = (8192, 16384, 32768, 65536)


@on_card
def test_memory_of_a_step_is_linear_in_the_length_of_a_row(tmp_path, device):
    found = step_bytes(device, model_of(tmp_path, LARGE), LENGTHS, again=True)
    per_token = {b: (found[b] - found[a]) / (b - a) for a, b in pairwise(LENGTHS)}
    assert per_token[65536] < 1.25 * per_token[16384], found


@on_card
def test_activations_computed_again_take_less_memory(tmp_path, device):
    model = model_of(tmp_path, LARGE)
    kept, again = (step_bytes(device, model, (16384,), again=one)[16384] for one in (False, True))
    assert again < kept / 2


@on_card
def test_rows_of_many_lengths_need_no_more_memory_than_the_longest(tmp_path, device):
    """torch compiles a kernel anew for a few shapes only; were it to give up, scores of T × T would be made."""
    lengths = tuple(4096 + 1111 * number for number in range(12))
    found = step_bytes(device, model_of(tmp_path, LARGE), lengths, again=True)
    assert found[lengths[-1]] < 1.5 * found[lengths[1]] * lengths[-1] / lengths[1], found


@pytest.mark.parametrize(("device", "stage"), [cuda(2), cuda(3)])  # DeepSpeed takes no lower one in bfloat16
def test_a_rank_of_zero_on_a_gpu_steps_as_one_process_on_the_cpu(tmp_path, device, stage):
    """The checks of two ranks on CPUs, on one rank with a GPU: NCCL instead of gloo, DeepSpeed's masters in its memory."""
    script = Path(__file__).parents[1] / "trainer" / "deepspeed_ranks.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
    argv = (*launcher, str(script), model_of(tmp_path, TINY), str(stage), "bfloat16")
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), str(script.parents[2])])}
    ran = subprocess.run(argv, env=own, capture_output=True, text=True, timeout=600)
    assert f"stage {stage} agrees" in ran.stdout, ran.stderr[-3000:]
