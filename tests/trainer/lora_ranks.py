"""What each rank of test_deepspeed_learner runs to check LoRA: see deepspeed_ranks.py."""

import numpy as np
from deepspeed_ranks import LANES, NEEDS, furthest, poisoned
from trainer_samples import random_items

from infra.store.memory import MemoryStore
from trainer.batch.batch import pack
from trainer.config import LoraConfig, TrainerConfig
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.learners.torch import TorchLearner


def check_lora(model: str, stage: int, what: str) -> None:
    """An adapter alone is in the optimizer, in the state and in a version, and its steps are those of one process."""
    dtype = "bfloat16" if what.endswith("bfloat16") else "float32"
    lanes = NEEDS["reference"] if what.endswith("reference") else LANES
    config = TrainerConfig(lanes=lanes, threads=1, dtype=dtype, lora=LoraConfig(rank=4))  # type: ignore[arg-type]
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    assert learner.tensors() == alone.tensors() and learner.save() == alone.save()
    moved = {id(value) for group in learner._engine.optimizer.param_groups for value in group["params"]}
    assert stage == 3 or len(moved) <= len(learner.tensors())
    learner.begin_phase("warmup"), alone.begin_phase("warmup")
    for step in range(4):
        if step == 2:
            learner.begin_phase("train"), alone.begin_phase("train")
        batch = pack(random_items(step), max_tokens=40, version=5)
        stats, expected = (each.step(batch, learning_rate=1e-3, seed=step) for each in (learner, alone))
        assert stats.finite and abs(stats.loss - expected.loss) < (3e-2 if dtype == "bfloat16" else 1e-4), (
            stats,
            expected,
        )
    saved, theirs = learner.save(), alone.save()
    numbers = [{name: item for name, item in state.items() if item.dtype != "U8"} for state in (saved, theirs)]
    assert furthest(*numbers) < (2e-2 if dtype == "bfloat16" else 1e-4), furthest(*numbers)
    assert saved["adapter"] == theirs["adapter"]
    alone.restore(saved)
    assert learner.tensors() == alone.tensors()
    assert np.allclose(
        learner.probe(((1, 5, 9),)).logprobs,
        alone.probe(((1, 5, 9),)).logprobs,
        atol=1e-4 if dtype == "float32" else 0.1,
    )
    before = learner.save()
    assert not learner.step(pack(poisoned(4), max_tokens=40, version=5), learning_rate=1e-4, seed=4).finite
    assert learner.save() == before
    learner.step(batch, learning_rate=1e-3, seed=9)
    learner.restore(before)
    assert learner.save() == before
    whole = TorchLearner(model, TrainerConfig(lanes=lanes, threads=1), device="cpu")
    try:
        learner.restore(whole.save())
    except ValueError as error:
        assert "it is full weights, expected an adapter" in str(error)
    else:
        raise AssertionError("a state of full weights")
    learner.close()
    print(f"stage {stage} agrees")
