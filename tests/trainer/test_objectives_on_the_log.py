"""A critic and preference pairs through the trainer's own loop: drawn whole, and the same bits after a restart."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.cli.demo.char_model import build_char_model
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Floor, Pacing
from infra.store.directory import DirectoryStore
from schemas import Batch, Block, Span, make_experience, topics
from tests.role import role_of
from trainer.config import CriticConfig, LaneConfig, TrainerConfig
from trainer.learners.torch import TorchLearner
from trainer.train import run_trainer

FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=99, straggler_s=0.01))
STEPS = 4


def config(steps: int) -> TrainerConfig:
    lanes = {
        "usual": LaneConfig(loss="ppo", weight=0.8, options={"minibatches": 2}),
        "human": LaneConfig(loss="dpo", weight=0.2, share=0.5, max_uses=9, optional=True),
    }
    return TrainerConfig(
        lanes=lanes,  # type: ignore[arg-type]
        critic=CriticConfig(learning_rate=1e-3),
        learning_rate=1e-3,
        threads=1,
        checkpoint_every=2,
        max_steps=steps,
    )


def group(sequence: int) -> Block:
    random = np.random.default_rng(sequence)
    return Block(
        tuple(
            make_experience(
                tokens=[1, 20, *random.integers(30, 60, 3 + episode).tolist()],
                logprobs=np.full(3 + episode, -np.log(128)),
                messages=(),
                spans=(Span(2, 5 + episode, 0),),
                id=f"task-{sequence}.0.0-{episode}-0",
                group=f"task-{sequence}.0",
                episode=episode,
                group_size=3,
                sequence=sequence,
                end="truncated" if episode == 2 else "terminal",
                reward=float(episode),
            )
            for episode in range(3)
        )
    )


def pair(number: int, rejected: int = 41) -> Block:
    return Block(
        tuple(
            make_experience(
                tokens=[1, 25, answer, 2],
                logprobs=[0.0, 0.0],
                messages=(),
                spans=(Span(2, 4, -1, 1.0, False),),
                id=f"pair-{number}.0.0-{episode}-0",
                group=f"pair-{number}.0",
                episode=episode,
                group_size=2,
                lane="human",
                kind=side,  # type: ignore[arg-type]
            )
            for episode, (side, answer) in enumerate((("chosen", 40), ("rejected", rejected)))
        )
    )


async def filled(folder: Path) -> tuple[Log, DirectoryStore]:
    store = DirectoryStore(folder)
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    for number in range(4):
        await log.publish(topics.BUFFER, pair(number))
    await log.publish(topics.BUFFER, pair(9, rejected=40))
    for sequence in range(2 * STEPS):
        await log.publish(topics.BUFFER, group(sequence))
    return log, store


async def train(log: Log, store: DirectoryStore, model: str, steps: int) -> TorchLearner:
    learner = TorchLearner(model, config(steps), device="cpu")
    await run_trainer(role_of("train", FLOOR, log, store), config(steps), learner, seed=3)
    return learner


@pytest.mark.slow
def test_pairs_are_drawn_whole_and_a_restarted_critic_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = str(build_char_model(tmp_path / "model", seed=3))

    async def main() -> tuple[TorchLearner, TorchLearner, list[object]]:
        whole = await train(*await filled(tmp_path / "whole"), model, STEPS)
        log, store = await filled(tmp_path / "halves")
        await train(log, store, model, STEPS // 2)
        return whole, await train(log, store, model, STEPS), [one.value async for one in log.read_all(topics.BATCHES)]

    whole, halves, records = asyncio.run(main())
    batches = [one for one in records if isinstance(one, Batch)]
    assert [one.step for one in batches] == list(range(STEPS))
    for one in batches:
        human = [item.id for item in one.items if item.lane == "human"]
        assert human and human[0::2] == [name.replace("-1-0", "-0-0") for name in human[1::2]]
        assert not any(name.startswith("pair-9") for name in human), "equal sides teach nothing"
    saved, again = whole.save(), halves.save()
    assert saved.keys() == again.keys() and any(name.startswith("critic/") for name in saved)
    assert all(bytes(saved[name].data) == bytes(again[name].data) for name in saved)
