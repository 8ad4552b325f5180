"""Parts of a model: the weights of every family by their names, and LoRA adapters, equal in every process."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from infra.model.adapter import (
    adapter_parameters,
    adapter_shapes,
    base_hash,
    find_adapter,
    merged_model,
    put_adapter,
    remove_adapter,
    write_adapter_folder,
)
from infra.model.model import load_into, load_model, meta_model, model_tensors, unlike
from infra.policies.policy import Adapter
from infra.policies.tensors import Tensor, from_torch, load_tensors, save_tensors, to_torch
from schemas.errors import ConfigError
from tests.infra.tiny_families import build_family
from tests.tiny_models import build_eye_model

IDS = torch.tensor([[3, 17, 40, 5, 9, 21]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(tmp_path_factory.mktemp("adapter") / "model", "qwen3")


def found(folder: Path, *targets: str, rank: int = 4) -> Adapter:
    return find_adapter(folder, rank=rank, alpha=8, targets=targets or ("all-linear",))


def trained(folder: Path, adapter: Adapter, *, dtype: str = "float32") -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """A model with an adapter as after some steps."""
    module = load_model(folder, dtype=dtype)
    put_adapter(module, adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in adapter_parameters(module).values():
            value += torch.randn(value.shape, generator=generator).to(value.dtype) * 0.1
    return module, model_tensors(module)


@torch.no_grad()
def logits(module: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = module(input_ids=IDS, use_cache=False).logits
    return found


def test_a_new_adapter_is_the_base_and_the_same_in_every_process(folder: Path) -> None:
    adapter = found(folder)
    assert adapter.targets == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    first, second, plain = (load_model(folder) for _ in range(3))
    put_adapter(first, adapter)
    torch.rand(7)
    put_adapter(second, adapter)
    assert model_tensors(first) == model_tensors(second)
    assert type(first) is type(plain) and torch.equal(logits(first), logits(plain))
    assert {name for name, value in first.named_parameters() if value.requires_grad} == {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight") for name in model_tensors(first)
    }
    shapes = adapter_shapes(meta_model(folder), adapter)
    assert {name: one.shape for name, one in model_tensors(first).items()} == shapes
    a = to_torch(model_tensors(first)["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"])
    assert 0.8 * 32**-0.5 < float(a.abs().max()) <= 32**-0.5 and abs(float(a.mean())) < 0.05


def test_an_adapter_is_taken_over_and_taken_off(folder: Path) -> None:
    adapter = found(folder, "q_proj", "down_proj")
    module, tensors = trained(folder, adapter)
    other = load_model(folder)
    put_adapter(other, adapter)
    assert unlike(other, tensors)
    load_into(other, tensors)
    assert not unlike(other, tensors) and torch.equal(logits(other), logits(module))
    remove_adapter(other)
    plain = load_model(folder)
    assert torch.equal(logits(other), logits(plain)) and model_tensors(other) == model_tensors(plain)
    assert not torch.equal(logits(module), logits(plain))


def test_the_folder_is_what_peft_saves_and_loads(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    adapter = found(folder, "q_proj", "down_proj")
    module, tensors = trained(folder, adapter)
    (tmp_path / "ours").mkdir()
    write_adapter_folder(tmp_path / "ours", adapter, tensors)
    loaded = PeftModel.from_pretrained(load_model(folder), tmp_path / "ours")
    assert torch.equal(logits(loaded.eval()), logits(module))

    loaded.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / one).iterdir() if path.suffix != ".md"}
        for one in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert load_tensors(ours["adapter_model.safetensors"]) == load_tensors(theirs["adapter_model.safetensors"])
    config, saved = (json.loads(one["adapter_config.json"]) for one in (ours, theirs))
    assert set(config.pop("target_modules")) == set(saved.pop("target_modules"))
    assert saved.pop("base_model_name_or_path") and config.pop("base_model_name_or_path") is None
    assert config == saved
    fresh = get_peft_model(load_model(folder), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
    fresh.save_pretrained(tmp_path / "fresh")
    assert load_tensors((tmp_path / "fresh" / "adapter_model.safetensors").read_bytes()).keys() == tensors.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_model_computes_what_the_adapter_does(folder: Path, dtype: str) -> None:
    adapter = found(folder)
    module, tensors = trained(folder, adapter, dtype=dtype)
    merged = merged_model(folder, adapter, tensors, dtype=dtype)
    assert type(merged) is type(module) and model_tensors(merged).keys() == model_tensors(load_model(folder)).keys()
    largest = float((logits(merged) - logits(module)).abs().max())
    assert largest < (1e-4 if dtype == "float32" else 0.3), largest
    with pytest.raises(ValueError, match="is not what"):
        merged_model(folder, adapter, dict(list(tensors.items())[1:]), dtype=dtype)


def test_the_base_is_known_by_its_values_however_its_files_cut_them(folder: Path, tmp_path: Path) -> None:
    tensors = load_tensors((folder / "model.safetensors").read_bytes())
    names = sorted(tensors)
    for at, part in enumerate((names[:3], names[3:])):
        (tmp_path / f"model-{at}.safetensors").write_bytes(save_tensors({name: tensors[name] for name in part}))
    assert base_hash(tmp_path) == base_hash(folder) == found(folder).base
    changed = np.frombuffer(tensors[names[0]].data, np.uint8).copy()
    changed[5] ^= 1
    altered = tensors | {names[0]: msgspec.structs.replace(tensors[names[0]], data=changed.tobytes())}
    (tmp_path / "model-0.safetensors").write_bytes(save_tensors({name: altered[name] for name in names[:3]}))
    assert base_hash(tmp_path) != base_hash(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \*.safetensors"):
        base_hash(tmp_path / "empty")


def test_targets_that_cannot_be_adapted_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'got "qkv_proj", which names no module of .*expected some of down_proj'):
        found(folder, "q_proj", "qkv_proj")
    with pytest.raises(ConfigError, match=r'got "embed_tokens", and model.embed_tokens .* is a Embedding'):
        found(folder, "embed_tokens")
    with pytest.raises(ConfigError, match=r'got "lm_head".*other than the output matrix'):
        found(folder, "lm_head")
    for path in build_family(tmp_path / "moe", "qwen3_moe").glob("*.safetensors"):
        path.unlink()  # nothing of it is read before it is refused
    with pytest.raises(ConfigError, match=r'got "gate_proj", which names no module .*expected some of k_proj'):
        found(tmp_path / "moe", "q_proj", "gate_proj")


def test_a_family_whose_layers_peft_does_not_know_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, MambaConfig

    GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match=r'got "c_attn", and .*c_attn of .* \(gpt2\) is a Conv1D'):
        found(tmp_path / "gpt2", "c_attn")
    MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, architectures=["MambaForCausalLM"]).save_pretrained(
        tmp_path / "mamba"
    )
    with pytest.raises(ConfigError, match=r"\(mamba\): peft cannot adapt it"):
        found(tmp_path / "mamba", "out_proj")


def test_experts_are_left_alone_and_pictures_are_read_by_the_base(tmp_path: Path) -> None:
    moe = build_family(tmp_path / "moe", "qwen3_moe")
    assert {"k_proj", "o_proj", "q_proj", "v_proj"} <= set(found(moe).targets)
    eye = build_eye_model(tmp_path / "eye")
    adapter = found(eye)
    assert adapter.within
    module = load_model(eye)
    put_adapter(module, adapter)
    names = model_tensors(module)
    assert names and all(name.startswith(f"base_model.model.{adapter.within}.") for name in names)
    (tmp_path / "adapter").mkdir()
    write_adapter_folder(tmp_path / "adapter", adapter, names)
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(load_model(eye), tmp_path / "adapter")
    assert {name: from_torch(one) for name, one in adapter_parameters(loaded.base_model.model).items()} == names
