"""Places for answers are counted when they are taken and given back on every path; turns go round the keys."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.engines.scripted import ScriptedEngine
from actors.gateway.access.concurrency import ConcurrencyLimiter, FairQueue, ReleasingStream, to_its_end
from actors.gateway.config import CanaryShare, GatewayLimits
from actors.gateway.errors import ApiError
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from tests.actors.gateway.gateway_rig import VOCABULARY, RunningGateway, engine, says, serving
from tests.actors.rig import until

LONG = [{"role": "user", "content": "x" * 6000}]  # leaves the event loop to be tokenized
HELD = {"response_format": {"type": "json_object"}}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "main", "messages": [{"role": "user", "content": "Hi"}], **more}


async def all_back(served: RunningGateway, limit: int) -> None:
    """Until as many answers as there are places are given at once, each to a key: what was sent before may not have been read
    yet, and may still run; a place that is not given back keeps one of them out for ever. Then nothing runs.
    """
    clients = [await served.opened() for _ in range(limit)]

    async def are_given() -> bool:
        asked = [client.chat.completions.create(**chat(max_tokens=1)) for client in clients]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        failed = [one for one in answers if isinstance(one, BaseException)]
        assert all(isinstance(one, openai.RateLimitError) for one in failed), failed
        return not failed

    async with asyncio.timeout(60):
        while not await are_given():  # noqa: ASYNC110 - a client can only ask again
            await asyncio.sleep(0.05)
    await until(lambda: served.metrics.gauges().get("answers_running") == 0.0, seconds=60)


def test_one_key_never_takes_all_slots() -> None:
    limiter = ConcurrencyLimiter(16, 2)
    taken = [limiter.take(1, "greedy") for _ in range(14)]
    for _ in range(2):
        with pytest.raises(ApiError, match="too many answers at once"):
            limiter.take(1, "greedy")
        taken.append(limiter.take(1, "other"))
    with pytest.raises(ApiError):
        limiter.take(1, "third")
    for slots in taken:
        slots.release()
    assert limiter.idle.is_set() and limiter.num_taken == 0


@pytest.mark.parametrize("more", [HELD, {"messages": LONG, "n": 2}], ids=["schema", "long prompt, choices"])
async def test_no_more_answers_are_made_at_once_than_the_limit_says(tmp_path: Path, more: dict[str, Any]) -> None:
    seen: list[int] = []

    def script(prompt: tuple[int, ...]) -> list[int]:
        seen.append(sampler.num_running)
        return [*(b"{}" + b" " * 60), 256]

    sampler = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=8192, script=script, token_s=0.005)
    async with serving(tmp_path, sampler, limits=GatewayLimits(concurrency=4), report_s=0.05) as served:
        client = await served.opened()
        asked = [client.chat.completions.create(**chat(max_tokens=40, **more)) for _ in range(32)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
        assert refused and refused[0].code == "overloaded"
        assert not [one for one in answers if isinstance(one, openai.APIStatusError) and one.status_code != 429]
        assert 0 < max(seen) <= 3, "also of few places one is for other keys"
        await all_back(served, 4)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", [{}, {"messages": LONG}], ids=["short", "long"])
async def test_a_client_that_goes_before_its_first_byte_leaves_no_place_taken(
    tmp_path: Path, stream: bool, more: dict[str, Any]
) -> None:
    script = says("x" * 200)
    sampler = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=8192, script=script, token_s=0.01)
    async with serving(tmp_path, sampler, limits=GatewayLimits(concurrency=3), report_s=0.05) as served:
        key = await served.new_key()
        with pytest.raises(openai.BadRequestError):  # nor does a request that is refused
            await served.client(key).chat.completions.create(**chat(stream=stream, messages=[]))
        body = json.dumps(chat(stream=stream, **more)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        for _ in range(6):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            writer.close()
        await all_back(served, 3)


async def test_what_a_canary_answers_takes_places_too_and_gives_them_back(tmp_path: Path) -> None:
    bus, store, slow = MemoryBus(), MemoryStore(), engine(says("x" * 100), token_s=0.01)
    async with serving(tmp_path, slow, bus=bus, store=store, channel="canary") as canary:
        there = CanaryShare(url=canary.url, share=1.0)
        more: dict[str, Any] = {"bus": bus, "store": store, "topics": False, "canary": there, "report_s": 0.05}
        async with serving(tmp_path, engine(says("x")), limits=GatewayLimits(concurrency=4), **more) as served:
            client = await served.opened()
            await until(lambda: served.metrics.gauges().get("canary_there") == 1.0, seconds=60)
            await canary.keys_read()
            first = await client.chat.completions.create(**chat(stream=True))
            async for piece in first:
                if piece.choices[0].delta.content:
                    break
            second = asyncio.create_task(client.chat.completions.create(**chat(n=2)))
            await until(lambda: slow.num_running == 3)
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(**chat())
            assert served.engine.num_running == 0
            await first.close()
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await until(lambda: slow.num_running == 0)
            await all_back(served, 4)


@pytest.mark.parametrize("version", ["2.3", "2.4"])
async def test_a_stream_that_never_began_lets_go_of_what_it_holds(version: str) -> None:
    told: list[str] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        told.append("began")
        yield b"x"

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def refused(message: Any) -> None:
        raise OSError("gone")

    stream = ReleasingStream(pieces())
    stream.at_end.callback(told.append, "first")
    stream.at_end.callback(told.append, "second")
    with suppress(Exception):
        await stream({"type": "http", "asgi": {"spec_version": version}}, gone, refused)
    assert told == ["second", "first"]


async def test_turns_go_round_the_keys_however_many_one_of_them_waits_with() -> None:
    rota, order = FairQueue(1, 16), list[str]()

    async def work(key: str) -> None:
        async with rota.turn(key):
            order.append(key)
            await asyncio.sleep(0)

    greedy = [asyncio.create_task(work("greedy")) for _ in range(10)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(work(key)) for key in ("a", "b")]
    await asyncio.gather(*greedy, *others)
    assert {"a", "b"} < set(order[:5]) and len(order) == 12


async def test_a_key_that_waits_with_too_many_is_told_to_come_back_and_the_others_are_not() -> None:
    rota, held = FairQueue(1, 2), asyncio.Event()

    async def work(key: str) -> None:
        async with rota.turn(key):
            await held.wait()

    tasks = [asyncio.create_task(work(key)) for key in ("x", "x", "x", "y")]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await work("x")
    assert refused.value.status == 429
    held.set()
    await asyncio.gather(*tasks, work("x"))


async def test_a_turn_lasts_as_long_as_its_work_also_where_nobody_waits_for_it() -> None:
    rota, go, running = FairQueue(1, 16), threading.Event(), list[str]()

    def work(key: str) -> None:
        running.append(key)
        go.wait(60)
        running.remove(key)

    async def ask(key: str) -> None:
        async with rota.turn(key):
            assert not running
            await to_its_end(asyncio.to_thread(work, key))

    gone = asyncio.create_task(ask("gone"))
    await until(lambda: running == ["gone"])
    gone.cancel()
    other = asyncio.create_task(ask("other"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert running == ["gone"] and not gone.done()
    go.set()
    await asyncio.gather(gone, other, return_exceptions=True)
    assert gone.cancelled() and other.exception() is None and not running
