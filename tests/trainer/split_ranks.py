"""What each rank of test_deepspeed_learner runs to check rows that ranks share: see deepspeed_ranks.py."""

from typing import Literal

import deepspeed
import numpy as np
import torch
from deepspeed_ranks import LIMIT_S, NEEDS, furthest, unequal
from trainer_samples import long_microbatch, random_items, random_routing, with_experts

from infra.store.memory import MemoryStore
from trainer.batch.batch import Microbatch, pack
from trainer.config import TrainerConfig
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.learners.forward import PackedModel
from trainer.learners.sequence_parallel import SequenceGroup, open_group, open_packed
from trainer.learners.torch import TorchLearner


def check_split(model: str, stage: int, size: int, replay: bool) -> None:
    """Rows that `size` ranks share: losses, gradients, and what else is asked of a learner, are those of one process."""
    routing: Literal["own", "replay"] = "replay" if replay else "own"
    config = TrainerConfig(
        lanes=NEEDS["penalty"], threads=1, gradient_clip=1e9, activation_checkpointing=stage == 3, routing=routing
    )
    learner = DeepSpeedLearner(model, config, stage=stage, sequence_parallel=size)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    uneven = False
    # Several rows and microbatches; then one row, of all trees.
    for step, items in enumerate((random_items(0), unequal(1), random_items(2)[:7])):
        given = with_experts(items, random_routing(items)) if replay else items
        batch = pack(given, max_tokens=(90, 301, 10_000)[step], version=5, replay=replay)
        uneven |= any(rows.tokens_BT.shape[1] % size for rows in batch.microbatches)
        stats, expected = (each.step(batch, learning_rate=1e-4, seed=step) for each in (learner, alone))
        assert abs(stats.loss - expected.loss) < 1e-5, (stats.loss, expected.loss)
        assert all(
            abs(stats.values[name] - value) < 1e-4 * max(1, abs(value)) for name, value in expected.values.items()
        )
        gradients = [{n: t for n, t in each.save().items() if "/exp_avg/" in n} for each in (learner, alone)]
        assert 10 * furthest(*gradients) < 1e-5, furthest(*gradients)
        logprobs = [each.log_distances(batch) for each in (learner, alone)]
        assert np.abs(logprobs[0] - logprobs[1]).max() < 1e-5 * batch.num_tokens
        assert learner.greedy_accuracy(batch) == alone.greedy_accuracy(batch)
        for each in (learner, alone):
            each.begin_phase("train")
        learner.restore(alone.save())
    assert uneven, "rows were padded"
    assert f"split over {size} ranks" in learner.numerics()["attention"]
    learner.close()
    print(f"stage {stage} agrees")


def kept_of(packed: PackedModel, rows: Microbatch) -> tuple[torch.Tensor, int]:
    """A microbatch's logprobs, and the bytes that their backward keeps, without the weights."""
    weights = {value.untyped_storage().data_ptr() for value in packed.module.parameters()}
    held: dict[int, tuple[torch.Tensor, int]] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = value, storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        logprob_N = packed.logprobs(rows)
    return logprob_N, sum(num_bytes for _, num_bytes in held.values())


def check_split_memory(model: str, stage: int, num_tokens: int) -> None:
    """What a long row's forward keeps for its backward: on a rank that has all of it, and on each of two that share it."""
    deepspeed.ops.__compatible_ops__ = {}  # as the learner says
    deepspeed.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)
    rows = long_microbatch(num_tokens, sequences=3)
    kept, found = [], []
    for group in (SequenceGroup(), open_group(2, LIMIT_S)):
        packed = open_packed(model, group, dtype="float32", device="cpu")
        logprob_N, num_bytes = kept_of(packed, rows)
        (gradient,) = torch.autograd.grad(logprob_N.sum(), [packed.module.get_input_embeddings().weight])
        torch.distributed.all_reduce(gradient if group.size > 1 else gradient.div_(2))
        kept.append(num_bytes)
        found.append((logprob_N.detach(), gradient))
    assert all((here - there).abs().max() < 1e-4 for here, there in zip(*found, strict=True)), found
    print(
        f"a row of {num_tokens} tokens keeps {kept[0] / 2**20:.1f} MiB on one rank, {kept[1] / 2**20:.1f} on one of two"
    )
    assert kept[1] < 0.55 * kept[0], kept
    torch.distributed.destroy_process_group()
    print(f"stage {stage} agrees")
