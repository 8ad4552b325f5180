"""Tasks with images through the explorer on a log in memory: pixels to the engine, references to the log."""

import asyncio

import numpy as np

from actors.engines.scripted import ScriptedEngine
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.images import MISSING, deposit_image
from infra.store.memory import MemoryStore
from schemas import DropMarker, Image, Issued, Message, Task
from schemas.topics import EXPERIENCES, TASKS, VERIFIED
from tests.actors.looking import Looking
from tests.actors.rig import EOS, EXPLORE, FLOOR, CharTokenizer, TopicArrivals, memory_log, running, until
from tests.eye_model import drawings
from tests.role import role_of


def looks() -> Looking:
    return Looking(seed=1, num_vocabulary=128, max_model_len=64)


def issued(name: str, *images: Image) -> Task:
    task = Task(id=name, messages=(Message(role="user", content="count", images=images),), answer="1")
    return Task(
        id=name,
        messages=task.messages,
        answer="1",
        issued=Issued(group=f"{name}.0", attempt=0, num_episodes=2, max_tokens=3),
    )


async def explore(
    store: MemoryStore, tasks: list[Task], engine: ScriptedEngine
) -> tuple[TopicArrivals, TopicArrivals, Metrics]:
    from actors.rollout.explorer import run_explorer

    log: Log = await memory_log(store=store)
    metrics = Metrics("explore")
    raw, verified = TopicArrivals(log, EXPERIENCES), TopicArrivals(log, VERIFIED)
    role = role_of("explore", FLOOR, log, store, metrics=metrics)
    explorer = run_explorer(role, EXPLORE, engine, CharTokenizer(), (EOS,))
    roles = [asyncio.create_task(one) for one in (explorer, raw.listen(), verified.listen())]
    async with running(*roles):
        await log.publish_all(TASKS, tasks)
        await until(lambda: len(raw.experiences) + len(verified.of(DropMarker)) >= 2 * len(tasks))
    return raw, verified, metrics


def test_the_engine_is_shown_the_pixels_and_the_experience_keeps_the_references() -> None:
    store, engine = MemoryStore(), looks()
    found = drawings(2)
    for one in found:
        deposit_image(store, one.image, one.picture)
    raw, _, _ = asyncio.run(explore(store, [issued("two", *(one.image for one in found))], engine))
    assert len(engine.seen) == 2 and all(len(images) == 2 for images in engine.seen)
    first, second = engine.seen[0]
    assert first.shape == second.shape == (16, 16, 3) and not np.array_equal(first, second)
    for experience in raw.experiences:
        assert [image.sha256 for image in experience.messages[0].images] == [one.image.sha256 for one in found]


def test_an_image_that_cannot_be_shown_fails_its_own_episodes_by_name_and_is_counted() -> None:
    store = MemoryStore()
    good, gone = drawings(2)
    deposit_image(store, good.image, good.picture)
    tasks = [issued("good", good.image), issued("gone", gone.image)]
    raw, verified, metrics = asyncio.run(explore(store, tasks, looks()))
    assert {one.group for one in raw.experiences} == {"good.0"} and len(raw.experiences) == 2
    assert [stub.group for stub in verified.of(DropMarker)] == ["gone.0"] * 2
    counted = {name: value for name, value in metrics.counters().items() if "bad_images" in name}
    assert sum(counted.values()) == 2 and any(MISSING in name for name in counted)


def test_an_engine_of_text_alone_refuses_images_by_name() -> None:
    store = MemoryStore()
    (one,) = drawings(1)
    deposit_image(store, one.image, one.picture)
    engine = ScriptedEngine(seed=1, num_vocabulary=128, max_model_len=64)
    raw, verified, metrics = asyncio.run(explore(store, [issued("plain", one.image)], engine))
    assert not raw.experiences and len(verified.of(DropMarker)) == 2
    assert metrics.counters()["requests_failed"] == 2
