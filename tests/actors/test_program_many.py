"""Hundreds of episodes of a program at once, each with a client and connections of its own."""

import asyncio
import os
import resource
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from actors.config import ExploreConfig
from actors.engines.scripted import ScriptedEngine
from actors.rollout.explorer import run_explorer
from infra.cli.demo.char_model import build_char_model
from infra.local.http_server import forget_loaded
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_tokenizer
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from infra.settings.config import Floor
from infra.store.memory import MemoryStore
from schemas import Block, Experience, Issued, Message, Task
from schemas.ids import group_id
from schemas.topics import EXPERIENCES, TASKS
from tests.tiny_models import TURNS

EPISODES, GROUP_SIZE = 200, 10
NAME_CHARS = 16
FEW = 256  # descriptors, fewer than the connections of all episodes


class AskingAgent:
    """Says a name that no other says, and asks again only when all have asked once: all are in flight together."""

    def __init__(self, *, episodes: int) -> None:
        self._all = asyncio.Barrier(episodes)

    async def __call__(self, task: dict[str, Any], base_url: str, key: str, model: str) -> dict[str, Any]:
        name = secrets.token_hex(NAME_CHARS // 2)
        client = AsyncOpenAI(base_url=base_url, api_key=key, timeout=None)
        said: list[Any] = [*task["messages"], {"role": "user", "content": name}]
        first = await client.chat.completions.create(model=model, messages=said)
        async with asyncio.timeout(300):  # where one failed before
            await self._all.wait()
        said += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": name}]
        await client.chat.completions.create(model=model, messages=said)
        return {"reward": 1.0, "answer": name}


async def explored(folder: Path) -> tuple[list[Experience], set[tuple[str, int, str]], int]:
    """The records, the episodes whose record holds their own two answers, and the maximum of open descriptors."""
    tokenizer = load_tokenizer(build_char_model(folder / "model", 0, TURNS))
    store = MemoryStore()
    log = Log(MemoryBus(), "many", store=store)
    await log.create_topics(partitions=1, keep_ms=3_600_000)
    metrics, stop = Metrics("explore"), asyncio.Event()
    role = Role(
        floor=Floor(app="many", folder=folder), log=log, store=store, metrics=metrics, instance="many", stop=stop
    )
    config = ExploreConfig(
        workflow="actors.program.workflow:Program",
        options={"use": "tests.actors.test_program_many:AskingAgent", "options": {"episodes": EPISODES}},
        episodes_in_flight=EPISODES,
    )

    def repeated(prompt: tuple[int, ...]) -> Sequence[int]:
        return [*prompt[-NAME_CHARS:], *tokenizer.eos_ids]

    engine = ScriptedEngine(script=repeated, token_s=0.01)
    exploring = asyncio.create_task(
        run_explorer(role, config, engine, tokenizer, tokenizer.eos_ids, started=forget_loaded)
    )
    for at in range(EPISODES // GROUP_SIZE):
        issued = Issued(group=group_id(f"say-{at}", 0), attempt=0, num_episodes=GROUP_SIZE, sequence=at, max_tokens=64)
        await log.publish(TASKS, Task(id=f"say-{at}", messages=(Message("user", "Say it back: "),), issued=issued))
    most, deadline_s = 0, time.monotonic() + 300
    while metrics.counters().get("episodes", 0.0) < EPISODES and not exploring.done():
        assert time.monotonic() < deadline_s
        most = max(most, len(os.listdir("/proc/self/fd")))
        await asyncio.sleep(0.05)
    found = [
        experience
        async for message in log.scan(EXPERIENCES)
        if isinstance(message.value, Block)
        for experience in message.value.experiences
    ]
    exploring.cancel()
    with suppress(asyncio.CancelledError):
        await exploring
    own = set()
    for experience in found:
        name = str(experience.notes.get("answer"))
        said = [tokenizer.decode(experience.tokens[span.start : span.stop].tolist()) for span in experience.spans]
        if experience.end == "terminal" and experience.last and said == [name] * 2:
            own.add((experience.group, experience.episode, name))
    return found, own, most


@pytest.mark.full
def test_episodes_at_once_are_each_recorded_as_their_own_also_where_few_descriptors_are_allowed_at_first(
    tmp_path: Path,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, before[1]))
    try:
        found, own, most = asyncio.run(explored(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert most > FEW, "more than were allowed"
    assert len(found) == len(own) == len({name for _, _, name in own}) == EPISODES
