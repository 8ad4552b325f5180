"""Rows over several ranks: what each computes of them, and what is refused before weights are loaded.

That logprobs and gradients are those of one rank is in test_deepspeed_learner.py, which has ranks.
"""

import numpy as np
import pytest
from trainer_samples import random_items, tiny_model

from schemas.errors import ConfigError
from trainer.batch.batch import pack
from trainer.batch.split import widened
from trainer.learners.sequence_parallel import part_of, require_divisible, require_ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_on_one_rank_and_every_sampled_one_is_read_by_one(size: int) -> None:
    for one in pack(random_items(3), max_tokens=70).microbatches:
        wide = widened(one, -(-one.tokens_BT.shape[1] // size) * size)
        parts = [part_of(wide, size, place) for place in range(size)]
        assert np.array_equal(np.concatenate([part.tokens_BP for part in parts], 1), wide.tokens_BT)
        assert np.array_equal(np.concatenate([part.positions_BP for part in parts], 1), wide.positions_BT)
        assert sorted(n for part in parts for n in part.read_R) == list(range(len(one.target_N)))
        for part in parts:
            read = part.tokens_BP.reshape(-1)[part.at_R]
            assert np.array_equal(read, one.tokens_BT.reshape(-1)[one.predecessor_N[part.read_R]])


def test_what_rows_are_padded_with_is_seen_by_itself_alone() -> None:
    one = pack(random_items(3)[:4], max_tokens=100).microbatches[0]
    num_T = one.tokens_BT.shape[1]
    wide = widened(one, num_T + 3)
    assert wide.tokens_BT.shape == wide.reach_BT.shape == (len(one.tokens_BT), num_T + 3)
    assert np.array_equal(wide.reach_BT[:, :num_T], one.reach_BT)
    assert (wide.reach_BT[:, num_T:] == np.arange(num_T + 1, num_T + 4)).all()


@pytest.mark.parametrize(("size", "world"), [(3, 4), (2, 1), (0, 2)])
def test_ranks_must_come_in_whole_groups(size: int, world: int) -> None:
    with pytest.raises(ConfigError, match=rf"sequence_parallel: got {size} with {world} rank\(s\), expected a number"):
        require_ranks(size, world)


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


def test_positions_that_depend_on_the_longest_row_are_refused(tmp_path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match=r"its positions \(dynamic\) depend on the longest row"):
        require_divisible(tiny_model(tmp_path, "qwen3", rope_parameters=rope), 2)


def test_fewer_heads_of_keys_than_ranks_are_repeated(tmp_path) -> None:
    require_divisible(tiny_model(tmp_path, "qwen3"), 4)
