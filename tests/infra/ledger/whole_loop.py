"""The whole loop on the memory log: master, scripted explorer, streams, scripted trainer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from actors.engines.scripted import ScriptedEngine
from infra.chain.processor import score
from infra.log.log import Log
from infra.settings.config import Floor, Pacing
from infra.store.directory import DirectoryStore
from schemas import Drawn, Experience
from schemas.topics import EXPERTS, PROGRESS
from streams.config import CollectConfig, ScoreConfig, StreamsConfig
from tests.actors.rig import MASTER, explorer, load, master, memory_log, running
from tests.role import role_of
from tests.streams.collect.collecting import answer, block
from tests.streams.memory_worker import work
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

# One version for the whole test: the scripted learner's weights mean nothing to the scripted engine.
PACING = Pacing(groups_per_step=2, max_staleness=0, steps_per_version=100_000, straggler_s=0.05, reissue_s=5.0)
FLOOR = Floor(app="test", pacing=PACING)
STREAMS = StreamsConfig(
    score=(ScoreConfig(name="first", use="tests.infra.ledger.whole_loop:first_token"),),
    collect=CollectConfig(deadline_s=3600),
)
TRAINER = TrainerConfig(
    lanes={"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1, max_uses=1, optional=True)}
)


@score(version=1, inline=True)
def first_token(experience: Experience) -> float:
    """Something that differs between the episodes of a group."""
    return float(experience.tokens[experience.num_prompt] % 2)


async def train(log: Log, store: DirectoryStore) -> None:
    await run_trainer(role_of("train", FLOOR, log, store), TRAINER, ScriptedLearner())


@asynccontextmanager
async def whole_loop(folder: Path, *, with_master: bool = True) -> AsyncIterator[Log]:
    """Master, explorer, streams and trainer, turning."""
    store = DirectoryStore(folder / "store")
    log = await memory_log(store=store)
    await load(log, train=8)
    for index in range(40):
        await log.publish(EXPERTS, block(answer(f"shown{index}.0", 0, size=1, lane="expert")))
    roles = [
        asyncio.create_task(train(log, store)),
        explorer(log, store, ScriptedEngine()),
        asyncio.create_task(work(log, STREAMS, folder / "state")),
    ]
    if with_master:
        roles.append(master(log, MASTER, PACING))
    async with running(*roles):
        yield log


async def trained_steps(log: Log, count: int) -> None:
    drawn = 0
    async with asyncio.timeout(60):
        async for message in log.tail(PROGRESS, "beginning"):
            drawn += isinstance(message.value, Drawn)
            if drawn >= count:
                return
