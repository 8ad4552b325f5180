"""No token older than the bound is a target; those after it are trained as if nothing had been left out."""

import asyncio

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.chain.insert import ProcessorConfig
from schemas import Batch, Block, Span, Stretch, decode, encode, ids, make_experience
from schemas.wire.routing import routing, with_routing
from schemas.wire.teacher import teacher_logprobs, with_teacher_logprobs
from tests.trainer.buffered_blocks import block
from trainer.batch.assemble import (
    Stamp,
    apply_chain,
    assemble,
    build_batch,
    check_blocks,
    masked_below,
    train_items,
    without_old,
)
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import candidate_of
from trainer.buffer.pool import stale

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
        stamp(version), [(candidate_of(at, one, 0, bytes([at]) * 16), one) for at, one in enumerate(blocks)]
    )


def targets(items: list[TrainItem]) -> list[tuple[int, int, float]]:
    """Token, version and recorded logprob of each target."""
    packed = pack(items, max_tokens=1000)
    return [
        (int(token), int(version), float(logprob))
        for one in packed.microbatches
        for token, version, logprob in zip(one.target_N, one.version_N, one.behaviour_N, strict=True)
    ]


def test_tokens_older_than_the_bound_are_context_and_the_others_targets() -> None:
    batch, items = assembled(9, group("a.0", [5, 6, 7, 8]))
    assert targets(items) == [(23, 7, -8.0), (24, 8, -9.0)]
    assert items[0].experience.tokens.tolist() == [*PROMPT, 20, 21, 22, 23, 24], "all of it is still read"
    assert (batch.masked_below, batch.masked, batch.items[0].min_version) == (7, 2, 7)


def test_an_experience_all_of_whose_tokens_are_too_old_is_dropped_with_a_reason_and_its_group_trained() -> None:
    batch, items = assembled(9, group("a.0", [4, 5], [6, 7]))
    assert [one.experience.episode for one in items] == [1]
    assert [(item.id, why) for item, why in zip(batch.dropped, batch.dropped_because, strict=True)] == [
        ("a.0.0-0-0", "stale")
    ]
    assert batch.drops == {"stale": 1} and len(batch.blocks) == 1


def test_a_journal_of_before_trains_what_it_trained() -> None:
    """Records without the new fields mask nothing, and where nothing is too old none of them is written."""
    old = group("a.0", [1, 2, 3])
    young, _ = assembled(3, old)
    assert (young.masked_below, young.masked) == (-1, 0)
    written = msgspec.to_builtins(young)
    assert not written.keys() & {"masked_below", "masked"}
    before = msgspec.convert({**written, "version": 99}, Batch)
    assert len(targets(train_items(before, {0: old}))) == 3


def test_the_journal_alone_gives_the_same_targets_again() -> None:
    one, two = group("a.0", [4, 5], [6, 7, 8], advantages=True), group("b.0", [8, 9])
    batch, items = assembled(9, one, two)
    stored = decode(encode(batch))
    assert isinstance(stored, Batch)
    again = train_items(stored, {0: decode(encode(one)), 1: decode(encode(two))})  # type: ignore[dict-item]
    assert targets(again) == targets(items)
    check_blocks(stored, {0: bytes([0]) * 16, 1: bytes([1]) * 16})


def test_the_batch_chain_sees_what_is_trained_and_keeps_what_was_dropped_before_it() -> None:
    batch, items = assembled(9, group("a.0", [4, 5], [6, 7]), group("b.0", [6, 8, 9]))
    after, kept = asyncio.run(apply_chain(build_batch(CHAIN), batch, items))
    assert [one.experience.num_sampled for one in kept] == [2], "the first of its batch is dropped"
    assert after.dropped_because == ("stale", "first of its batch") and after.drops == {
        "stale": 1,
        "first of its batch": 1,
    }
    assert after.blocks == (bytes([1]) * 16, bytes([0]) * 16) and after.masked_below == batch.masked_below


def test_turns_keep_their_own_advantages() -> None:
    _, items = assembled(9, group("a.0", [5, 7, 8], advantages=True))
    (packed,) = pack(items, max_tokens=100).microbatches
    assert packed.advantage_N.tolist() == [1.0 + 1 - 1, 1.0 + 2 - 1]


def test_the_teachers_words_and_the_experts_stay_with_their_tokens() -> None:
    (one,) = group("a.0", [5, 7, 8]).experiences
    experts = np.arange(one.num_tokens * 2, dtype=np.int16).reshape(-1, 1, 2)
    full = with_routing(with_teacher_logprobs(one, [-0.1, -0.2, -0.3]), experts)
    left = without_old(full, 7)
    found = teacher_logprobs(left)
    assert found is not None and found.tolist() == np.array([-0.2, -0.3], np.float32).tolist()
    kept, before = routing(left), routing(full)
    assert kept is not None and before is not None and np.array_equal(kept, before)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 14),
)  # fmt: skip
def test_no_token_older_than_the_bound_is_trained_and_every_token_is_accounted_for(
    groups: list[list[list[int]]], version: int
) -> None:
    blocks = [group(f"g{at}.0", *map(sorted, episodes)) for at, episodes in enumerate(groups)]
    candidates = [candidate_of(at, one, 0) for at, one in enumerate(blocks)]
    gone = {one.offset for one, _ in stale(candidates, version, MAX_STALENESS)}
    drawn = [(one, blocks[one.offset]) for one in candidates if one.offset not in gone]
    batch, items = assemble(stamp(version), drawn)
    trained = targets(items) if items else []
    assert all(version - sampled_by <= MAX_STALENESS for _, sampled_by, _ in trained)
    assert {one.item.min_version for one in items} == {one.experience.min_version for one in items}
    dropped = sum(blocks[item.offset].experiences[item.index].num_sampled for item in batch.dropped)
    assert len(trained) + batch.masked + dropped == sum(one.num_tokens for one, _ in drawn)
    young = [v for one, block in drawn for m in block.experiences for s in m.spans if version - (v := s.version) <= 2]
    assert len(trained) == len(young), "and no token young enough is left out"


def test_a_block_of_any_other_lane_is_trained_whatever_its_age() -> None:
    batch, items = assembled(99, block("a.0", lane="live", version=1))
    assert len(items) == 2 and batch.masked_below == -1
