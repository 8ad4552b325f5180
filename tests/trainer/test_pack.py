from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_torch_learner import plain_logprobs
from trainer_samples import make_item, pair, random_items, tiny_model

from infra.model.model import load_model
from schemas import Span
from schemas.errors import ConfigError
from schemas.fields import LANES
from tests.tiny_models import FAMILIES
from trainer.batch.batch import Microbatch, PackedBatch, TrainItem, pack
from trainer.batch.split import for_ranks, split
from trainer.learners.forward import PackedModel


def visible(rows: Microbatch, n: int) -> list[tuple[int, int]]:
    """(position, token) of everything sampled token n is conditioned on, by brute force over the mask's definition."""
    row, i = divmod(int(rows.predecessor_N[n]), rows.tokens_BT.shape[1])
    seen = [j for j in range(i + 1) if i < rows.reach_BT[row, j]]
    return [(int(rows.positions_BT[row, j]), int(rows.tokens_BT[row, j])) for j in seen]


def check_faithful(items: list[TrainItem], batch: PackedBatch) -> None:
    """Every sampled token appears once, conditioned on exactly its own sequence, with its own numbers."""
    expected = {}
    for s, item in enumerate(items):
        logprobs = iter(item.experience.logprobs.tolist())
        for span in item.experience.spans:
            for at in range(span.start, span.stop):
                numbers = (span.version, np.float32(span.temperature or 1), span.ratio, span.kv < 0)
                expected[s, at] = (*numbers, next(logprobs))
    for micro in batch.microbatches:
        for n, s in enumerate(micro.sequence_N.tolist()):
            context = visible(micro, n)
            at = len(context)
            tokens = items[s].experience.tokens.tolist()
            assert context == list(enumerate(tokens[:at]))
            assert micro.target_N[n] == tokens[at]
            got = (micro.version_N[n], micro.temperature_N[n], micro.ratio_N[n], micro.exact_N[n])
            assert (*got, micro.behaviour_N[n]) == expected.pop((s, at))
            assert LANES[micro.lane_N[n]] == items[s].item.lane
            assert micro.advantage_N[n] == np.float32(items[s].item.advantage)
            assert micro.weight_N[n] == np.float32(items[s].item.weight)
    assert not expected


@pytest.mark.parametrize("max_tokens", [1, 16, 40, 100, 10_000])
def test_every_sampled_token_sees_exactly_its_own_sequence(max_tokens):
    items = random_items(seed=max_tokens)
    check_faithful(items, pack(items, max_tokens=max_tokens))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(1, 8)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 40),
)
def test_any_set_of_sequences_packs_faithfully(drawn, max_tokens):
    items = [
        make_item(tokens, [Span(min(start, len(tokens) - 1), len(tokens), 0)], group=f"t.{group}", episode=episode)
        for episode, (group, tokens, start) in enumerate(drawn)
    ]
    check_faithful(items, pack(items, max_tokens=max_tokens))


def test_shared_prefixes_are_computed_once():
    # Prompt 1 2 3; responses 4 5 6, 4 5 7, 4 8 9. Inputs (all but the last token): 1 2 3 4 5 and 8.
    items = [
        make_item([1, 2, 3, *response], [Span(3, 6, 0)], episode=episode)
        for episode, response in enumerate([[4, 5, 6], [4, 8, 9], [4, 5, 7]])
    ]
    (micro,) = pack(items, max_tokens=100).microbatches
    assert micro.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 8]]
    assert micro.positions_BT.tolist() == [[0, 1, 2, 3, 4, 4]]
    assert micro.reach_BT.tolist() == [[6, 6, 6, 6, 5, 6]]


def test_microbatches_stay_within_max_tokens_and_a_longer_sequence_goes_alone():
    items = [*random_items(seed=3), make_item(range(80), [Span(40, 80, 0)], group="long.0")]
    batch = pack(items, max_tokens=60)
    over = [rows for rows in batch.microbatches if rows.tokens_BT.size > 60]
    assert [set(each.sequence_N) for each in over] == [{len(items) - 1}]
    assert over[0].tokens_BT.shape == (1, 79)


