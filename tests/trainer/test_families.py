"""The forward of every family: packed, or sequence by sequence, against the model's own forward of each sequence."""

import numpy as np
import pytest
import torch
from test_torch_learner import plain_logprobs
from trainer_samples import random_items, tiny_model

from infra.model.model import load_model
from schemas.errors import ConfigError
from tests.tiny_models import FAMILIES
from trainer.batch.batch import pack
from trainer.batch.split import widened
from trainer.learners.forward import PackedModel
from trainer.learners.sequence_parallel import rank_part, require_divisible

READ = {
    "mistral": "blocks",
    "gemma2": "blocks",
    "gemma3": "blocks",
    "gpt-oss": "blocks",
    "qwen3.5": "unpacked",
} | dict.fromkeys(("llama", "qwen2.5", "qwen3", "qwen3-moe", "phi"), "dense to 2048 tokens, then blocks or causal")


@pytest.mark.parametrize("family", READ)
def test_logprobs_and_gradients_of_every_family_are_those_of_each_sequence_alone(tmp_path, family):
    folder = tiny_model(tmp_path, family)
    packed = PackedModel(folder, dtype="float32", device="cpu")
    assert packed.reading == READ[family]
    items = random_items(seed=3, groups=2, size=4)
    plain = load_model(folder)
    for rows in pack(items, max_tokens=100).microbatches:
        logprob_N = packed.logprobs(rows)
        (logprob_N.sum() / 100).backward()
        for s in set(rows.sequence_N.tolist()):
            expected = plain_logprobs(plain, items[s])
            (expected.sum() / 100).backward()
            assert (logprob_N[torch.from_numpy(rows.sequence_N == s)] - expected).abs().max() < 1e-4
    for (name, value), (_, other) in zip(packed.module.named_parameters(), plain.named_parameters(), strict=True):
        assert (value.grad - other.grad).abs().max() <= 1e-5 * max(1.0, float(other.grad.abs().max())), name


@pytest.mark.parametrize("family", READ)
def test_a_plain_sequence_of_every_family_has_the_logprobs_of_the_model_itself(tmp_path, family):
    folder = tiny_model(tmp_path, family)
    tokens = tuple(range(3, 33))
    logits = load_model(folder)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    expected = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    found = PackedModel(folder, dtype="float32", device="cpu").sequence_logprobs(tokens)
    assert (torch.tensor(found) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", READ)
def test_rounding_in_bfloat16_changes_no_familys_reading(tmp_path, family):
    """Twelve layers of wide weights: the rounding of a packed reading is far above any fixed bound."""
    folder = tiny_model(tmp_path, family, num_hidden_layers=12, **deeper(family))
    assert PackedModel(folder, dtype="bfloat16", device="cpu").reading == READ[family]


def deeper(family: str) -> dict[str, object]:
    kinds = FAMILIES[family][2].get("layer_types")
    return {"layer_types": kinds * 6} if kinds else {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_no_reading_gives_its_own_logprobs_is_refused_by_name(tmp_path, dtype):
    folder = tiny_model(tmp_path, "cohere")
    with pytest.raises(ConfigError, match=r"\(cohere\).*its head is not supported"):
        PackedModel(folder, dtype=dtype, device="cpu")


@pytest.mark.parametrize(
    ("family", "why"), [("qwen2.5-vl", "'qwen2_5_vl'.*M-RoPE"), ("qwen3-vl", "'qwen3_vl'.*M-RoPE.*DeepStack")]
)
def test_a_family_of_pictures_without_code_of_its_own_is_refused_with_the_reason(tmp_path, family, why):
    with pytest.raises(ConfigError, match=why):
        PackedModel(tiny_model(tmp_path, family), dtype="float32", device="cpu")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_on_one_rank_and_every_sampled_one_is_read_by_one(size: int) -> None:
    for rows in pack(random_items(3), max_tokens=70).microbatches:
        wide = widened(rows, -(-rows.tokens_BT.shape[1] // size) * size)
        parts = [rank_part(wide, size, place) for place in range(size)]
        assert np.array_equal(np.concatenate([part.tokens_BP for part in parts], 1), wide.tokens_BT)
        assert np.array_equal(np.concatenate([part.positions_BP for part in parts], 1), wide.positions_BT)
        assert sorted(n for part in parts for n in part.read_R) == list(range(len(rows.target_N)))
        for part in parts:
            read = part.tokens_BP.reshape(-1)[part.at_R]
            assert np.array_equal(read, rows.tokens_BT.reshape(-1)[rows.predecessor_N[part.read_R]])


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("qwen3", 3, "got 3 with 4 heads and 2 of keys in .*, expected a number that divides the heads"),
        ("llava", 2, "got 2 with .*, which takes pictures, expected 1"),
        ("qwen3.5", 2, r"\(qwen3_5_text\), expected 1: it has layers of linear_attention"),
    ],
)
def test_a_model_whose_rows_cannot_be_split_is_refused_by_name(tmp_path, family: str, size: int, message: str) -> None:
    folder = tiny_model(tmp_path, family)
    for weights in (tmp_path / family).glob("*.safetensors"):
        weights.unlink()  # nothing is loaded
    with pytest.raises(ConfigError, match=message):
        require_divisible(folder, size)
