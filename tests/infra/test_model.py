"""Models and tokenizers from a folder, on the demo's character model."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from infra.cli.demo.char_model import build_char_model
from infra.cli.plan.size import model_size
from infra.model.model import (
    context_tokens,
    file_tensors,
    folder_tensors,
    load_into,
    load_model,
    load_tokenizer,
    model_tensors,
    own_kernels,
)
from infra.policies.manifest import look_at
from infra.policies.tensors import Tensor, from_numpy, save_tensors
from schemas import Message
from schemas.errors import ConfigError
from streams.config import CollectConfig, CorrectConfig, StreamsConfig
from streams.spelling import TokenizerFile
from streams.stages.chain_builder import build_collect
from tests.infra.chat_models import CHATML, STYLES, build_chat_model
from tests.infra.tiny_families import build_family
from tests.tiny_models import FAMILIES, build_tiny_model

pytestmark = pytest.mark.slow  # importing transformers alone takes seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_char_model(tmp_path_factory.mktemp("model") / "char", 0)


def test_the_context_is_that_of_the_configuration_and_a_folder_without_one_is_named(
    folder: Path, tmp_path: Path
) -> None:
    assert context_tokens(folder) == 512
    with pytest.raises(ConfigError, match=str(tmp_path)):
        context_tokens(tmp_path)


def test_tensors_are_a_snapshot_and_load_back_bit_by_bit(folder: Path) -> None:
    model = load_model(folder)
    before = model_tensors(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert model_tensors(model) != before
    load_into(model, before)
    assert model_tensors(model) == before


def test_loading_changes_nothing_unless_everything_fits(folder: Path) -> None:
    model = load_model(folder)
    before = model_tensors(model)
    zeros = {name: from_numpy(np.zeros(tensor.shape, np.float32)) for name, tensor in before.items()}
    norm = "model.norm.weight"
    for tensors, words in (
        (zeros | {"extra": zeros[norm]}, "the model has no extra"),
        (
            zeros | {norm: from_numpy(np.zeros(7, np.float32))},
            r"model.norm.weight: got shape \(7,\), expected \(128,\)",
        ),
        ({norm: zeros[norm]}, "is missing"),
    ):
        with pytest.raises(ValueError, match=words):
            load_into(model, tensors)
        assert model_tensors(model) == before
    load_into(model, {norm: zeros[norm]}, partial=True)
    assert model_tensors(model) == before | {norm: zeros[norm]}


def test_the_tensors_of_files_are_mapped_and_take_no_memory_of_the_process(tmp_path: Path) -> None:
    def own_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    size = 64 * 2**20
    (tmp_path / "model.safetensors").write_bytes(save_tensors({"w": Tensor("U8", (size,), bytes(size))}))
    before = own_bytes()
    tensors = file_tensors(tmp_path)
    assert look_at(tensors["w"]).xxh3 and own_bytes() - before < size // 4
    (tmp_path / "model.safetensors").unlink()
    assert tensors["w"].num_bytes == size and not np.frombuffer(tensors["w"].data, np.uint8).any()


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_folder_that_is_not_there_is_one_line_that_names_it(tmp_path: Path, load: object) -> None:
    assert callable(load)
    with pytest.raises(ConfigError, match="nowhere") as caught:
        load(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="nowhere"):
        file_tensors(tmp_path / "nowhere")


def test_pickled_weights_are_never_read(folder: Path, tmp_path: Path) -> None:
    """A folder with only pytorch_model.bin would run its code on loading."""
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.save({}, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(tmp_path / "m")


def test_code_in_a_model_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n"
    )
    with pytest.raises(ConfigError, match="model"):
        load_model(tmp_path / "m")
    assert not (tmp_path / "ran").exists()


def test_tokens_and_text_are_those_of_transformers(folder: Path) -> None:
    tokenizer, own = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("", "37+45=82", "<eo> and <bos", "  ünïcödé\n"):
        ids = tokenizer.encode(text)
        assert ids == own.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == own.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_tokenizer_without_a_chat_template_says_so(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(tmp_path / "m")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_folder_does_not_choose_what_computes(folder: Path, tmp_path: Path, key: str) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {key: "somebody/kernels:run"}))
    plain, named = load_model(folder), load_model(copied)
    assert named.config._attn_implementation == plain.config._attn_implementation
    assert context_tokens(copied) == context_tokens(folder)


def test_a_configuration_within_another_chooses_nothing_either(tmp_path: Path) -> None:
    inner = {"model_type": "clip_vision_model", "attn_implementation": "somebody/kernels:run"}
    outer = {"model_type": "llava", "sub_configs": {}, "vision_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = own_kernels(tmp_path)
    assert config.vision_config._attn_implementation is None


def test_the_chat_template_is_told_what_the_settings_say(tmp_path: Path) -> None:
    asks = CHATML.replace(
        "assistant\\n' }}", "assistant\\n' + ('' if enable_thinking else '<think>\\n\\n</think>\\n\\n') }}"
    )
    folder = build_chat_model(tmp_path / "model", msgspec.structs.replace(STYLES["chatml"], template=asks))
    conversation = [Message(role="user", content="Hi")]
    for thinks in (True, False):
        tokenizer = load_tokenizer(folder, {"enable_thinking": thinks})
        for tokens in (
            tokenizer.encode_chat(conversation),
            tokenizer.encode_request([{"role": "user", "content": "Hi"}]),
        ):
            assert tokenizer.decode(tokens).endswith("assistant\n" if thinks else "assistant\n<think>\n\n</think>\n\n")


CORRECTING = StreamsConfig(collect=CollectConfig(correct=CorrectConfig(on=True)))


def test_text_is_spelled_as_a_demonstration_of_the_loader_is(tmp_path: Path) -> None:
    folder = build_char_model(tmp_path / "model", seed=0)
    reference, speller = load_tokenizer(folder), TokenizerFile(str(folder))
    for text in ("280", "", "37+45=", "<eos> in the midst", "é is unknown"):
        assert speller.encode(text) == reference.encode(text)
    assert speller.end == reference.eos_ids[0]
    assert build_collect(CORRECTING, str(folder))[0].stamp == "correct@1"


def test_a_folder_without_an_end_token_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="end token"):
        TokenizerFile(str(tmp_path))


# A model of pictures keeps the names that it has in memory, which engines know; Qwen3-VL is refused.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llava", "internvl", "qwen2.5-vl", "qwen3-vl"}))
def test_a_model_is_published_under_the_names_of_its_folder(tmp_path: Path, family: str) -> None:
    folder = build_tiny_model(tmp_path / family, family)
    assert model_tensors(load_model(folder)) == folder_tensors(folder)


def test_a_folder_gives_the_tensors_of_versions_alone_and_a_matrix_tied_to_the_embeddings_once(tmp_path: Path) -> None:
    folder = build_family(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    tensors = folder_tensors(folder)
    both = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}  # as in the file of Qwen3-0.6B
    more = {"mtp.fc.weight": tensors["model.norm.weight"]}  # as in those of Qwen3-Next, for draft tokens
    (folder / "model.safetensors").write_bytes(save_tensors(both | more))
    assert model_tensors(load_model(folder)) == folder_tensors(folder)
    assert model_size(folder).published == model_size(folder).trained


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
