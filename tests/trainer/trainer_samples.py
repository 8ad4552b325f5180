"""Experiences to train on, as tests write them: token lists and spans."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infra.log.bus import Record
from infra.log.log import LogMessage
from schemas import BatchItem, Block, Lane, Span, encode, ids, make_experience
from schemas.experience import CHOSEN, REJECTED
from tests.tiny_models import build_tiny_model
from trainer.batch.batch import Microbatch, PackedBatch, TrainItem, pack
from trainer.config import CriticConfig, LaneConfig, TrainerConfig


def make_item(
    tokens: Sequence[int],
    spans: Sequence[Span],
    *,
    group: str = "task.0",
    episode: int = 0,
    lane: Lane = "usual",
    advantage: float = 1.0,
    weight: float = 1.0,
    logprobs: Sequence[float] | None = None,
    **header: object,
) -> TrainItem:
    """One item; logprobs default to -1 per sampled token. header: more fields of the experience."""
    num_sampled = sum(span.stop - span.start for span in spans)
    name = f"{group}.0-{episode}-0"
    experience = make_experience(
        id=name,
        group=group,
        episode=episode,
        group_size=64,
        lane=lane,
        tokens=list(tokens),
        logprobs=np.full(num_sampled, -1.0) if logprobs is None else logprobs,
        messages=(),
        spans=tuple(spans),
        **header,  # type: ignore[typeddict-item]
    )
    item = BatchItem(id=name, partition=0, offset=0, index=episode, lane=lane, advantage=advantage, weight=weight)
    return TrainItem(experience, item)


def random_items(seed: int, *, groups: int = 5, size: int = 6, vocabulary: int = 90) -> list[TrainItem]:
    """Groups that share prompts, some multi-turn, some truncated, some identical; and demonstrations."""
    random = np.random.default_rng(seed)
    items = []
    for g in range(groups):
        prompt = random.integers(3, vocabulary, random.integers(1, 9)).tolist()
        for episode in range(size):
            # Few distinct first tokens, so that responses share prefixes and some are equal.
            response = [*random.integers(3, 5, 2), *random.integers(3, vocabulary, random.integers(0, 6))]
            stop = len(prompt) + len(response)
            spans = [Span(len(prompt), stop, int(random.integers(0, 4)), float(random.choice([1.0, 0.7])))]
            tokens = [*prompt, *response]
            if g % 2:  # another turn: an observation nobody sampled, then two spans across a reload
                tokens += random.integers(3, vocabulary, 7).tolist()
                spans += [Span(stop + 3, stop + 5, 4), Span(stop + 5, stop + 6, 5, kv=4)]
            logprobs = -random.random(sum(span.stop - span.start for span in spans)).astype(np.float32)
            items.append(
                make_item(
                    tokens, spans, group=f"task-{g}.0", episode=episode, advantage=float(random.normal()),
                    logprobs=logprobs,
                )
            )  # fmt: skip
    for g in range(3):
        tokens = random.integers(3, vocabulary, 6 + g).tolist()
        items.append(make_item(tokens, [Span(3, 6 + g, -1, 1.0, False)], group=f"demo-{g}.0", lane="expert"))
    return items


def pair(chosen: Sequence[int], rejected: Sequence[int], group: str = "p.0") -> list[TrainItem]:
    """Two answers to a prompt, the rejected one first."""
    return [
        make_item(
            [1, 20, 21, *answer], [Span(3, 3 + len(answer), -1, 1.0, False)], logprobs=np.zeros(len(answer)),
            group=group, episode=episode, lane="human", kind=kind,
        )
        for kind, episode, answer in ((REJECTED, 1, rejected), (CHOSEN, 0, chosen))
    ]  # fmt: skip


def tiny_model(folder: Path, family: str, **settings: object) -> str:
    """The smallest model of a family, see `tests.tiny_models`."""
    return str(build_tiny_model(folder / family, family, **settings))


def long_microbatch(num_tokens: int, *, sequences: int, sampled: int = 32) -> Microbatch:
    """One row of `num_tokens` inputs: sequences of one group that share the first half of them."""
    random = np.random.default_rng(num_tokens)
    begin = random.integers(3, 90, num_tokens // 2).tolist()
    tail, rest = divmod(num_tokens - len(begin), sequences)
    items = []
    for episode in range(sequences):
        # The last token is no input; what differs is so from the first token after the shared ones.
        tokens = [*begin, 3 + episode, *random.integers(3, 90, tail + (rest if not episode else 0)).tolist()]
        span = Span(max(len(begin), len(tokens) - sampled), len(tokens), 0)
        items.append(make_item(tokens, [span], group="long-0.0", episode=episode))
    (rows,) = pack(items, max_tokens=num_tokens).microbatches
    assert rows.tokens_BT.shape == (1, num_tokens)
    return rows


def num_positions(batch: PackedBatch) -> int:
    """Positions that a learner computes, padding included."""
    return sum(rows.tokens_BT.size for rows in batch.microbatches)


def block(
    group: str = "a.0",
    *,
    num_members: int = 2,
    lane: Lane = "usual",
    sequence: int = -1,
    version: int = 3,
    ratio: bool = True,
    **header: object,
) -> Block:
    """A group of answers of two tokens each."""
    return Block(
        tuple(
            make_experience(
                tokens=[1, 2, 3, episode], logprobs=[-0.5, -0.25], messages=(), spans=(Span(2, 4, version, 1.0, ratio),),
                id=ids.experience_id(group, 0, episode), group=group, episode=episode, group_size=num_members, lane=lane,
                sequence=sequence, **header,
            )
            for episode in range(num_members)
        )
    )  # fmt: skip


def message(block: Block, offset: int) -> LogMessage:
    """The block as it was read at `offset`."""
    return LogMessage(Record("t.buffer", 0, offset, 0, b"", encode(block)), value=block)


def mixed(lanes: Sequence[Lane]) -> Block:
    """A block whose members say different lanes."""
    return Block(tuple(block(lane=lane, num_members=len(lanes)).experiences[at] for at, lane in enumerate(lanes)))


CRITIC = TrainerConfig(
    lanes={
        "usual": LaneConfig(loss="ppo", weight=0.9, options={"minibatches": 2}),
        "expert": LaneConfig(loss="sft", weight=0.1),
    },
    threads=1,
    critic=CriticConfig(learning_rate=1e-4),
)


def rewarded(seed: int, reward: float | None = None) -> list[TrainItem]:
    """Prompts that decide the reward, and demonstrations, which have no value. reward: of one answer, instead."""
    random = np.random.default_rng(seed)
    items = [
        make_item(
            [1, 10 + i % 2, *random.integers(20, 30, 2 + i % 3)],
            [Span(2, 4 + i % 3, 0)],
            group=f"coin-{i}.0",
            logprobs=np.full(2 + i % 3, -4.8),
            reward=1.0 - i % 2 if reward is None or i != 7 else reward,
        )
        for i in range(14)
    ]
    return [*items, *(item for item in random_items(seed) if item.item.lane == "expert")]
