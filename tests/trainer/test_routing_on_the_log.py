"""Routing from the engine to the learner on a log in memory: recorded, stored, trained on, replayed to the bit."""

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from actors.config import MasterConfig
from actors.engines.torch import TorchEngine
from actors.master.plan import rollout
from actors.rollout.session import Session
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_model
from infra.model.routers import Routers
from infra.observe.metrics import Metrics
from infra.settings.config import Floor, Pacing, Use
from infra.store.memory import MemoryStore
from schemas import Block, Experience, Message, Score, Task, topics
from schemas.wire.block import blocks_of
from schemas.wire.routing import routing
from tests.actors.rig import EXPLORE, TopicArrivals, explorer, running, task, until
from tests.infra.tiny_families import build_family
from tests.role import role_of
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import Position
from trainer.learners.torch import TorchLearner
from trainer.loop.report import TrainerReport
from trainer.loop.state import Learning
from trainer.replay.replay import find_start, replay
from trainer.state import whole_hash
from trainer.train import run_trainer

FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=9, straggler_s=0.01))
MASTER = MasterConfig(num_episodes=3, max_tokens=6)
CONFIG = TrainerConfig(
    lanes={"usual": LaneConfig(loss="grpo")}, learning_rate=1e-3, checkpoint_every=1, max_steps=2, tensorboard="",
    routing="replay",
)  # fmt: skip
GROUPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_family(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", head_dim=8)


async def two_turns(task: Task, session: Session) -> tuple[Score, ...]:
    reply = await session.reply(task.messages)
    await session.reply((*task.messages, reply, Message(role="user", content="?")))
    return ()


async def explored(log: Log, model: Path, store: MemoryStore, max_routing_bytes: int) -> list[Experience]:
    """What an explorer publishes of a few groups, the engine recording."""
    engine = TorchEngine(model=str(model), seed=1, routing=True)
    config = replace(EXPLORE, workflows={"two": Use(use=f"{__name__}:two_turns")}, max_routing_bytes=max_routing_bytes)
    heard = TopicArrivals(log, topics.EXPERIENCES)
    async with running(explorer(log, store, engine, config), asyncio.create_task(heard.listen())):
        for number in range(GROUPS):
            one = task(f"add-{number}", workflow="two")
            await log.publish(topics.TASKS, rollout(one, MASTER, round=0, attempt=0, sequence=number, min_version=0))
        await until(lambda: sum(one.last for one in heard.experiences) == GROUPS * MASTER.num_episodes)
    return heard.experiences


async def run(model: Path, *, max_routing_bytes: int = 10_000) -> tuple[Log, MemoryStore, TorchLearner, Metrics]:
    """Explorer and trainer, one after the other; what lies between them is a group's reward."""
    store = MemoryStore()
    log = Log(MemoryBus(), "t", store=store)
    await log.create_topics(partitions=2, keep_ms=-1)
    groups: dict[str, list[Experience]] = {}
    for one in await explored(log, model, store, max_routing_bytes):
        groups.setdefault(one.group, []).append(replace(one, reward=1.0, advantage=one.episode - 1.0))
    for members in sorted(groups.values(), key=lambda members: members[0].sequence):
        (block,) = blocks_of(sorted(members, key=lambda one: one.id))
        await log.publish(topics.BUFFER, block)
    learner, metrics = TorchLearner(str(model), CONFIG, device="cpu"), Metrics("train")
    await run_trainer(role_of("train", FLOOR, log, store, metrics=metrics), CONFIG, learner, seed=3)
    return log, store, learner, metrics


def test_what_the_engine_used_is_what_the_learner_uses_and_a_replay_gives_the_same_bits(model: Path) -> None:
    async def main() -> None:
        log, store, learner, metrics = await run(model)
        blocks = [message.value async for message in log.read_all(topics.BUFFER)]
        members = [one for block in blocks if isinstance(block, Block) for one in block.experiences]
        plain = load_model(str(model))
        routers = Routers(plain)
        for one in members:
            with torch.no_grad(), routers.recorded() as taken:
                plain(input_ids=torch.tensor([one.tokens.tolist()]), use_cache=False)
            expected = torch.stack(taken, 1).numpy()
            assert (routing(one)[:-1] == expected[:-1]).all() and (routing(one)[-1] == -1).all()

        told = {
            name.removeprefix("usual/"): value for name, value in metrics.gauges().items() if name.startswith("usual/")
        }
        assert told["routing_replayed"] == 1.0 and told["routing_without"] == 0.0
        assert 0 <= told["routing_differs_layers"] <= told["routing_differs"] < 1

        other = TorchLearner(str(model), CONFIG, device="cpu")
        report = TrainerReport(Metrics("replay"))
        learning = Learning(floor=FLOOR, config=CONFIG, learner=other, report=report, position=Position())
        start = await find_start(log, store, "t", from_step=-1, to_step=None)
        compared = [one async for one in replay(learning, "t", log, store, start)]
        assert compared and all(one.equal and not one.fault for one in compared)
        assert whole_hash(other.save()) == whole_hash(learner.save())

    asyncio.run(main())


def test_sequences_above_the_bound_are_trained_without_replay_and_counted(model: Path) -> None:
    _, _, _, metrics = asyncio.run(run(model, max_routing_bytes=1))
    gauges = metrics.gauges()
    assert gauges["usual/routing_replayed"] == 0.0 and gauges["usual/routing_without"] > 0
