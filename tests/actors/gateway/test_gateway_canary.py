"""A canary answers a sticky share of sessions, and whatever becomes of it, nobody goes without an answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.responses import StreamingResponse

from actors.gateway.apis.completions import CHAT
from actors.gateway.apis.messages import error_event
from actors.gateway.config import CanaryShare
from actors.gateway.errors import bad
from actors.gateway.http.canary import Canary, position_in_trial
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.policies.policy import Policy
from infra.store.memory import MemoryStore
from schemas import PolicyEvent, Progress
from schemas.topics import POLICIES, REPORTS
from tests.actors.gateway.gateway_rig import RunningGateway, engine, says, serving
from tests.actors.gateway.test_gateway_reload import announce, bigram, loaded, serves
from tests.actors.rig import until

SHARE = 0.5


@asynccontextmanager
async def both(folder: Path, share: float = 1.0) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    """A gateway that says "Stable." and a canary that says "Canary." to so large a share, on one log and one store."""
    bus, store = MemoryBus(), MemoryStore()
    async with serving(folder, engine(says("Canary.")), bus=bus, store=store, channel="canary") as canary:
        there = CanaryShare(url=canary.url, share=share)
        async with serving(folder, engine(says("Stable.")), bus=bus, store=store, topics=False, canary=there) as stable:
            await until(lambda: stable.metrics.gauges().get("canary_there") == 1.0, seconds=60)
            yield stable, canary


async def asked(client: AsyncOpenAI, session: str = "", stream: bool = False) -> str:
    headers = {"x-session-id": session} if session else {}
    ask = {"model": "main", "messages": [{"role": "user", "content": "Hi"}], "extra_headers": headers}
    if not stream:
        done = await client.chat.completions.create(**ask)
        return str(done.choices[0].message.content)
    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **ask)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def test_a_share_of_sessions_goes_to_the_canary_and_each_stays_where_it_fell(tmp_path: Path) -> None:
    async with both(tmp_path, SHARE) as (stable, _):
        client = await stable.opened()
        fell = {f"s{number}": await asked(client, f"s{number}") for number in range(16)}
        again = {session: await asked(client, session, stream=True) for session in fell}
        assert again == fell and set(fell.values()) == {"Stable.", "Canary."}


def test_a_larger_share_takes_more_sessions_in_and_none_out_and_is_about_what_was_asked() -> None:
    places = [position_in_trial(f"{number:x}", 5, b"secret") for number in range(10_000)]
    for share in (0.05, 0.1, 0.5):
        inside = sum(place < share for place in places) / len(places)
        assert abs(inside - share) < 0.02
    canary = Canary(CanaryShare(url="http://127.0.0.1:9", share=0.0), Metrics("serve"))
    assert not any(canary.takes(f"{number:x}", 5, b"secret") for number in range(1000))


def test_every_trial_draws_anew_and_nobody_without_the_secret_knows_who_is_inside() -> None:
    def inside(trial: int, secret: bytes) -> set[int]:
        return {number for number in range(10_000) if position_in_trial(f"{number:x}", trial, secret) < 0.1}

    first = inside(5, b"secret")
    assert first == inside(5, b"secret")
    for other in (inside(6, b"secret"), inside(5, b"guessed"), inside(-1, b"secret")):
        assert len(first & other) < 150, "a tenth of a tenth, as by chance"


async def test_feedback_for_a_canarys_answer_is_taken_by_any_gateway_and_its_record_says_what_was_on_trial(
    tmp_path: Path,
) -> None:
    async with both(tmp_path, SHARE) as (stable, canary):
        key = stable.key()
        await stable.keys_read(), await canary.keys_read()
        for version in (1, 2):
            await announce(stable, version, bigram(version))
        await stable.log.publish(POLICIES, PolicyEvent(event="promoted", policy="main", version=1, channel="stable"))
        await stable.log.publish(POLICIES, PolicyEvent(event="promoted", policy="main", version=2, channel="canary"))
        await serves(stable, 1), await serves(canary, 2)
        client = stable.client(key)
        done = [
            await client.chat.completions.create(
                model="main", messages=[{"role": "user", "content": "Hi"}], max_tokens=4, user=f"u{number}"
            )
            for number in range(12)
        ]
        async with stable.http(key) as http:
            told = [await http.post("/v1/feedback", json={"answer_id": one.id, "value": 1}) for one in done]
        assert {one.status_code for one in told} == {202}
        recorded = await stable.recorded(len(done))
        assert {(one.min_version, one.trial) for one in recorded} == {(1, 2), (2, 2)}
        assert {f"hr-{one.id}" for one in recorded} == {one.id for one in done}

        told_of: set[tuple[int, int]] = set()
        async with asyncio.timeout(60):
            async for message in stable.log.tail(REPORTS, "beginning"):
                report = message.value
                answered = report.answered if isinstance(report, Progress) else ()
                told_of |= {(one.version, one.trial) for one in answered if one.answers}
                if told_of == {(1, 2), (2, 2)}:
                    break


@pytest.mark.parametrize("stream", [False, True])
async def test_a_canary_that_is_gone_costs_nobody_an_answer(tmp_path: Path, stream: bool) -> None:
    async with both(tmp_path) as (stable, canary):
        client = await stable.opened()
        await canary.keys_read()
        assert await asked(client, stream=stream) == "Canary."
        canary.stop.set()  # it may go at any moment of what follows
        answers = {await asked(client, stream=stream) for _ in range(20)}
        assert answers <= {"Canary.", "Stable."}
        await until(lambda: stable.metrics.gauges().get("canary_there") == 0.0, seconds=60)
        assert await asked(client, stream=stream) == "Stable."


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_meets_a_version_that_the_session_was_not_drawn_for(tmp_path: Path, stream: bool) -> None:
    async with both(tmp_path) as (stable, canary):
        key = stable.key()
        await stable.keys_read(), await canary.keys_read()
        assert await asked(stable.client(key), stream=stream) == "Canary."
        # As a canary does that has read further in the log than the gateway before it.
        await canary.engine.load(Policy(version=7, tensors=bigram(7), probe=None))
        assert await asked(stable.client(key), stream=stream) == "Stable."
        assert stable.metrics.counters()["canary{outcome=status 503}"] == 1


@asynccontextmanager
async def watched(handle: Any, *, there: float = 1.0) -> AsyncIterator[tuple[Canary, Metrics]]:
    """A canary that answers as `handle` does, once it was asked whether it is there."""
    metrics = Metrics("serve")
    transport = httpx.MockTransport(handle)
    canary = Canary(CanaryShare(url="http://canary"), metrics, transport=transport, ask_every_s=0.01)
    watching = asyncio.create_task(canary.watch())
    try:
        await until(lambda: metrics.gauges().get("canary_there") == there)
        yield canary, metrics
        assert not watching.done()
    finally:
        watching.cancel()
        await canary.close()


async def gives_none(canary: Canary) -> bool:
    said = [await canary.answer("/v1/chat/completions", {}, b"{}", api=CHAT, stream=stream) for stream in (False, True)]
    return said == [None, None]


@pytest.mark.parametrize("status", [429, 500])
async def test_anything_but_an_answer_is_no_answer(status: int) -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/healthz" else status, json={"channel": "canary"})

    async with watched(handle) as (canary, metrics):
        assert await gives_none(canary)
        assert [value for name, value in metrics.counters().items() if f"status {status}" in name] == [2.0]


async def test_a_connection_that_is_closed_as_it_is_made_costs_nobody_an_answer_and_ends_no_gateway() -> None:
    closing = False

    async def handle(request: httpx.Request) -> httpx.Response:
        if closing or request.url.path != "/healthz":
            raise AttributeError("'NoneType' object has no attribute 'getpeername'")  # anyio on uvloop
        return httpx.Response(200, json={"channel": "canary"})

    async with watched(handle) as (canary, metrics):
        assert await gives_none(canary)
        closing = True
        await until(lambda: metrics.gauges().get("canary_there") == 0.0)


async def test_a_header_reaches_the_canary_byte_for_byte() -> None:
    heard: list[bytes] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        heard.extend(value for name, value in request.headers.raw if name.lower() == b"x-session-id")
        return httpx.Response(200, json={"channel": "canary"})

    async with watched(handle) as (canary, _):
        sent = {"x-session-id": "Zoë".encode().decode("latin-1")}  # as the server decodes it
        assert await canary.answer("/v1/chat/completions", sent, b"{}", api=CHAT, stream=False) is not None
        assert heard == ["Zoë".encode()]


OPENING, WORD, FAULT = b'data: {"role": 1}\n\n', b'data: {"content": 1}\n\n', b'data: {"error": {}}\n\n'


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        ([OPENING, WORD, WORD], True),
        ([OPENING[:9], OPENING[9:] + WORD[:5], WORD[5:]], True),
        ([OPENING], False),
        ([OPENING, WORD[:-1]], False),
        ([OPENING, FAULT], False),
        ([FAULT], False),
        ([OPENING, error_event(bad("x"))], False),
        ([], False),
    ],
    ids=[
        "whole",
        "in pieces",
        "opening only",
        "half a word",
        "fault after the opening",
        "fault",
        "another fault",
        "nothing",
    ],
)
@pytest.mark.parametrize("ends", ["closes", "breaks", "hangs"])
async def test_a_stream_that_breaks_before_its_first_word_is_answered_by_this_gateway(
    pieces: list[bytes], whole: bool, ends: str
) -> None:
    alive = True

    async def said() -> AsyncIterator[bytes]:
        nonlocal alive
        for piece in pieces:
            yield piece
        alive = ends != "hangs"
        if ends == "breaks":
            raise httpx.ReadError("gone")
        if ends == "hangs":
            await asyncio.Event().wait()

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/healthz":
            return httpx.Response(200, content=said())
        return httpx.Response(200 if alive else 503, json={"channel": "canary"})

    async with watched(handle) as (canary, _):
        response = await canary.answer("/v1/chat/completions", {}, b"{}", api=CHAT, stream=True)
        assert (response is not None) == whole
        if isinstance(response, StreamingResponse):
            told = [bytes(piece) async for piece in response.body_iterator if not isinstance(piece, str)]
            assert b"".join(told).startswith(b"".join(pieces))


async def test_a_canary_that_falls_silent_is_let_go_as_soon_as_it_is_missed() -> None:
    alive = True

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/healthz" and alive:
            return httpx.Response(200, json={"channel": "canary"})
        if request.url.path == "/healthz":
            raise httpx.ConnectError("gone")
        await asyncio.Event().wait()
        raise AssertionError

    async with watched(handle) as (canary, _):
        waiting = asyncio.create_task(canary.answer("/v1/chat/completions", {}, b"{}", api=CHAT, stream=False))
        await asyncio.sleep(0)
        assert not waiting.done()
        alive = False
        assert await waiting is None


async def test_a_gateway_that_is_no_canary_is_never_asked_so_nothing_goes_round_in_circles() -> None:
    async def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/healthz"
        return httpx.Response(200, json={"channel": "stable"})

    async with watched(handle, there=0.0) as (canary, _):
        assert await gives_none(canary)


async def test_a_stable_gateway_never_begins_with_what_a_canary_served_last(tmp_path: Path) -> None:
    bus, store = MemoryBus(), MemoryStore()
    async with serving(tmp_path, engine(says("a")), bus=bus, store=store, channel="canary") as served:
        await announce(served, 3, bigram(3))
        await loaded(served, 3)

    assert (tmp_path / "spool" / "canary-0" / "policy.json").exists()
    assert not (tmp_path / "spool" / "serve-0").exists()
