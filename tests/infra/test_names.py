"""The names of published tensors are those of a model's folder, whatever transformers makes of them in memory."""

from pathlib import Path

import pytest
import torch

from infra.model.model import folder_tensors, load_into, load_model, model_tensors
from tests.infra.tiny_families import build_family
from tests.tiny_models import FAMILIES, build_tiny_model

pytestmark = pytest.mark.slow  # importing transformers alone takes seconds


# A model of pictures keeps the names that it has in memory, which engines know; Qwen3-VL is refused.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llava", "internvl", "qwen2.5-vl", "qwen3-vl"}))
def test_a_model_is_published_under_the_names_of_its_folder(tmp_path: Path, family: str) -> None:
    folder = build_tiny_model(tmp_path / family, family)
    assert model_tensors(load_model(folder)) == folder_tensors(folder)


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_other_families_with_experts_are_too(tmp_path: Path, family: str) -> None:
    folder = build_family(tmp_path / family, family)
    assert model_tensors(load_model(folder)) == folder_tensors(folder)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_tensors_of_experts_one_by_one_are_loaded_into_the_parameter_that_holds_them_all(
    tmp_path: Path, family: str
) -> None:
    wanted = folder_tensors(build_family(tmp_path / "wanted", family, seed=1))
    model = load_model(build_family(tmp_path / "model", family))
    load_into(model, wanted)
    assert model_tensors(model) == wanted
    ids = torch.arange(9)[None]
    assert torch.equal(model(input_ids=ids).logits, load_model(tmp_path / "wanted")(input_ids=ids).logits)
