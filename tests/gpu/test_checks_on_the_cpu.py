"""The checks of `make test-gpu` on the CPU at a tiny size: what they find there is known, so that a GPU alone is new."""

from itertools import count

import pytest
import torch

from tests.gpu import checks
from tests.gpu.checks import TINY

CPU = "cpu"


@pytest.mark.parametrize(
    ("path", "dtype", "bound"),
    [
        ("blocks", "float32", 1e-5),
        ("dense", "bfloat16", 0.04),
        ("blocks", "bfloat16", 0.04),
        ("unpacked", "bfloat16", 0.04),
    ],
)
def test_gradients_of_every_path_are_those_of_a_dense_mask_in_float32(tmp_path, path, dtype, bound):
    found = checks.gradients_apart(CPU, tmp_path, TINY, dtype, path)
    assert found < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_the_chunked_head_is_that_of_float64(dtype, bound):
    values, gradients = checks.head_apart(CPU, TINY, dtype, softcap=3.0)
    assert values < 1e-5 and gradients < bound


def test_steps_in_bfloat16_lose_what_float32_loses(tmp_path):
    found = checks.losses_apart(CPU, tmp_path, TINY)
    assert found < 2e-2


def test_weights_travel_from_a_learner_to_a_model(tmp_path):
    checks.check_weights_travel(CPU, tmp_path, TINY)
    checks.check_tensors_are_copied(CPU)


def test_a_saved_state_goes_on_where_it_was(tmp_path):
    assert checks.resumed_apart(CPU, tmp_path, TINY) == 0.0


def test_activations_computed_again_give_the_same_gradients(tmp_path):
    assert checks.checkpointed_apart(CPU, tmp_path, TINY, "float32") == 0.0


def test_a_step_is_measured_at_each_length(tmp_path):
    model = checks.model_of(tmp_path, TINY)
    asked = count()
    found = checks.step_bytes(CPU, model, (300, 600), again=True, peak=lambda: next(asked))
    assert found == {300: 1, 600: 3}
