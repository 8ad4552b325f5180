"""A model that is loaded one part after the other is, to the bit, what transformers loads whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.model.model import load_model
from infra.model.parts import FolderParts, hollow_model
from infra.policies.tensors import from_torch, load_tensors, save_tensors
from schemas.errors import ConfigError
from tests.infra.tiny_families import build_family
from tests.tiny_models import FAMILIES, build_tiny_model


def loaded(folder: Path | str, dtype: str = "float32") -> torch.nn.Module:
    module: Any = hollow_model(folder, dtype=dtype)
    parts = FolderParts(module, folder, dtype=dtype)
    names = [name for part in parts for name in part]
    assert len(set(names)) == len(names)
    assert {*names} | parts.tied == set(module.state_dict())
    module.tie_weights(missing_keys=set(parts.tied), recompute_mapping=False)
    return module


def assert_same(module: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Parameters, saved buffers and those that no folder holds, and which parameters are one."""
    for mine, theirs in (
        (dict(module.named_parameters()), dict(plain.named_parameters())),
        (dict(module.named_buffers()), dict(plain.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value.requires_grad == theirs[name].requires_grad
            assert from_torch(value) == from_torch(theirs[name]), name
    assert not module.training


FLOAT32 = [(family, "float32") for family in sorted(FAMILIES.keys() - {"qwen2.5-vl", "qwen3-vl"})]


@pytest.mark.parametrize(
    ("family", "dtype"), [*FLOAT32, *((one, "bfloat16") for one in ("gpt-oss", "llava", "qwen3-moe"))]
)
def test_the_weights_of_a_family_are_those_of_from_pretrained(tmp_path, family, dtype):
    folder = build_tiny_model(tmp_path / family, family)
    assert_same(loaded(folder, dtype), load_model(folder, dtype=dtype))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_so_are_those_of_other_families_with_experts(tmp_path, family):
    folder = build_family(tmp_path / family, family)
    assert_same(loaded(folder), load_model(folder))


def test_tied_embeddings_are_one_parameter_whichever_of_the_names_a_folder_holds(tmp_path):
    folder = build_tiny_model(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    plain = load_model(folder)
    held = load_tensors((folder / "model.safetensors").read_bytes())
    embeddings = held["model.embed_tokens.weight"]
    head = {"lm_head.weight": embeddings}
    others = {name: value for name, value in held.items() if name != "model.embed_tokens.weight"}
    for number, tensors in enumerate((held, held | head, others | head)):
        other = shutil.copytree(folder, tmp_path / str(number))  # what transformers loads may still be the file
        (other / "model.safetensors").write_bytes(save_tensors(tensors, {"format": "pt"}))
        module: Any = loaded(other)
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert_same(module, plain)
    head = {"lm_head.weight": from_torch(torch.zeros(embeddings.shape))}
    (other / "model.safetensors").write_bytes(save_tensors(held | head, {"format": "pt"}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        loaded(other)


def test_a_folder_of_many_files_is_read_through_its_index(tmp_path):
    plain: Any = load_model(build_tiny_model(tmp_path / "one", "qwen3-moe"))
    plain.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert_same(loaded(tmp_path / "many"), plain)
    next((tmp_path / "many").glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="is missing"):
        loaded(tmp_path / "many")


def test_what_a_folder_lacks_or_holds_in_another_shape_is_named(tmp_path):
    folder = build_tiny_model(tmp_path / "m", "qwen3")
    held = load_tensors((folder / "model.safetensors").read_bytes())
    name = "model.layers.1.mlp.up_proj.weight"
    for damaged, said in (
        ({key: value for key, value in held.items() if key != name}, "is missing"),
        (held | {name: held["model.norm.weight"]}, "has another shape"),
    ):
        (folder / "model.safetensors").write_bytes(save_tensors(damaged, {"format": "pt"}))
        with pytest.raises(ConfigError, match=rf"{name}.*{said}"):
            loaded(folder)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"expected model\.safetensors"):
        loaded(folder)
