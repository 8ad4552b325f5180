"""The meta of a task, which users write, decides nothing: such a task is trained like any other, and its meta stays theirs."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


def script() -> Any:
    """Every second answer to a question is right."""
    asked: Counter[tuple[int, ...]] = Counter()

    def said(prompt: tuple[int, ...]) -> list[int]:
        asked[prompt] += 1
        return [*map(ord, "yes" if asked[prompt] % 2 else "no"), 0]

    return said


def shape(experience: Experience) -> dict[str, Any]:
    """All of a header that may not depend on the meta or on which task it is."""
    own = ("id", "group", "episode", "sequence", "meta", "bulk", "task", "num_tokens", "spans")
    return {name: getattr(experience, name) for name in experience.__struct_fields__ if name not in own}


def by_reward(experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Two of a group's three answers are right, any two."""
    assert all(member.reward is not None and member.advantage is not None for member in experiences)
    return sorted(map(shape, experiences), key=lambda header: float(header["reward"]))


async def test_a_task_whose_meta_holds_a_word_of_headrace_trains_like_any_other(tmp_path: Path) -> None:
    """Through rollout, verify, collect, admission, buffer and draw."""
    log = await memory_log()
    admission = Admission(AdmissionLimits(groups_per_step=len(CASES) + 1, max_staleness=1, steps_per_version=1))
    tasks = [
        rollout(task(name, meta=meta), MASTER, round=0, attempt=0, sequence=number, min_version=0)
        for number, (name, meta) in enumerate({PLAIN: {}, **CASES}.items())
    ]
    for item in tasks:
        assert item.issued is not None
        admission.issued(item.issued, 0.0)
    heard = TopicArrivals(log, EXPERIENCES)
    listener = asyncio.create_task(heard.listen())
    rollouts = explorer(log, folder_store(tmp_path), ScriptedEngine(script=script()))
    async with running(rollouts, listener), working(log, CONFIG, tmp_path):
        await log.publish_all(TASKS, tasks)
        await until(lambda: len(heard.experiences) == len(tasks) * MASTER.num_episodes, seconds=60)
        await settled(log)
    async for entry in log.scan(PROGRESS):
        if isinstance(entry.value, Closure):
            admission.closed(entry.value)
    buffer = Buffer({"usual": 1})
    async for message in log.scan(BUFFER):
        assert isinstance(message.value, Block)
        assert buffer.add(message.offset, encode(message.value), message.value) == ""
    candidates = {candidate.group: candidate for candidate in buffer.candidates("usual")}
    buffered = {item.group: item.experiences for item in buffer.take(list(candidates.values()))}
    admission.drawn(Drawn(token=1, step=0, version=0, groups=tuple(buffered)))
    assert admission.outstanding == {}
    same = ("lane", "num_experiences", "revision", "min_version", "uses", "has_ratio", "is_pair", "key_id")
    plain = f"{PLAIN}.0"
    for name, meta in CASES.items():
        group = f"{name}.0"
        sampled = [member for member in heard.experiences if member.group == group]
        assert [member.meta for member in sampled] == [meta] * MASTER.num_episodes, name
        assert [member.meta for member in buffered[group]] == [meta] * MASTER.num_episodes, name
        assert {(member.task, member.answer) for member in buffered[group]} == {(name, "yes")}
        assert by_reward(buffered[group]) == by_reward(buffered[plain]), name
        assert all(getattr(candidates[group], field) == getattr(candidates[plain], field) for field in same), name
