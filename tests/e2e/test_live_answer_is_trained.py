"""From the gateway to the weights, in memory: the settings that `headrace init` writes, and feedback at the last moment."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from actors.gateway.access.keys import create_key
from infra.cli.commands.init import run_init
from infra.cli.settings import Settings, load_settings
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.observe.metrics import Metrics
from infra.settings.config import duration_s
from infra.settings.plugin import add_plugin_folders
from infra.store.memory import MemoryStore
from schemas import Batch, BatchItem, Block, Feedback, Span, make_experience
from schemas.ids import experience_id
from schemas.topics import BATCHES, BUFFER, VERIFIED
from streams.sources.source import build_sources, run_sources
from tests.actors.gateway.gateway_rig import engine, says, serving
from tests.role import role_of
from tests.streams.deliveries import until_stored
from tests.streams.memory_worker import working
from trainer.learners.scripted import ScriptedLearner
from trainer.train import run_trainer

pytestmark = pytest.mark.slow

WINDOW_MS = 600_000
OTHERS = 6


class Clock:
    """The broker's clock, moved by hand. It lies in the past, so that the workers tick for every moment to come."""

    def __init__(self) -> None:
        self.now_ms = wall_ms() - 2 * WINDOW_MS

    def __call__(self) -> int:
        return self.now_ms


def settings_in(folder: Path, *, least: int = 2) -> Settings:
    assert run_init(folder, "model", "torch", "agent") == 0
    # A step takes two and comes at once: the first answer ever has an advantage of 0, and would teach nothing alone.
    small = [f"trainer.lanes.live.min_sequences={least}", "trainer.min_publish_interval=0s"]
    # There is no model beside it, whose tokenizer spells edits.
    settings = load_settings(folder / "headrace.toml", ["app=test", "collect.correct.on=false", *small])
    add_plugin_folders(settings.folder, settings.plugins)
    assert [duration_s(item.window) * 1000 for item in settings.feedback] == [WINDOW_MS]
    return settings


def other(number: int) -> Block:
    """An answer of somebody else, judged already: what makes versions pass."""
    group = f"other{number}.0"
    one = make_experience(
        id=experience_id(group, 0, 0), group=group, episode=0, group_size=1, lane="live", tokens=[1, 2, 3 + number],
        logprobs=[-0.5], messages=(), spans=(Span(start=2, stop=3, version=0),), reward=1.0, advantage=0.5,
    )  # fmt: skip
    return Block((one,))


async def trained(log: Log, name: str) -> tuple[Batch, BatchItem]:
    """The journal's batch that trains this experience."""
    async with asyncio.timeout(120):
        async for message in log.read_all(BATCHES, until_end=False):
            if isinstance(message.value, Batch):
                for item in message.value.items:
                    if item.id == name:
                        return message.value, item
    raise AssertionError("unreachable")


async def rated_at_the_end(log: Log, http: httpx.AsyncClient, answer: str, clock: Clock) -> None:
    """Say what the answer was worth, a millisecond before its window closes, and let that pass."""
    clock.now_ms += WINDOW_MS - 1
    accepted = await http.post("/v1/feedback", json={"answer_id": answer, "value": 1, "id": "f-1"})
    assert accepted.status_code == 202
    async with asyncio.timeout(60):
        async for message in log.read_all(VERIFIED, until_end=False):
            if isinstance(message.value, Feedback):
                break
    clock.now_ms += 1


async def test_an_answer_rated_at_the_end_of_its_window_is_trained_under_the_settings_of_init(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "support")
    clock = Clock()
    bus, store, stop = MemoryBus(clock), MemoryStore(), asyncio.Event()
    _, key = create_key(store, tenant="acme", scopes=("serve", "feedback"), train="yes", rpm=0, tpm=0)
    async with serving(tmp_path, engine(says("It is 82.")), bus=bus, store=store) as served:
        log = served.log
        metrics, sources = Metrics("process"), build_sources(settings.feedback, settings.folder)
        floor = msgspec.structs.replace(settings, folder=tmp_path)
        training = asyncio.create_task(
            run_trainer(role_of("train", floor, log, store, stop=stop), settings.trainer, ScriptedLearner())
        )
        listening = asyncio.create_task(run_sources(sources, log, metrics, tmp_path / "state"))
        async with working(log, settings.streams(), tmp_path / "state"), served.http(key) as http:
            asked = {"model": "m", "messages": [{"role": "user", "content": "37+45?"}]}
            answer = (await http.post("/v1/chat/completions", json=asked)).json()["id"]
            (recorded,) = await served.recorded(1)
            for number in range(OTHERS):
                await log.publish(BUFFER, other(2 * number))
                await log.publish(BUFFER, other(2 * number + 1))
                await until_stored(log, BATCHES, 2 + number)
            await log.publish(BUFFER, other(2 * OTHERS))
            await rated_at_the_end(log, http, answer, clock)
            batch, item = await trained(log, recorded.id)
        stop.set()
        listening.cancel()
        await training
    assert recorded.lane == item.lane == "live" and item.revision == 0
    assert batch.version - recorded.min_version > settings.pacing.max_staleness, "no version limit: it is old by then"
