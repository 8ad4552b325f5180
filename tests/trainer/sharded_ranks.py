"""What each rank of test_deepspeed_learner runs to check how models are opened, gradients summed and values learnt: see
deepspeed_ranks.py.
"""

import os

import msgspec
import numpy as np
import torch
from deepspeed_ranks import LANES, NEEDS, furthest
from trainer_samples import CRITIC, random_items, rewarded

from infra.policies.tensors import to_numpy
from infra.store.memory import MemoryStore
from schemas.errors import ConfigError
from trainer.batch.batch import Microbatch, pack
from trainer.config import TrainerConfig
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.learners.torch import TorchLearner


def check_opens(model: str, stage: int, dtype: str) -> None:
    """A model is opened as one process opens it: the same bits, read in the same way; and it computes with them."""
    config = TrainerConfig(lanes=NEEDS["reference"], threads=1, dtype=dtype)  # type: ignore[arg-type]
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    assert learner.tensors() == alone.tensors()
    assert learner.numerics()["attention"] == alone.numerics()["attention"]
    saved, expected = learner.save(), alone.save()
    assert saved.keys() == expected.keys() and furthest(saved, expected) == 0
    batch = pack(random_items(0), max_tokens=40, version=5)
    stats, expected_stats = (each.step(batch, learning_rate=1e-4, seed=0) for each in (learner, alone))
    assert stats.finite
    near = 2e-2 if dtype == "bfloat16" else 1e-4
    assert abs(stats.loss - expected_stats.loss) < near, (stats.loss, expected_stats.loss)
    learner.close()
    print(f"stage {stage} agrees")


def check_probed(model: str, stage: int) -> None:
    """After a forward that no backward follows, a rank holds its shards and small weights alone; the next step is as ever."""
    learner = DeepSpeedLearner(model, TrainerConfig(lanes=NEEDS["reference"], threads=1), stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    values = list(learner._model.module.parameters())
    small = sum(each.ds_numel for each in values if each.ds_persist)
    batch = pack(random_items(0), max_tokens=40, version=5)

    def held() -> int:
        return sum(each.numel() for each in values)  # one that is partitioned is empty

    probe = learner.probe(((1, 20, 21, 22),))
    assert held() == small < sum(each.ds_numel for each in values), "the probe's weights are still here"
    learner.log_distances(batch)
    assert held() == small
    assert learner.step(batch, learning_rate=1e-4, seed=0).finite
    assert learner.probe(((1, 20, 21, 22),)) != probe
    learner.close()
    print(f"stage {stage} agrees")


def check_sums(model: str, stage: int, offload: str) -> None:
    """Gradients of many microbatches in bfloat16 are summed in float32: the first moment after one step is a tenth of it."""
    config = TrainerConfig(lanes=LANES, threads=1, dtype="bfloat16", gradient_clip=1e9)
    learner = DeepSpeedLearner(model, config, stage=stage, offload=offload == "offload")
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    items = [item for seed in range(16) for item in random_items(seed) if item.item.lane == "usual"][:64]
    batch = pack(items, max_tokens=1, version=5)

    def gradient(each: DeepSpeedLearner | TorchLearner, microbatches: tuple[Microbatch, ...]) -> np.ndarray:
        """Nothing moves at this learning rate."""
        each.begin_phase("train")
        part = msgspec.structs.replace(batch, microbatches=microbatches)
        assert each.step(part, learning_rate=1e-30, seed=0).finite
        state = each.save()
        names = sorted(name for name in state if name.startswith("adam/exp_avg/"))
        return np.concatenate([to_numpy(state[name]).ravel() for name in names])

    parts = [gradient(alone, (rows,)) for rows in batch.microbatches]
    exact, rounded = np.zeros(len(parts[0])), torch.zeros(len(parts[0]), dtype=torch.bfloat16)
    for part in parts:
        exact += part
        rounded += torch.from_numpy(part).bfloat16()
    norm = float(np.linalg.norm(exact))
    far = float(np.linalg.norm(rounded.double().numpy() - exact)) / norm
    near = float(np.linalg.norm(gradient(learner, batch.microbatches) - exact)) / norm
    print(f"{len(parts)} microbatches: off by {near:.2g}, a sum in bfloat16 by {far:.2g}")
    limit = 2e-3 if stage == 2 and int(os.environ["WORLD_SIZE"]) > 1 else 1e-3  # see DeepSpeedLearner
    assert len(parts) == 64 and far > 5e-3 and near < limit
    learner.close()
    print(f"stage {stage} agrees")


def check_critic(model: str, stage: int) -> None:
    """A critic on several ranks is that of one process: begun as the warmed-up policy, stepped, refused, restored."""
    learner = DeepSpeedLearner(model, CRITIC, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, CRITIC, device="cpu")
    shown = pack([each for each in rewarded(7) if each.item.lane == "expert"], max_tokens=100)
    for each in (learner, alone):
        each.begin_phase("warmup")
        assert each.step(shown, learning_rate=1e-4, seed=0).finite
        each.begin_phase("train")
    assert furthest(learner.save(), alone.save()) < 2e-5
    for step, max_tokens in enumerate((30, 10_000)):
        batch = pack(rewarded(step), max_tokens=max_tokens, version=5)
        stats, expected = (each.step(batch, learning_rate=1e-4, seed=step) for each in (learner, alone))
        assert abs(stats.loss - expected.loss) < 1e-4, (stats.loss, expected.loss)
        assert stats.values.keys() == expected.values.keys() and "critic/value_loss" in stats.values
        assert all(
            abs(stats.values[name] - value) < 1e-3 * max(1, abs(value)) for name, value in expected.values.items()
        ), (stats.values, expected.values)
    before = learner.save()
    assert furthest(before, alone.save()) < 5e-5
    for seed in (2, 3):  # a value loss that is not finite, and then a gradient of the policy that is too large
        limit = {} if seed == 2 else {"max_grad_norm": 1e-9}
        batch = pack(rewarded(seed, 3e38 if seed == 2 else None), max_tokens=30, version=5)
        assert not learner.step(batch, learning_rate=1e-4, seed=seed, **limit).finite
        assert furthest(learner.save(), before) == 0
    batch = pack(rewarded(4), max_tokens=30, version=5)
    for each in (learner, alone):
        each.restore(before)
        assert each.step(batch, learning_rate=1e-4, seed=4).finite
    assert furthest(learner.save(), alone.save()) < 5e-5
    learner.close()
    print(f"stage {stage} agrees")


def check_refusal(model: str, stage: int) -> None:
    """What cannot be opened is refused by name, on every rank."""
    try:
        DeepSpeedLearner(model, TrainerConfig(lanes=LANES, threads=1), stage=stage)
    except ConfigError as error:
        print(f"stage {stage} agrees: {error}")
    else:
        raise AssertionError(model)
