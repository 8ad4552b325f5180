"""Policies loaded under streaming clients: nothing fails, nothing is cut, and every recorded logprob reproduces."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.gateway.http.canary import VERSION_HEADER
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, from_numpy, to_numpy
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.fields import PolicyEventKind
from schemas.topics import POLICIES
from tests.actors.gateway.gateway_rig import VOCABULARY, AwayBus, ByteTokenizer, RunningGateway, engine, says, serving
from tests.actors.rig import until

Tensors = dict[str, Tensor]
Reference = Callable[[Tensors, Sequence[int], float], list[float]]
CLIENTS = 16
ASK: Any = [{"role": "user", "content": "37+45="}]


async def announce(
    served: RunningGateway, version: int, tensors: Tensors, *, store: Store | None = None
) -> PolicyEvent:
    """Publish a version like a trainer: an anchor in the store, an event in the log."""
    event = await asyncio.to_thread(
        publish,
        store or served.store,
        NewVersion(policy="main", token=0, version=version, parent=version - 1, step=version),
        tensors,
        previous=None,
        probe=None,
    )
    await served.log.publish(POLICIES, event)
    return event


async def loaded(served: RunningGateway, version: int) -> None:
    await until(lambda: served.engine.version >= version, seconds=120)


def bigram(version: int) -> Tensors:
    table = np.random.default_rng(version).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
    return {TENSOR: from_numpy(table)}


def bigram_reference(tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
    table = to_numpy(tensors[TENSOR]).astype(np.float64) / temperature
    table -= np.log(np.exp(table).sum(-1, keepdims=True))
    return [float(table[a, b]) for a, b in itertools.pairwise(tokens)]


async def stream_until(client: openai.AsyncOpenAI, done: asyncio.Event, max_tokens: int) -> list[tuple[str, str]]:
    """Stream answers until told; id and text of each, all of them whole."""
    told = []
    while not done.is_set():
        stream: Any = await client.chat.completions.create(
            model="m", messages=ASK, stream=True, max_tokens=max_tokens, temperature=0.9
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        told.append((chunks[0].id, "".join(c.choices[0].delta.content or "" for c in chunks)))
    return told


async def reload_under_load(
    served: RunningGateway, versions: int, changed: Callable[[int], Tensors], reference: Reference, max_tokens: int
) -> None:
    made = await served.new_key()
    by_version = {0: changed(0)}
    done = asyncio.Event()
    clients = [
        asyncio.create_task(stream_until(served.client(made, timeout=120), done, max_tokens)) for _ in range(CLIENTS)
    ]
    for version in range(1, versions + 1):
        by_version[version] = changed(version)
        await announce(served, version, by_version[version])
        await loaded(served, version)
    done.set()
    told = dict(itertools.chain.from_iterable(await asyncio.gather(*clients)))
    experiences = await served.recorded(len(told))
    assert {f"hr-{one.id}" for one in experiences} == set(told)
    for one in experiences:
        assert one.response == told[f"hr-{one.id}"]
        tokens, at = one.tokens.tolist(), 0
        for span in one.spans:
            size = span.stop - span.start
            expected = reference(by_version[span.version], tokens, 0.9)[span.start - 1 : span.stop - 1]
            np.testing.assert_allclose(one.logprobs[at : at + size], expected, atol=1e-4)
            at += size
    assert max(len(one.spans) for one in experiences) > 1, "some answers lived through a reload"
    assert served.count("refused") == 0 and served.count("policies_refused") == 0


@pytest.mark.full
async def test_a_hundred_versions_under_sixteen_streams(tmp_path: Path) -> None:
    sampler = engine(seed=0)
    async with serving(tmp_path, sampler, queue_records=100_000, spool_mb=4096) as served:
        first = sampler.tensors
        tensors = lambda version: bigram(version) if version else first  # noqa: E731
        await reload_under_load(served, 100, tensors, bigram_reference, 60)


async def test_a_restart_without_the_log_serves_the_version_served_last(tmp_path: Path) -> None:
    bus, store = AwayBus(), MemoryStore()
    async with serving(tmp_path, engine(says("a")), bus=bus, store=store) as served:
        await announce(served, 3, bigram(3))
        await loaded(served, 3)
    bus.away = True
    async with serving(tmp_path, engine(says("a")), bus=bus, store=store) as served:
        assert served.engine.version == 3


class Waiting(ByteTokenizer):
    """Waits with a long prompt. asked: set once it does. go: set to go on."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        if len(conversation[0]["content"]) > 4096:
            self.asked.set()
            self.go.wait(60)
        return super().encode_request(conversation, tools)


async def test_a_version_that_is_loaded_before_the_first_token_answers_nothing_for_another(tmp_path: Path) -> None:
    sampler = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=8192, script=says("a"))
    tokenizer = Waiting()
    async with serving(tmp_path, sampler, tokenizer=tokenizer) as served, served.http(await served.new_key()) as http:
        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=long, headers={VERSION_HEADER: "0"}))
        await until(tokenizer.asked.is_set)
        await announce(served, 1, bigram(1))
        await loaded(served, 1)
        tokenizer.go.set()
        assert (await asking).status_code == 503


@pytest.mark.parametrize(("channel", "held"), [("stable", 2), ("candidate", 3)])
async def test_stable_follows_promotions_once_there_is_one(tmp_path: Path, channel: str, held: int) -> None:
    async with serving(tmp_path, engine(says("a")), channel=channel) as served:
        await announce(served, 1, bigram(1))
        await loaded(served, 1)
        await served.log.publish(POLICIES, stable("promoted", 2))
        await announce(served, 3, bigram(3))
        await announce(served, 2, bigram(2))
        await loaded(served, held)
        assert served.engine.version == held


async def test_customers_are_taken_back_and_held_where_somebody_said_so(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("a")), channel="stable") as served:
        for version in (1, 2, 3):
            await announce(served, version, bigram(version))
        await served.log.publish(POLICIES, stable("promoted", 3))
        await serves(served, 3)
        await served.log.publish(POLICIES, stable("rolled_back", 1))
        await serves(served, 1)
        await served.log.publish(POLICIES, stable("pinned", 2))
        await served.log.publish(POLICIES, stable("promoted", 3))
        await serves(served, 2)
        await served.log.publish(POLICIES, stable("pinned", -1))
        await serves(served, 3)


async def serves(served: RunningGateway, version: int) -> None:
    await until(lambda: served.engine.version == version, seconds=120)


def stable(kind: PolicyEventKind, version: int) -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=version, channel="stable")
