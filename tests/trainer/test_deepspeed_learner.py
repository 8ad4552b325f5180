"""ZeRO on several ranks is the same learner as one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_samples import random_items

from infra.demo.char_model import build_char_model
from infra.weights.tensors import save_tensors
from schemas.errors import ConfigError
from trainer.batch import pack
from trainer.config import TrainerConfig
from trainer.learners.torch import TorchLearner
from trainer.learners.zero import engine_settings

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))


def agree(model: str, stage: int, *what: str, ranks: int = 2) -> None:
    """Run deepspeed_ranks.py on so many ranks, and say what it said where it failed."""
    pytest.importorskip("deepspeed")
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)),
            *(str(HERE / "deepspeed_ranks.py"), model, str(stage), *what),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0 and f"stage {stage} agrees" in run.stdout, run.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_of_zero_take_the_steps_of_one_process(model, stage):
    agree(model, stage, "steps")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_losses_and_gradients_of_very_unequal_lengths_are_those_of_one_rank(model, stage):
    agree(model, stage, "unequal")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "stage"), [("proximal", 2), ("bound", 3), ("reference", 3), ("bfloat16", 2)])
def test_what_losses_want_comes_out_as_in_one_process(model, what, stage):
    agree(model, stage, what)


@pytest.mark.slow
def test_a_state_goes_on_under_either_learner_and_another_number_of_ranks(model, tmp_path):
    """torch → two ranks of ZeRO 3 → one rank of ZeRO 1 → torch, each step compared with one process."""
    config = TrainerConfig(threads=1)
    alone = TorchLearner(model, config, device="cpu")
    usual = [one for one in random_items(0) if one.item.lane == "usual"]
    alone.step(pack(usual, max_tokens=40, version=5), learning_rate=1e-4, seed=0)
    (tmp_path / "state").write_bytes(save_tensors(alone.save()))
    agree(model, 3, "states", str(tmp_path), ranks=2)
    agree(model, 1, "states", str(tmp_path), ranks=1)


def test_deepspeeds_json_is_laid_over_ours_table_by_table():
    config = TrainerConfig(gradient_clip=0.5)
    given = {"zero_optimization": {"overlap_comm": True}, "comms_logger": {"enabled": False}}
    found = engine_settings(config, 2, True, given)
    assert found["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    assert found["comms_logger"] == {"enabled": False} and found["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("stage", "json", "message"),
    [
        (4, {}, "stage: got 4"),
        (2, {"optimizer": {"type": "Adam"}}, "json.optimizer: got .* set trainer.learning_rate"),
        (2, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage: got 3, expected 2"),
    ],
)
def test_what_is_the_trainers_own_is_refused(stage, json, message):
    with pytest.raises(ConfigError, match=message):
        engine_settings(TrainerConfig(), stage, False, json)
    with pytest.raises(ConfigError, match="stage: got 0 with bfloat16"):
        engine_settings(TrainerConfig(dtype="bfloat16"), 0, False, {})
