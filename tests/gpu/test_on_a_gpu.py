"""What only a GPU can show: FlexAttention's kernels, products of bfloat16 with float32 sums, memory of long rows.

`make test-gpu` runs them. Each is a function of `tests.gpu.checks`, which the fast tests run on the CPU. Bounds in bfloat16 are
twice to three times what the same check finds on the CPU.
"""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.gpu import checks
from tests.gpu.checks import LARGE, TINY

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU, and torch sees none", allow_module_level=True)
pytestmark = pytest.mark.gpu
CUDA = "cuda"
LENGTHS = (8192, 16384, 32768, 65536)
MIB = 2**20


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.08)])
@pytest.mark.parametrize("path", ["dense", "flex", "unpacked"])
@pytest.mark.parametrize("scale", [TINY, LARGE], ids=["tiny", "large"])
def test_gradients_of_every_path_are_those_of_a_dense_mask_in_float32(tmp_path, scale, path, dtype, bound):
    assert checks.gradients_apart(CUDA, tmp_path, scale, dtype, path) < bound


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("dtype", "values_bound", "gradients_bound"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 1e-3, 2**-6)]
)
def test_the_chunked_head_is_that_of_float64(dtype, values_bound, gradients_bound, softcap):
    values, gradients = checks.head_apart(CUDA, LARGE, dtype, softcap)
    assert values < values_bound and gradients < gradients_bound


def test_steps_in_bfloat16_lose_what_float32_loses_on_the_cpu(tmp_path):
    assert checks.losses_apart(CUDA, tmp_path, TINY) < 2e-2


def test_weights_travel_from_a_learner_to_a_model(tmp_path):
    checks.check_weights_travel(CUDA, tmp_path, TINY)
    checks.check_tensors_are_copied(CUDA)


def test_a_saved_state_goes_on_where_it_was(tmp_path):
    assert checks.resumed_apart(CUDA, tmp_path, TINY) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.02)])
def test_activations_computed_again_give_the_same_gradients(tmp_path, dtype, bound):
    assert checks.checkpointed_apart(CUDA, tmp_path, LARGE, dtype) < bound


def test_memory_of_a_step_is_linear_in_the_length_of_a_row(tmp_path):
    found = checks.step_bytes(CUDA, checks.model_of(tmp_path, LARGE), LENGTHS, again=True, peak=checks.cuda_peak)
    per_token = {b: (found[b] - found[a]) / (b - a) for a, b in pairwise(LENGTHS)}
    assert per_token[65536] < 1.25 * per_token[16384], {num: size / MIB for num, size in found.items()}


def test_activations_computed_again_take_less_memory(tmp_path):
    model = checks.model_of(tmp_path, LARGE)
    kept, again = (
        checks.step_bytes(CUDA, model, (16384,), again=one, peak=checks.cuda_peak)[16384] for one in (False, True)
    )
    assert again < kept / 2


def test_rows_of_many_lengths_need_no_more_memory_than_the_longest(tmp_path):
    """torch compiles a kernel anew for a few shapes only; were it to give up, scores of T × T would be made."""
    lengths = tuple(4096 + 1111 * number for number in range(12))
    found = checks.step_bytes(CUDA, checks.model_of(tmp_path, LARGE), lengths, again=True, peak=checks.cuda_peak)
    assert found[lengths[-1]] < 1.5 * found[lengths[1]] * lengths[-1] / lengths[1], found


@pytest.mark.parametrize("stage", [2, 3])  # DeepSpeed takes no lower one in bfloat16: see trainer.learners.engines
def test_a_rank_of_zero_on_a_gpu_steps_as_one_process_on_the_cpu(tmp_path, stage):
    """What two ranks on CPUs are asked, of one on the card: NCCL instead of gloo, DeepSpeed's masters in its memory."""
    script = Path(__file__).parents[1] / "trainer" / "deepspeed_ranks.py"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
    argv = (*launcher, str(script), checks.model_of(tmp_path, TINY), str(stage), "bfloat16")
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), str(script.parents[2])])}
    ran = subprocess.run(argv, env=own, capture_output=True, text=True, timeout=600)
    assert f"stage {stage} agrees" in ran.stdout, ran.stderr[-3000:]