def joined(items: list[TrainItem], parts: Iterable[Iterable[Microbatch]]) -> PackedBatch:
    rows = tuple(each for part in parts for each in part)
    return PackedBatch(microbatches=rows, lane_tokens={}, num_sequences=len(items))


def test_split_deals_every_token_once_with_a_like_share_of_each_lane():
    items = [
        make_item([1, g, 5], [Span(2, 3, 0)], group=f"t-{lane}-{g}.0", lane=lane)
        for lane in ("usual", "expert")
        for g in range(2, 10)
    ]
    batch = pack(items, max_tokens=2)
    parts = split(batch, 4, seed=1)
    assert [part.lane_tokens for part in parts] == [{"usual": 2, "expert": 2}] * 4
    assert sorted(s for part in parts for rows in part.microbatches for s in rows.sequence_N) == list(range(16))
    assert [part.lane_tokens for part in split(batch, 4, seed=1)] == [part.lane_tokens for part in parts]


@pytest.mark.parametrize("ranks", [1, 2, 3, 50])
@pytest.mark.parametrize("max_tokens", [1, 60, 300])
def test_what_minibatches_and_ranks_get_is_faithful_and_within_max_tokens(ranks, max_tokens):
    items = [*random_items(seed=6), make_item(range(80), [Span(40, 80, 0)], group="long.0")]
    batch = pack(items, max_tokens=max_tokens)
    dealt = for_ranks(batch, ranks)
    assert len(dealt) == ranks
    check_faithful(items, joined(items, dealt))
    check_faithful(items, joined(items, (part.microbatches for part in split(batch, ranks, seed=0))))
    assert all(each.tokens_BT.size <= max_tokens or len(each.tokens_BT) == 1 for part in dealt for each in part)
    rows = [sum(len(each.tokens_BT) for each in part) for part in dealt]
    assert max(rows) - min(rows) <= 1


def test_sides_of_a_pair_share_a_row_however_little_fits():
    items = [each for p in range(5) for each in pair([30 + p, *[40] * (3 * p)], [60 + p, 2, 2, 2], f"p-{p}.0")]
    assert pack(items, max_tokens=10_000).lane_sequences == {"human": 10}
    for batch in (pack(items, max_tokens=5), *split(pack(items, max_tokens=12), 3, seed=1)):
        for rows in batch.microbatches:
            marks = {int(mark) for mark in rows.pair_N}
            assert all(mark ^ 1 in marks for mark in marks)


def test_each_rank_fills_its_microbatches_up_to_max_tokens():
    # 60 rows of 4.9k tokens, three to a microbatch: 20 microbatches on one rank, 3 on each of eight.
    num_tokens, rows, ranks = 4900, 60, 8
    items = [
        make_item([1] * (num_tokens + 1), [Span(num_tokens, num_tokens + 1, 0)], group=f"{g}.0") for g in range(rows)
    ]
    batch = pack(items, max_tokens=16_384)
    assert [len(rows.tokens_BT) for rows in batch.microbatches] == [3] * 20
    assert max(len(part) for part in for_ranks(batch, ranks)) == 3


def test_an_experience_without_sampled_tokens_or_without_a_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match=r"task\.0\.0-0-0: spans"):
        pack([make_item([1, 2], [])], max_tokens=9)
    with pytest.raises(ValueError, match=r"task\.0\.0-0-0: spans"):
        pack([make_item([1, 2], [Span(0, 2, 0)])], max_tokens=9)


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
    whole = make_item(range(3, 33), [Span(1, 30, 0)])
    found = packed.sequence_logprobs(tuple(range(3, 33)))
    assert (torch.tensor(found) - plain_logprobs(plain, whole)).abs().max() < 1e-4


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


@pytest.mark.parametrize(("family", "why"), [("qwen2.5-vl", "'qwen2_5_vl'"), ("qwen3-vl", "'qwen3_vl'")])
def test_a_family_of_pictures_without_code_of_its_own_is_refused_with_the_reason(tmp_path, family, why):
    with pytest.raises(ConfigError, match=why):
        PackedModel(tiny_model(tmp_path, family), dtype="float32", device="cpu")
