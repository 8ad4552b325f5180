"""model: a classifier judges as it is published, and goes on judging while a bad version is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.chain.chain import Context, make_step, run_chain
from infra.cli.demo.char_model import build_char_model
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import build_classifier, model_tensors
from infra.observe.metrics import Metrics
from infra.policies.beginning import LOOK
from infra.policies.policy import Adapter
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy, to_numpy
from infra.store.memory import MemoryStore
from schemas import PolicyEvent
from schemas.topics import POLICIES
from streams.scores.model import Model, probability
from streams.worker import companions
from tests.starts import CountingBus, summarize
from tests.streams.scores.answers import answered

ANSWER = answered("280", prompt="37+45=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's character model with a head of one number."""
    folder = build_char_model(tmp_path_factory.mktemp("reward") / "char", 0)
    config = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "good"}, "label2id": {"good": 0}, "architectures": ["Qwen3ForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps({**config, **labels}))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    return folder


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Tensor]:
    return model_tensors(build_classifier(folder).module)


def versions_of(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The same model, its head's weights multiplied."""
    return {**weights, "score.weight": from_numpy(to_numpy(weights["score.weight"]) * factor)}


def published(
    store: MemoryStore, version: int, tensors: dict[str, Tensor], adapter: Adapter | None = None
) -> PolicyEvent:
    return publish(
        store,
        NewVersion(policy="reward", token=0, version=version, parent=version - 1, step=version, adapter=adapter),
        tensors,
        previous=None,
        probe=None,
    )


@asynccontextmanager
async def following(score: Model, log: Log, metrics: Metrics) -> AsyncIterator[None]:
    (companion,) = companions([make_step("quality", score)])
    task = asyncio.create_task(companion.accompany(log, metrics))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - the score has no event to wait for
            await asyncio.sleep(0.01)


async def verdict(score: Model) -> tuple[float, str]:
    step = make_step("quality", score, timeout_s=120)
    (member,) = (await run_chain([step], [ANSWER], Context())).kept
    (given,) = member.scores
    return given.value, given.version


@pytest.mark.slow
async def test_verdicts_follow_what_is_published_and_a_corrupt_version_changes_nothing(
    folder: Path, weights: dict[str, Tensor]
) -> None:
    store, metrics = MemoryStore(), Metrics("test")
    score = Model(folder=str(folder), policy="reward", wait_s=120)

    log = Log(MemoryBus(), "test", store=store)
    await log.create_topics(partitions=1, keep_ms=1000)

    async def announce(event: PolicyEvent) -> None:
        await log.publish(POLICIES, event)

    async with following(score, log, metrics):
        await announce(published(store, 1, versions_of(weights, 10.0)))
        first, version = await verdict(score)
        assert version == "1+reward-1"
        await announce(PolicyEvent(event="published", policy="other", version=7, manifest="policies/other/x.json"))
        await announce(published(store, 2, versions_of(weights, -10.0)))
        await until(lambda: score.version == 2)
        second, version = await verdict(score)
        assert version == "1+reward-2"
        assert second == pytest.approx(1 - first), "the head's sign was turned around"
        assert abs(first - 0.5) > 1e-3

        corrupt = published(store, 3, versions_of(weights, 3.0))
        for key in [key for key in store.keys("policies/reward/0/anchors/3/")]:
            store.put(key, store.get(key)[:-1] + b"\x55")
        await announce(corrupt)
        await until(lambda: any(name.startswith("reward_models_refused") for name in metrics.counters()))
        assert await verdict(score) == (second, "1+reward-2")

        await announce(published(store, 4, versions_of(weights, 10.0)))
        await until(lambda: score.version == 4)
        assert (await verdict(score))[0] == pytest.approx(first)


@pytest.mark.slow
async def test_a_worker_that_begins_with_a_summary_of_policies_judges_with_the_newest_version(
    folder: Path, weights: dict[str, Tensor]
) -> None:
    store = MemoryStore()
    score = Model(folder=str(folder), policy="reward", wait_s=120)

    bus = CountingBus()
    log = Log(bus, "test", store=store)
    await log.create_topics(partitions=1, keep_ms=1000)
    await log.publish(POLICIES, published(store, 1, versions_of(weights, 10.0)))
    for version in range(3 * LOOK):
        other = PolicyEvent(event="published", policy="other", version=version, manifest="policies/other/x.json")
        await log.publish(POLICIES, other)
    summarize(log)
    async with following(score, log, Metrics("test")):
        assert (await verdict(score))[1] == "1+reward-1"
    assert bus.read[log.name(POLICIES)] < 2 * LOOK


@pytest.mark.slow
async def test_a_version_from_before_the_summary_judges_where_the_newest_is_refused(
    folder: Path, weights: dict[str, Tensor]
) -> None:
    store = MemoryStore()
    score = Model(folder=str(folder), policy="reward", wait_s=120)

    log = Log(MemoryBus(), "test", store=store)
    await log.create_topics(partitions=1, keep_ms=1000)
    for version in (1, 2):
        await log.publish(POLICIES, published(store, version, versions_of(weights, 10.0)))
    for key in store.keys("policies/reward/0/anchors/2/"):
        store.put(key, store.get(key)[:-1] + b"\x55")
    for version in range(3 * LOOK):
        other = PolicyEvent(event="published", policy="other", version=version, manifest="policies/other/x.json")
        await log.publish(POLICIES, other)
    summarize(log)
    async with following(score, log, Metrics("test")):
        assert (await verdict(score))[1] == "1+reward-1"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["shape", "adapter"])
async def test_weights_of_another_shape_and_adapters_are_refused(
    folder: Path, weights: dict[str, Tensor], wrong: str
) -> None:
    store, metrics = MemoryStore(), Metrics("test")
    score = Model(folder=str(folder), policy="reward")
    adapter = Adapter(rank=1, alpha=1, targets=("q_proj",), base="") if wrong == "adapter" else None
    tensors = dict(weights)
    if wrong == "shape":
        tensors["score.weight"] = from_numpy(to_numpy(weights["score.weight"])[:, :-1].copy())

    log = Log(MemoryBus(), "test", store=store)
    await log.create_topics(partitions=1, keep_ms=1000)
    async with following(score, log, metrics):
        await log.publish(POLICIES, published(store, 1, tensors, adapter))
        await until(lambda: any(name.startswith("reward_models_refused") for name in metrics.counters()))
    assert score.version == -1


def test_probabilities() -> None:
    assert probability([0.0, 1.0], -1) == pytest.approx(0.7310585786)  # 1 / (1 + e^-1)
    assert probability([1000.0, 0.0], 0) == 1.0
    with pytest.raises(ValueError, match="finite"):
        probability([float("nan")], 0)
    with pytest.raises(ValueError, match="of 2 classes"):
        probability([0.0, 0.0], 2)
