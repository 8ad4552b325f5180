"""What LoRA publishes, beside full weights: a random Qwen3, real steps, real publications.

The model has Qwen3-0.6B's vocabulary and tied embeddings, and 103 M parameters. In bfloat16, as production trains: every
version is what `infra.policies.publish` writes, anchors and deltas as they fall.
"""

import tempfile
from pathlib import Path

import numpy as np

from infra.policies.adapter import Adapter
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import BatchItem, Span, make_experience

RANK = 16
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LENGTH, EPISODES = 24, 4
MB = 1e6


def run(*, vocabulary: int = 151_936, hidden: int = 512, layers: int = 8, steps: int = 3) -> dict[str, float]:
    """Bytes, and shares of them.

    full_version_mb: of an anchor of full weights, as a run without LoRA publishes it: tied matrices under both names.
    adapter_version_mb: the largest of version 0 and those after each step, rank 16 on all linear modules. share: of
    full_version_mb. share_of_parameters: of every parameter once. attention_share: with the four matrices of the attention
    alone. step_version_mb: of the last, which may be a delta. checkpoint_mb: an adapter's weights, moments and phase.
    """
    from infra.model.model import load_model, model_tensors

    with tempfile.TemporaryDirectory() as scratch:
        folder = built(Path(scratch) / "model", vocabulary, hidden, layers)
        whole = load_model(folder, dtype="bfloat16")
        parameters = sum(value.nbytes for value in whole.parameters())
        full = _published(MemoryStore(), 0, model_tensors(whole))
        del whole
        versions, checkpoint = _adapter(folder, ("all-linear",), steps)
        attention, _ = _adapter(folder, ATTENTION, 1)
    return {
        "parameters": parameters / 2,
        "full_version_mb": full / MB,
        "adapter_version_mb": max(versions) / MB,
        "share": max(versions) / full,
        "share_of_parameters": max(versions) / parameters,
        "attention_share": max(attention) / full,
        "step_version_mb": versions[-1] / MB,
        "checkpoint_mb": checkpoint / MB,
    }


def built(folder: Path, vocabulary: int, hidden: int, layers: int) -> Path:
    """A random Qwen3 in a folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from infra.model.model import no_progress_bars

    heads = hidden // 64
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), head_dim=64, max_position_embeddings=1024,
        tie_word_embeddings=True, dtype="bfloat16", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _adapter(folder: Path, targets: tuple[str, ...], steps: int) -> tuple[list[float], float]:
    """Bytes of version 0 and of the version after each step, and of a learner's state."""
    from trainer.batch.batch import TrainItem, pack
    from trainer.config import LaneConfig, LoraConfig, TrainerConfig
    from trainer.learners.torch import TorchLearner

    config = TrainerConfig(
        lanes={"usual": LaneConfig(loss="grpo")},
        dtype="bfloat16",
        lora=LoraConfig(rank=RANK, targets=targets),
        threads=0,
    )
    learner, store, random = TorchLearner(str(folder), config, device="cpu"), MemoryStore(), np.random.default_rng(0)
    assert learner.adapter is not None
    previous = learner.tensors()
    found = [_published(store, 0, previous, adapter=learner.adapter)]
    for step in range(steps):
        items = []
        for episode in range(EPISODES):
            name = f"lora-{step}.0.0-{episode}-0"
            experience = make_experience(
                id=name, group=f"lora-{step}.0", episode=episode, group_size=EPISODES, messages=(),
                tokens=random.integers(3, 1000, LENGTH).tolist(), logprobs=[-7.0] * (LENGTH // 2),
                spans=(Span(LENGTH - LENGTH // 2, LENGTH, 0),),
            )  # fmt: skip
            item = BatchItem(id=name, partition=0, offset=0, index=episode, lane="usual", advantage=1.5 - episode)
            items.append(TrainItem(experience, item))
        assert learner.step(pack(items, max_tokens=1000), learning_rate=1e-5, seed=step).finite
        tensors = learner.tensors()
        found.append(_published(store, step + 1, tensors, adapter=learner.adapter, previous=previous))
        previous = tensors
    return found, float(sum(one.num_bytes for one in learner.save().values()))


def _published(
    store: Store,
    version: int,
    tensors: dict[str, Tensor],
    *,
    adapter: Adapter | None = None,
    previous: dict[str, Tensor] | None = None,
) -> float:
    """Bytes that a version takes in the store."""
    new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version, adapter=adapter)
    return publish(store, new, tensors, previous=previous, probe=None).stats["bytes"]
