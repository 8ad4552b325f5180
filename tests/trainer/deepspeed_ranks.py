"""What each rank of test_deepspeed_learner runs: arguments are the model folder and the ZeRO stage."""

import sys

import numpy as np
from trainer_samples import random_items

from infra.weights.tensors import Tensor, to_numpy
from schemas import BatchItem
from trainer.batch import TrainItem, pack
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.learners.torch import TorchLearner

LANES = {"usual": LaneConfig(loss="grpo", weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys(), sorted(set(one) ^ set(other))
    return max(float(np.abs(to_numpy(one[name]) - to_numpy(other[name])).max()) for name in one)


def poisoned(seed: int) -> list[TrainItem]:
    items = random_items(seed)
    item = items[3].item
    fields = {name: getattr(item, name) for name in item.__struct_fields__} | {"advantage": float("nan")}
    return [*items[:3], TrainItem(items[3].experience, BatchItem(**fields)), *items[4:]]


def main(model: str, stage: int) -> None:
    config = TrainerConfig(lanes=LANES, threads=1, learning_rate=1e-3)
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow()
        return
    alone = TorchLearner(model, config, device="cpu")
    assert furthest(learner.tensors(), alone.tensors()) == 0
    # 40 makes several microbatches; 10,000 a single one, whose few rows the ranks share.
    for step, max_tokens in enumerate((40, 10_000, 40)):
        batch = pack(random_items(step), max_tokens=max_tokens, version=5)
        stats, expected = (one.step(batch, learning_rate=1e-4, seed=step) for one in (learner, alone))
        assert stats.finite
        assert abs(stats.loss - expected.loss) < 1e-4, (stats.loss, expected.loss)
        assert abs(stats.grad_norm - expected.grad_norm) < 1e-3 * expected.grad_norm, (stats, expected)
        assert stats.values.keys() == expected.values.keys()
        assert all(
            abs(stats.values[name] - value) < 1e-3 * max(1, abs(value)) for name, value in expected.values.items()
        )
    assert furthest(learner.save(), alone.save()) < 2e-5
    one_row = pack(random_items(0)[:1], max_tokens=100)  # fewer rows than ranks
    assert (
        abs(
            learner.step(one_row, learning_rate=1e-4, seed=8).loss
            - alone.step(one_row, learning_rate=1e-4, seed=8).loss
        )
        < 1e-4
    )

    before = learner.save()
    stats = learner.step(pack(poisoned(4), max_tokens=40, version=5), learning_rate=1e-4, seed=4)
    assert not stats.finite
    assert furthest(learner.save(), before) == 0

    for one in (learner, alone):
        one.restore(before)
    batch = pack(random_items(9), max_tokens=40, version=5)
    for one in (learner, alone):
        assert one.step(batch, learning_rate=1e-4, seed=9).finite
    assert furthest(learner.save(), alone.save()) < 2e-5
    after = learner.save()
    learner.restore(before)
    learner.step(batch, learning_rate=1e-4, seed=9)
    assert furthest(learner.save(), after) < 1e-7

    assert learner.greedy_accuracy(batch) == alone.greedy_accuracy(batch)
    mine, other = learner.probe(((1, 5, 9),)), alone.probe(((1, 5, 9),))
    assert np.allclose(mine.logprobs, other.logprobs, atol=1e-4)
    learner.begin_phase("warmup")
    assert not any(name.startswith("adam/") for name in learner.save())
    learner.close()
    print(f"stage {stage} agrees")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
