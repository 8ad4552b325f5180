"""Many episodes of a program at once, through one explorer: whether each is recorded as its own, and what it costs.

Every episode makes a client of its own, as an agent that knows a base URL and a key does, or all share one of HTTP. It says a
name that no other has, and asks a second time only when all have asked once: so they are in flight together. The engine says
back what it hears, so that the two answers of an episode tell whose they are. The log is in memory.

`held_ms`: a heart beats on the explorer's event loop, and between two beats the loop's thread has done so much work at most:
processor time of that thread alone, which other programs on the machine do not lengthen. `descriptors_per_episode`: of
connections, whose both ends are here, at their most. `memory_mb`: at the most, above what was held before.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.engines.scripted import ScriptedEngine
from infra.cli.bench.common.peak import held_bytes, most_bytes
from infra.cli.bench.serving.held import BEAT_S
from schemas import Experience, Issued, Message, Task
from schemas.ids import group_id

GROUP_SIZE = 10
NAME_CHARS = 16
TOKEN_S = 0.01
LOOK_S = 0.2
WAIT_S = 1200.0


class BenchAgent:
    """Asks twice. episodes: so many have asked once before any asks again. one_client: of HTTP, for all of them."""

    def __init__(self, *, episodes: int, one_client: bool) -> None:
        from openai import DefaultAsyncHttpxClient

        self._all = asyncio.Barrier(episodes)
        self._http = DefaultAsyncHttpxClient(timeout=None) if one_client else None

    async def __call__(self, task: dict[str, Any], base_url: str, key: str, model: str) -> dict[str, Any]:
        """Returns the name that it said as its answer."""
        from openai import AsyncOpenAI

        name = secrets.token_hex(NAME_CHARS // 2)
        client = AsyncOpenAI(base_url=base_url, api_key=key, timeout=None, http_client=self._http)
        said: list[Any] = [*task["messages"], {"role": "user", "content": name}]
        first = await client.chat.completions.create(model=model, messages=said)
        async with asyncio.timeout(WAIT_S):  # where one failed before
            await self._all.wait()
        said += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": name}]
        await client.chat.completions.create(model=model, messages=said)
        return {"reward": 1.0, "answer": name}


def run(episodes: int = 2000, *, one_client: bool = False) -> dict[str, float]:
    """Run them; what was recorded, and how long the loop stood still."""
    with TemporaryDirectory() as folder:
        return asyncio.run(_measured(episodes, one_client, Path(folder)))


async def _measured(episodes: int, one_client: bool, folder: Path) -> dict[str, float]:
    from actors.config import ExploreConfig
    from actors.gateway.http.listen import forget_loaded
    from actors.rollout.explorer import run_explorer
    from infra.cli.demo.char_model import CHARACTERS, TURNS_TEMPLATE, Vocabulary, build_char_model
    from infra.log.log import Log
    from infra.log.memory import MemoryBus
    from infra.model.model import load_tokenizer
    from infra.observe.metrics import Metrics
    from infra.roles.role import Role
    from infra.settings.config import Floor
    from infra.store.memory import MemoryStore
    from schemas import Block
    from schemas.topics import EXPERIENCES, TASKS

    tokenizer = load_tokenizer(build_char_model(folder / "model", 0, Vocabulary(CHARACTERS, r"[\s\S]", TURNS_TEMPLATE)))
    store = MemoryStore()
    log = Log(MemoryBus(), "bench", store=store)
    await log.create_topics(partitions=1, keep_ms=3_600_000)
    metrics, stop = Metrics("explore"), asyncio.Event()
    floor = Floor(app="bench", folder=folder)
    role = Role(floor=floor, log=log, store=store, metrics=metrics, instance="bench", stop=stop)
    config = ExploreConfig(
        workflow="actors.program.workflow:Program",
        options={"use": f"{__name__}:BenchAgent", "options": {"episodes": episodes, "one_client": one_client}},
        episodes_in_flight=episodes,
    )

    def heard(prompt: tuple[int, ...]) -> Sequence[int]:
        return [*prompt[-NAME_CHARS:], *tokenizer.eos_ids]

    engine = ScriptedEngine(script=heard, token_s=TOKEN_S)
    before_mb, before_fds = held_bytes() / 1e6, _num_descriptors()
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    exploring = asyncio.create_task(
        run_explorer(role, config, engine, tokenizer, tokenizer.eos_ids, started=forget_loaded)
    )
    await log.publish_all(TASKS, _tasks(episodes))
    held_s, num_descriptors = await _watched(exploring, lambda: metrics.counters().get("episodes", 0.0) >= episodes)
    figures = {
        "wall_s": time.perf_counter() - begin_s,
        "cpu_ms_per_episode": 1000 * (time.process_time() - cpu_s) / episodes,
        "held_ms": 1000 * held_s,
        "descriptors_per_episode": (num_descriptors - before_fds) / episodes,
        "memory_mb": most_bytes() / 1e6 - before_mb,
    }
    found = [
        one
        async for message in log.read_all(EXPERIENCES)
        if isinstance(message.value, Block)
        for one in message.value.experiences
    ]
    exploring.cancel()
    with suppress(asyncio.CancelledError):
        await exploring
    return figures | _told(found, tokenizer, episodes)


def _tasks(episodes: int) -> list[Task]:
    """Issued in groups, the last one smaller where they do not come out even."""
    tasks = []
    for index, start in enumerate(range(0, episodes, GROUP_SIZE)):
        num = min(GROUP_SIZE, episodes - start)
        name = f"say-{index}"
        issued = Issued(
            group=group_id(name, 0), attempt=0, num_episodes=num, sequence=index, min_version=0, max_tokens=64
        )
        tasks.append(Task(id=name, messages=(Message(role="user", content="Say it back: "),), issued=issued))
    return tasks


async def _watched(exploring: "asyncio.Task[None]", is_over: Callable[[], bool]) -> tuple[float, int]:
    """The most processor seconds of this thread between two beats, and the most descriptors, until it is over."""
    held_s, before_s, descriptors, look_s = 0.0, time.thread_time(), 0, 0.0
    while not exploring.done():
        await asyncio.sleep(BEAT_S)
        now_s = time.thread_time()
        held_s, before_s = max(held_s, now_s - before_s), now_s
        if time.perf_counter() > look_s:
            if is_over():
                break
            descriptors = max(descriptors, _num_descriptors())
            look_s, before_s = time.perf_counter() + LOOK_S, time.thread_time()  # to look is no work of theirs
    return held_s, descriptors


def _told(found: Sequence[Experience], tokenizer: Any, episodes: int) -> dict[str, float]:
    """Whose the recorded answers are. not_their_own: episodes without the two answers that they got, in one sequence."""
    own = set()
    for one in found:
        name = str(one.notes.get("answer"))
        said = [tokenizer.decode(one.tokens[span.start : span.stop].tolist()) for span in one.spans]
        if one.end == "terminal" and one.last and said == [name] * 2:
            own.add((one.group, one.episode, name))
    names = {name for _, _, name in own}
    return {
        "failed": float(sum(one.end == "failed" for one in found)),
        "not_their_own": float(episodes - min(len(own), len(names))),
        "sequences_per_episode": len(found) / episodes,
    }


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
