"""What a GPU is asked, as functions of the device: the fast tests run each on the CPU at a tiny size, so that none can rot.

On the CPU a long row is read in blocks of queries, on a GPU by FlexAttention: the same checks, another path.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

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
from trainer.learners.head import LinearLogprobs
from trainer.learners.torch import TorchLearner

LANES = {"usual": LaneConfig(loss="grpo", weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}


class CheckScale(msgspec.Struct, frozen=True):
    """How large a check is: of the random Qwen3, of its vocabulary where the head alone is meant, tokens of a row."""

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


def long_path(device: str) -> ReadingPath:
    """How rows are read there that are too long for a dense mask."""
    return "flex" if torch.device(device).type == "cuda" else "blocks"


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found - expected‖ / ‖expected‖."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def gradients_apart(device: str, folder: Path, scale: CheckScale, dtype: str, path: ReadingPath) -> float:
    """Of all weights, the furthest that a gradient by `path` in `dtype` is from that of a dense mask in float32."""
    model = model_of(folder, scale)
    one = long_microbatch(scale.row, sequences=4)
    expected = _gradients(PackedModel(model, dtype="float32", device=device), one, "dense")
    found = _gradients(PackedModel(model, dtype=dtype, device=device), one, path)
    assert found.keys() == expected.keys() and found
    return max(apart(found[name], gradient) for name, gradient in expected.items())


def _gradients(packed: PackedModel, one: Microbatch, path: ReadingPath) -> dict[str, torch.Tensor]:
    """Of a weighted sum of the logprobs."""
    weight_N = torch.from_numpy(np.random.default_rng(0).normal(size=len(one.target_N))).float().to(packed.device)
    torch.autograd.backward((packed._logprobs_by(one, path) * weight_N).sum())
    return {name: value.grad for name, value in packed.module.named_parameters() if value.grad is not None}


def head_apart(device: str, scale: CheckScale, dtype: torch.dtype, softcap: float = 0.0) -> tuple[float, float]:
    """How far the chunked head's values and its furthest gradient are from torch's own in float64."""
    torch.manual_seed(0)
    num_N, chunk = 48, 20
    hidden = torch.randn(num_N, scale.hidden).to(device, dtype).requires_grad_()
    weight = (torch.randn(scale.vocabulary, scale.hidden) / scale.hidden**0.5).to(device, dtype).requires_grad_()
    target_N = torch.randint(0, scale.vocabulary, (num_N,)).to(device)
    temperature_N = (0.5 + torch.rand(num_N)).to(device)
    slopes = torch.randn(2, num_N).to(device)
    found = torch.stack(LinearLogprobs.apply(hidden, weight, None, target_N, temperature_N, softcap, chunk))
    (found * slopes).sum().backward()
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    logits = exact[0] @ exact[1].T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    logprobs = torch.log_softmax(logits / temperature_N.double()[:, None], -1)
    entropy_N = -(logprobs.exp() * logprobs).sum(-1)
    expected = torch.stack((logprobs.gather(1, target_N[:, None]).squeeze(1), entropy_N))
    (expected * slopes).sum().backward()
    return (
        float((found - expected).detach().abs().max()),
        max(apart(mine.grad, other.grad) for mine, other in zip((hidden, weight), exact, strict=True)),
    )


def opened(device: str, model: str, dtype: str, **settings: object) -> TorchLearner:
    return TorchLearner(model, TrainerConfig(lanes=LANES, threads=0, dtype=dtype, **settings), device=device)  # type: ignore[arg-type]


def losses_apart(device: str, folder: Path, scale: CheckScale) -> float:
    """Of three steps in bfloat16 on the device, the furthest loss from that of float32 on the CPU."""
    model = model_of(folder, scale)
    learners = [opened(device, model, "bfloat16"), opened("cpu", model, "float32")]
    away = []
    for step in range(3):
        batch = pack(random_items(step), max_tokens=1000, version=5)
        mine, other = (one.step(batch, learning_rate=1e-4, seed=step) for one in learners)
        assert mine.finite and other.finite
        away.append(abs(mine.loss - other.loss))
    return max(away)


def check_weights_travel(device: str, folder: Path, scale: CheckScale) -> None:
    """Versions of a learner there, the first whole and the second as a delta, are loaded to the bit by a model there."""
    model = model_of(folder, scale)
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
    from infra.model.model import load_into, model_tensors

    load_into(reader.module, policy.tensors)
    assert model_tensors(reader.module) == policy.tensors
    assert policy.probe is not None
    for tokens, expected in zip(policy.probe.sequences, policy.probe.logprobs, strict=True):
        assert np.allclose(reader.sequence_logprobs(tokens), expected, atol=1e-5)


def check_tensors_are_copied(device: str) -> None:
    """Bits of every dtype that is trained come from the device as they lie there, and later changes do not reach them."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        held = torch.randn(300, 7, device=device).to(dtype)
        copied = from_torch(held.T)
        expected = held.T.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        held.zero_()
        assert bytes(copied.data) == expected and copied.shape == (7, 300)


def resumed_apart(device: str, folder: Path, scale: CheckScale) -> float:
    """How far a learner that went on from a saved state is from the one that saved it, a step later."""
    model = model_of(folder, scale)
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
    return max(float(np.abs(to_numpy(states[0][name]) - to_numpy(states[1][name])).max()) for name in names)


def checkpointed_apart(device: str, folder: Path, scale: CheckScale, dtype: str) -> float:
    """The furthest that a gradient is, whose activations were computed again, from one whose were kept."""
    model, one = model_of(folder, scale), long_microbatch(scale.row, sequences=4)
    found = []
    for again in (False, True):
        packed = PackedModel(model, dtype=dtype, device=device, activation_checkpointing=again)
        found.append(_gradients(packed, one, long_path(device)))
    return max(apart(found[1][name], found[0][name]) for name in found[0])


def row_batch(num_tokens: int) -> PackedBatch:
    """One row of so many tokens, as a step takes it."""
    one = long_microbatch(num_tokens, sequences=8, sampled=num_tokens // 32)
    lanes = {"lane_tokens": count_lanes((one,)), "lane_sequences": count_sequences((one,))}
    return PackedBatch(microbatches=(one,), num_sequences=8, version=5, **lanes)  # type: ignore[arg-type]


def step_bytes(
    device: str, model: str, lengths: Sequence[int], *, again: bool, peak: Callable[[], int]
) -> dict[int, int]:
    """Bytes at the peak of a step in bfloat16 on one row of each length. peak: since it was asked last. again: activations
    are computed again.
    """
    learner = opened(device, model, "bfloat16", activation_checkpointing=again)
    found = {}
    for num_tokens in lengths:
        peak()
        assert learner.step(row_batch(num_tokens), learning_rate=1e-6, seed=0).finite
        found[num_tokens] = peak()
    return found


def cuda_peak() -> int:
    """Most bytes that tensors took since it was asked last."""
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found
