"""What users write into a task's meta decides nothing: such a task is trained like any other, and its meta stays theirs."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.engines.scripted import ScriptedEngine
from actors.master.admission import Admission, AdmissionLimits
from actors.master.plan import rollout
from schemas import Block, Closure, Drawn, Experience, encode
from schemas.topics import BUFFER, EXPERIENCES, PROGRESS, TASKS
from streams.config import RewardConfig, ScoreConfig, StreamsConfig
from tests.actors.rig import MASTER, TopicArrivals, explorer, folder_store, memory_log, running, task, until
from tests.streams.memory_worker import settled, working
from trainer.buffer.buffer import Buffer

Value = str | int | float | bool | None
# Words that headrace has for an experience, and values that once decided something, or would if they were believed.
WORDS: dict[str, tuple[Value, ...]] = {
    "split": ("validation", "train", True),
    "withdrawn": (True,),
    "pair": ("chosen", "rejected"),
    "kind": ("withdrawal", "chosen", "demonstration"),
    "held_out": (True,),
    "trial": (7, -5, "seven"),
    "session": (True,),
    "messages": (0, -3, 10**12),
    "turn": (3, -1),
    "carried": (2,),
    "correction": ("no", None),
    "edits": (2, True),
    "edit": ("no",),
    "batch.weight": (0.0, 1e300, "heavy"),
    "weight": (0.0,),
    "failure": ("gone", ""),
    "part_reason": ("history rewritten",),
    "truncated": ("max_turns", True),
    "finish": ("length",),
    "parent": ("add.0.0-0-0",),
    "answer": ("no", 7, None),
    "task": ("another", 7),
    "traceparent": ("00-ab-cd-01", "x" * 100_000),
    "subject": ("ann",),
    "experience": ("add.0.0-0-0",),
    "retrained": (9,),
    "notes": ("none",),
    "lane": ("expert",),
    "suite": ("held-out",),
    "end": ("failed",),
    "reward": (-1.0,),
    "key_id": ("k1",),
    "revision": (5,),
}
CASES = {
    f"case-{word}-{index}": {word: value, "level": "easy"} for word in WORDS for index, value in enumerate(WORDS[word])
}
PLAIN = "plain"
CONFIG = StreamsConfig(
    score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),), reward=RewardConfig(require=("exact",))
)


class Passage(msgspec.Struct):
    """What became of each task, by its id."""

    sampled: dict[str, list[Experience]]
    buffered: dict[str, list[Experience]]
    candidates: dict[str, Any]
    admission: Admission
    refused: dict[str, str]


def script() -> Any:
    """Every second answer to a question is right."""
    asked: Counter[tuple[int, ...]] = Counter()

    def said(prompt: tuple[int, ...]) -> list[int]:
        asked[prompt] += 1
        return [*map(ord, "yes" if asked[prompt] % 2 else "no"), 0]

    return said


async def passed(folder: Path) -> Passage:
    """All tasks through rollout, verify, collect, admission, buffer and draw."""
    log = await memory_log()
    admission = Admission(AdmissionLimits(groups_per_step=len(CASES) + 1, max_staleness=1, steps_per_version=1))
    names = {PLAIN: {}, **CASES}
    tasks = [
        rollout(task(name, meta=meta), MASTER, round=0, attempt=0, sequence=number, min_version=0)
        for number, (name, meta) in enumerate(names.items())
    ]
    for item in tasks:
        assert item.issued is not None
        admission.issued(item.issued, 0.0)
    heard = TopicArrivals(log, EXPERIENCES)
    listener = asyncio.create_task(heard.listen())
    rollouts = explorer(log, folder_store(folder), ScriptedEngine(script=script()))
    async with running(rollouts, listener), working(log, CONFIG, folder):
        await log.publish_all(TASKS, tasks)
        await until(lambda: len(heard.experiences) == len(tasks) * MASTER.num_episodes, seconds=60)
        await settled(log)
    closures = [entry.value async for entry in log.read_all(PROGRESS) if isinstance(entry.value, Closure)]
    for closure in closures:
        admission.closed(closure)
    buffer = Buffer({"usual": 1})
    refused = {}
    async for message in log.read_all(BUFFER):
        assert isinstance(message.value, Block)
        if reason := buffer.add(message.offset, encode(message.value), message.value):
            refused[message.value.group] = reason
    candidates = buffer.candidates("usual")
    trained = buffer.take(candidates)
    admission.drawn(Drawn(token=1, step=0, version=0, groups=tuple(one.group for one in trained), dropped=refused))
    sampled: dict[str, list[Experience]] = {}
    for experience in heard.experiences:
        sampled.setdefault(experience.group, []).append(experience)
    return Passage(
        sampled=sampled,
        buffered={each.group: list(each.experiences) for each in trained},
        candidates={candidate.group: candidate for candidate in candidates},
        admission=admission,
        refused=refused,
    )


@pytest.fixture(scope="module")
def passage(tmp_path_factory: pytest.TempPathFactory) -> Passage:
    return asyncio.run(passed(tmp_path_factory.mktemp("passage")))


def shape(one: Experience) -> dict[str, Any]:
    """All of a header that may not depend on the meta or on which task it is."""
    of_task = ("id", "group", "episode", "sequence", "meta", "bulk", "task", "num_tokens", "spans")
    return {name: getattr(one, name) for name in one.__struct_fields__ if name not in of_task}


def reward(of: dict[str, Any]) -> float:
    assert of["reward"] is not None and of["advantage"] is not None
    return float(of["reward"])


@pytest.mark.parametrize("name", CASES)
def test_a_task_whose_meta_holds_a_word_of_headrace_trains_like_any_other(name: str, passage: Passage) -> None:
    group, plain = f"{name}.0", f"{PLAIN}.0"
    assert [item.meta for item in passage.sampled[group]] == [CASES[name]] * MASTER.num_episodes
    mine, others = passage.buffered[group], passage.buffered[plain]
    assert [entry.meta for entry in mine] == [CASES[name]] * MASTER.num_episodes
    assert {each.task for each in mine} == {name} and {one.answer for one in mine} == {"yes"}
    # Which of a group's three answers are right may differ: two are.
    assert sorted(map(shape, mine), key=reward) == sorted(map(shape, others), key=reward)
    one, other = passage.candidates[group], passage.candidates[plain]
    same = ("lane", "num_experiences", "revision", "min_version", "uses", "has_ratio", "is_pair", "key_id")
    assert [getattr(one, field) for field in same] == [getattr(other, field) for field in same]


def test_no_group_is_outstanding_for_ever_because_of_its_meta(passage: Passage) -> None:
    assert passage.refused == {} and passage.admission.outstanding == {}
