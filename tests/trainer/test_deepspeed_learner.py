"""ZeRO on two ranks is the same learner as one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.demo.char_model import build_char_model

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_of_zero_take_the_steps_of_one_process(tmp_path, stage):
    pytest.importorskip("deepspeed")
    model = build_char_model(tmp_path / "char", seed=3)
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]),
    }
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *(str(HERE / "deepspeed_ranks.py"), str(model), str(stage)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0 and f"stage {stage} agrees" in run.stdout, run.stderr[-4000:]
