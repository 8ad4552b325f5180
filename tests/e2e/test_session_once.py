"""A session of twenty turns through the real gateway, the stages and the trainer: each token is computed once."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.gateway.access.keys import create_key
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import Batch, Experience
from schemas.topics import BATCHES, VERIFIED, Topic
from streams.sources.source import build_sources, run_sources
from tests.actors.gateway.gateway_rig import engine, says, serving
from tests.e2e.test_live_answer_is_trained import WINDOW_MS, Clock, settings_in
from tests.role import role_of
from tests.streams.deliveries import until_stored
from tests.streams.memory_worker import working
from tests.trainer.trainer_samples import num_positions
from trainer.batch.assemble import journaled_items
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import read_blocks
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

TURNS = 20
SESSION = {"x-session-id": "chat-81"}


def check_once(items: Sequence[TrainItem], turns: Sequence[Experience]) -> None:
    """Every sampled token is trained once, and for each token of the session one position is computed."""
    whole = max(turns, key=lambda one: one.num_tokens)
    packed = pack(items, max_tokens=256)  # less than the session
    sampled = sum(turn.num_sampled for turn in turns)
    assert packed.num_tokens == sampled and sum(len(m.target_N) for m in packed.microbatches) == sampled
    assert num_positions(packed) / whole.num_tokens == pytest.approx(1.0, abs=0.01)
    alone = [
        msgspec.structs.replace(item, experience=msgspec.structs.replace(item.experience, join=None)) for item in items
    ]
    assert num_positions(pack(alone, max_tokens=256)) / whole.num_tokens >= TURNS / 2


async def first_of(log: Log, topic: Topic, kind: type[Any]) -> Any:
    """The first record of a kind, once there is one."""
    async with asyncio.timeout(120):
        async for message in log.read_all(topic, until_end=False):
            if isinstance(message.value, kind):
                return message.value
    raise AssertionError("unreachable")


async def test_a_session_of_20_turns_is_trained_once_from_the_gateway_to_the_batch(tmp_path: Path) -> None:
    settings, clock = settings_in(tmp_path / "support"), Clock()
    bus, store, stop = MemoryBus(clock), MemoryStore(), asyncio.Event()
    _, key = create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
    async with serving(tmp_path, engine(says(*(f"It is {n}." for n in range(TURNS)))), bus=bus, store=store) as served:
        log = served.log
        floor = msgspec.structs.replace(settings, folder=tmp_path)
        training = asyncio.create_task(
            run_trainer(role_of("train", floor, log, store, stop=stop), settings.trainer, ScriptedLearner())
        )
        sources = build_sources(settings.feedback, settings.folder)
        listening = asyncio.create_task(run_sources(sources, log, Metrics("process"), tmp_path / "state"))
        async with working(log, settings.streams(), tmp_path / "state"), served.http(key) as http:
            said: list[dict[str, str]] = []
            for number in range(TURNS):
                said.append({"role": "user", "content": f"What is {number}?"})
                body = {"model": "m", "messages": said}
                answer = (await http.post("/v1/chat/completions", json=body, headers=SESSION)).json()
                said.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                rated = {"answer_id": answer["id"], "value": number % 2}
                assert (await http.post("/v1/feedback", json=rated)).status_code == 202
                clock.now_ms += 1000
            turns = await served.recorded(TURNS)
            await until_stored(log, VERIFIED, 2 * TURNS)  # the answers, and what was said of them
            clock.now_ms += WINDOW_MS + 1000 * int(settings.collect.session_s)
            batch = await first_of(log, BATCHES, Batch)
            items = journaled_items(batch, await read_blocks(log, {item.offset for item in batch.items}))
        stop.set()
        listening.cancel()
        await training
    assert [item.id for item in batch.items] == [turn.id for turn in turns]
    assert [entry.carried for entry in turns] == list(range(TURNS))
    said = next(each.name for each in settings.feedback if each.from_.webhook)
    assert [one.experience.score(said) for one in items] == [float(number % 2) for number in range(TURNS)], (
        "each its own"
    )
    check_once(items, turns)
