"""A run of the streams over the memory log, with something of everything, and orders to reprocess it."""

import random
from pathlib import Path

import msgspec

from infra.chain.processor import Drop, Verdict, processor, score
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import Floor
from schemas import Block, Experience, Feedback, Task
from schemas import Message as Said
from schemas.topics import EXPERIENCES, EXPERTS, TASKSET_RAW, VERIFIED
from streams.config import (
    CollectConfig,
    FeedbackConfig,
    From,
    ProcessorConfig,
    RewardConfig,
    ScoreConfig,
    StreamsConfig,
    SynthesizeConfig,
)
from streams.reprocess.report import ReprocessReport
from streams.reprocess.run import ReprocessOrder, plan, reprocess
from tests.streams.collect.collecting import answer, stub
from tests.streams.memory_worker import settled, working

MODULE = "tests.streams.reprocess.recorded_run"
ASKED: list[str] = []


@score(version=1)
async def judge(experience: Experience, *, strict: float = 0.5) -> Verdict:
    """An outside verdict: what was asked is counted."""
    ASKED.append(experience.id)
    if experience.id.endswith("-3-0") and "t7" in experience.id:
        raise RuntimeError("the judge is away")
    return Verdict(value=strict * (experience.episode % 3), model="judge-1")


@processor(version=1)
async def not_third(experience: Experience, *, episode: int = 3) -> Experience | Drop:
    return Drop("third") if experience.episode == episode and "t1" in experience.group else experience


@processor(version=2, inline=True)
def favour(group: tuple[Experience, ...]) -> tuple[Experience, ...]:
    return tuple(msgspec.structs.replace(member, priority=0.25) for member in group)


CONFIG = StreamsConfig(
    processor=(ProcessorConfig(use=f"{MODULE}:not_third", after="validate"),),
    score=(ScoreConfig(name="judge", use=f"{MODULE}:judge"),),
    feedback=(
        FeedbackConfig(name="csat", use=f"{MODULE}:unread", from_=From(topic="tickets"), window="1h", late="amend"),
    ),
    reward=RewardConfig(blend={"judge": 1.0, "csat": 2.0}),
    collect=CollectConfig(deadline_s=3600, synthesize=SynthesizeConfig(on=True, min_reward=0.9)),
)


async def feed(log: Log, groups: int = 40, seed: int = 5) -> None:
    """Groups in pieces, demonstrations, duplicates, evals, poison, lone answers with feedback in time and late, tasks."""
    chosen = random.Random(seed)
    sent: list[Block] = []
    for index in range(groups):
        name = f"t{index}.0"
        lane = "expert" if index % 10 == 9 else "usual"
        members = [answer(name, episode, size=4, lane=lane) for episode in range(4)]
        if index % 13 == 5:
            members = [msgspec.structs.replace(member, suite="held-out") for member in members]
        topic = EXPERTS if lane == "expert" else EXPERIENCES
        cut = chosen.randrange(1, 4)
        for piece in (members[:cut], members[cut:]):
            sent.append(Block(tuple(piece)))
            await log.publish(topic, sent[-1])
        if index % 4 == 0:
            await log.publish(EXPERIENCES, chosen.choice(sent))
        if index % 17 == 3:
            await log.bus.send(log.name(EXPERIENCES), b"HR\x01\x00garbage", key=name.encode())
        if index % 11 == 2:
            await log.publish(VERIFIED, stub(f"s{index}.0", 0, size=1))
    for index in range(6):
        live = answer(f"live{index}.0", 0, size=1, lane="live")
        await log.publish(EXPERIENCES, Block((live,)))
    for index in range(groups // 2):
        await log.publish(TASKSET_RAW, task(f"task{index}", f"{index % 15}+1=  "))
    await log.publish(TASKSET_RAW, Task(id="empty", messages=()))


async def say(log: Log, value: float, id: str) -> None:
    for index in range(6):
        await log.publish(
            VERIFIED, Feedback(ref=f"hr-live{index}.0.0-0-0", id=f"{id}{index}", value=value, source="csat")
        )


def task(name: str, text: str) -> Task:
    return Task(id=name, messages=(Said(role="user", content=text),))


async def recorded_log(folder: Path, config: StreamsConfig = CONFIG, groups: int = 40) -> Log:
    """A log on which the streams have run to the end."""
    log = Log(MemoryBus(), "app")
    await log.create_topics(partitions=3, keep_ms=-1)
    async with working(log, config, folder / "state"):
        await feed(log, groups)
        await settled(log)
        await say(log, 0.5, "first")
        await settled(log)
        await say(log, 1.0, "late")
        await settled(log)
    return log


async def run(log: Log, stage: str, config: StreamsConfig = CONFIG, **fields: object) -> ReprocessReport:
    order = msgspec.convert({"stage": stage, "diff": True, **fields}, ReprocessOrder)
    return await reprocess(log, order, await plan(log, order), Floor(app=log.app), config, lambda count: None)


def changes(report: ReprocessReport) -> dict[tuple[str, str], int]:
    return {(change.kind, change.reason): change.count for change in report.changes}
