"""From a draw to a batch: the journal record alone, with the log, gives the same items again."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chain.insert import ProcessorConfig
from schemas import Batch, Block, Span, Stretch, decode, encode, ids, make_experience
from schemas.errors import BadFrame
from schemas.wire.teacher import teacher_logprobs, with_teacher_logprobs
from tests.trainer.trainer_samples import block
from trainer.batch.assemble import (
    Stamp,
    apply_chain,
    assemble,
    build_batch,
    check_blocks,
    learning_rate_at,
    masked_below,
    train_items,
    without_old,
)
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import make_candidate
from trainer.buffer.pool import stale
from trainer.config import Schedule, TrainerConfig, WarmupConfig

STAMP = Stamp(run="r", token=4, step=9, version=8, phase="train", seed=77, config_hash="abc")


def drawn(offset: int, group: str, *, uses: int = 0, num_members: int = 2):
    each = block(group, num_members=num_members, advantage=0.5)
    return make_candidate(offset, each, uses), each


@pytest.mark.parametrize("found", [{}, {5: block("other.0")}, {5: block("a.0", num_members=1)}])
def test_a_log_that_holds_something_else_there_is_an_error_that_says_where(found) -> None:
    batch, _ = assemble(STAMP, [drawn(5, "a.0")])
    with pytest.raises(BadFrame, match=r"step 9: the journal names a\.0\.0-\d-0 at buffer offset 5, index \d"):
        train_items(batch, found)


MAX_STALENESS = 2
PROMPT = [7, 8, 9]
CHAIN = [ProcessorConfig(use="tests.trainer.test_batch_chain:drop_first", stage="batch")]


def group(name: str, *episodes: list[int], advantages: bool = False) -> Block:
    """A group whose episodes sampled a token under each of these versions, with a token nobody sampled after the first."""
    members = []
    for episode, versions in enumerate(episodes):
        spans = [Span(3, 4, versions[0])] + [Span(5 + at, 6 + at, version) for at, version in enumerate(versions[1:])]
        stretches = tuple(Stretch(stop=span.stop, advantage=float(at)) for at, span in enumerate(spans))
        members.append(
            make_experience(
                tokens=[*PROMPT, *range(20, 21 + len(versions))],
                logprobs=[-float(version + 1) for version in versions], messages=(), spans=tuple(spans),
                id=ids.experience_id(name, 0, episode), group=name, episode=episode, group_size=len(episodes), sequence=0,
                advantage=1.0, advantages=stretches if advantages else (),
            )
        )  # fmt: skip
    return Block(tuple(members))


def stamp(version: int) -> Stamp:
    below = masked_below(version, MAX_STALENESS)
    return Stamp(
        run="r", token=1, step=9, version=version, phase="train", seed=1, config_hash="", masked_below=below
    )  # fmt: skip


def assembled(version: int, *blocks: Block) -> tuple[Batch, list[TrainItem]]:
    return assemble(
        stamp(version), [(make_candidate(at, block, 0, bytes([at]) * 16), block) for at, block in enumerate(blocks)]
    )


def targets(items: list[TrainItem]) -> list[tuple[int, int, float]]:
    """Token, version and recorded logprob of each target."""
    packed = pack(items, max_tokens=1000)
    return [
        (int(token), int(version), float(logprob))
        for rows in packed.microbatches
        for token, version, logprob in zip(rows.target_N, rows.version_N, rows.behaviour_N, strict=True)
    ]


def test_an_experience_all_of_whose_tokens_are_too_old_is_dropped_with_a_reason_and_its_group_trained() -> None:
    batch, items = assembled(9, group("a.0", [4, 5], [6, 7]))
    assert [item.experience.episode for item in items] == [1]
    assert [(item.id, why) for item, why in zip(batch.dropped, batch.dropped_because, strict=True)] == [
        ("a.0.0-0-0", "stale")
    ]
    assert batch.drops == {"stale": 1} and len(batch.blocks) == 1


def test_the_journal_alone_gives_the_same_targets_again() -> None:
    each, two = group("a.0", [4, 5], [6, 7, 8], advantages=True), group("b.0", [8, 9])
    batch, items = assembled(9, each, two)
    stored = decode(encode(batch))
    assert isinstance(stored, Batch)
    again = train_items(stored, {0: decode(encode(each)), 1: decode(encode(two))})  # type: ignore[dict-item]
    assert targets(again) == targets(items)
    check_blocks(stored, {0: bytes([0]) * 16, 1: bytes([1]) * 16})


def test_the_batch_chain_sees_what_is_trained_and_keeps_what_was_dropped_before_it() -> None:
    batch, items = assembled(9, group("a.0", [4, 5], [6, 7]), group("b.0", [6, 8, 9]))
    after, kept = asyncio.run(apply_chain(build_batch(CHAIN), batch, items))
    assert [item.experience.num_sampled for item in kept] == [2], "the first of its batch is dropped"
    assert after.dropped_because == ("stale", "first of its batch")
    assert after.drops == {"stale": 1, "first of its batch": 1}
    assert after.blocks == (bytes([1]) * 16, bytes([0]) * 16) and after.masked_below == batch.masked_below


def test_turns_keep_their_own_advantages() -> None:
    _, items = assembled(9, group("a.0", [5, 7, 8], advantages=True))
    (packed,) = pack(items, max_tokens=100).microbatches
    assert packed.advantage_N.tolist() == [1.0 + 1 - 1, 1.0 + 2 - 1]


def test_the_teachers_logprobs_stay_with_their_tokens() -> None:
    (experience,) = group("a.0", [5, 7, 8]).experiences
    found = teacher_logprobs(without_old(with_teacher_logprobs(experience, [-0.1, -0.2, -0.3]), 7))
    assert found is not None and found.tolist() == np.array([-0.2, -0.3], np.float32).tolist()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 14),
)  # fmt: skip
def test_no_token_older_than_the_bound_is_trained_and_every_token_is_accounted_for(
    groups: list[list[list[int]]], version: int
) -> None:
    blocks = [group(f"g{at}.0", *map(sorted, episodes)) for at, episodes in enumerate(groups)]
    candidates = [make_candidate(at, block, 0) for at, block in enumerate(blocks)]
    gone = {candidate.offset for candidate, _ in stale(candidates, version, MAX_STALENESS)}
    drawn = [(candidate, blocks[candidate.offset]) for candidate in candidates if candidate.offset not in gone]
    batch, items = assemble(stamp(version), drawn)
    trained = targets(items) if items else []
    assert all(version - sampled_by <= MAX_STALENESS for _, sampled_by, _ in trained)
    assert {item.item.min_version for item in items} == {item.experience.min_version for item in items}
    dropped = sum(blocks[item.offset].experiences[item.index].num_sampled for item in batch.dropped)
    assert len(trained) + batch.masked + dropped == sum(candidate.num_tokens for candidate, _ in drawn)
    young = [
        v for candidate, block in drawn for m in block.experiences for s in m.spans if version - (v := s.version) <= 2
    ]
    assert len(trained) == len(young), "and no token young enough is left out"


def test_a_block_of_any_other_lane_is_trained_whatever_its_age() -> None:
    batch, items = assembled(99, block("a.0", lane="live", version=1))
    assert len(items) == 2 and batch.masked_below == -1


FALLING = TrainerConfig(
    learning_rate=2.0,
    schedule=Schedule(hold_steps=10, decay_steps=20, final=0.1),
    warmup=WarmupConfig(lane="usual", learning_rate=5.0),
)


@pytest.mark.parametrize(
    ("steps_done", "rate"),
    # 20 is half way down: 2 * (0.5 + 0.5 * 0.1)
    [(0, 2.0), (10, 2.0), (20, 1.1), (30, 0.2), (1000, 0.2)],
)
def test_the_rate_is_held_then_falls_on_a_line_then_is_held(steps_done: int, rate: float) -> None:
    assert learning_rate_at(FALLING, "train", steps_done) == pytest.approx(rate)
