"""The codec benchmark compares like with like: all contestants give back what went in."""

import numpy as np
import pytest

from infra.cli.bench.common.texts import samples
from infra.cli.bench.records import codec
from infra.cli.bench.records.codec import check_same, edit_header, measure, open_block, pack_block, rows
from infra.cli.bench.records.codec_rivals import missing, rivals
from schemas import Block, decode


def test_all_contestants_give_back_what_went_in() -> None:
    group = samples(3, 20, 30)
    for opened in (open_block(pack_block(group)), *(rival.open(rival.pack(group)) for rival in rivals().values())):
        for sample, (tokens, logprobs, messages) in zip(group, opened, strict=True):
            assert np.array_equal(tokens, sample.prompt + sample.response)
            assert np.array_equal(logprobs, np.array(sample.logprobs, np.float32))
            assert messages == sample.messages


def test_a_contestant_that_gives_back_other_values_is_not_timed() -> None:
    group = samples(2, 4, 8)
    ours = open_block(pack_block(group))
    (tokens, logprobs, messages), other = ours
    with pytest.raises(RuntimeError, match="lists gives back other values"):
        check_same(ours, [(tokens + 1, logprobs, messages), other], "lists")


def test_a_header_edit_sets_the_reward_of_every_member() -> None:
    edited = decode(edit_header(pack_block(samples(3, 20, 30))))
    assert isinstance(edited, Block) and {member.reward for member in edited.experiences} == {1.0}


def test_rows_show_every_number_of_every_shape() -> None:
    numbers = measure(2, 4, 8, rounds=1, budget_s=0.0)
    table = rows({"small": numbers, "other": numbers})
    assert len(table) == len(numbers) + 1 and all(len(row) == 3 for row in table)


def test_every_rival_has_a_ratio_of_both_clocks_and_one_that_is_missing_has_none() -> None:
    found = measure(2, 4, 8, rounds=2, budget_s=0.0)
    assert {"packed", "lists", "pickle", "protobuf"} <= rivals().keys()
    for name in rivals():
        assert all(found[f"round_trip_over_{name}{end}"] > 0 for end in ("", "_median", "_wall", "_wall_median"))
    assert not [figure for figure in found for name in missing() if name in figure]


def test_a_rival_that_is_missing_is_named() -> None:
    said: list[str] = []
    codec.run(said.append, rounds=1, budget_s=0.0, shapes={"2 x (4 + 8)": (2, 4, 8)})
    assert [line for line in said if "left out" in line] == [
        f"codec: {name} is left out: it is not installed (`make bench-deps`)" for name in missing()
    ]


def test_texts_are_prose_and_code() -> None:
    texts = "".join(sample.messages[1].content for seed in range(40) for sample in samples(1, 1, 400, seed=seed))
    assert "    return " in texts and ". " in texts
