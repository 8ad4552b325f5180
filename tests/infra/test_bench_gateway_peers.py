"""The benchmark of the gateway beside others: all say the same, answers were recorded, and a peer that is missing is named."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from actors.engines.engine import Chunk, Sampling
from actors.engines.vllm.settings import CPU_DEFAULTS, argument_names
from infra.cli.bench.beside import OURS, Spent, compared
from infra.cli.bench.peers.bare_http import event, whole
from infra.cli.bench.serving import gateway_peers
from infra.cli.bench.serving.echo import EchoEngine
from infra.cli.bench.serving.gateway_peers import (
    BARE,
    BARE_KINDS,
    PeersPlan,
    Server,
    agree,
    recorded,
    targets,
    vllm_arguments,
    vllm_lacks,
)
from infra.cli.bench.serving.http_asking import ECHO, HttpAnswer, Site, ask, load, read, request
from infra.local.process import start_watched

TEXT = "".join(ECHO)


@asynccontextmanager
async def _saying(bodies: Sequence[bytes]) -> AsyncIterator[Site]:
    """A server whose answers are these, one after the other and again and again."""
    number = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        while head := await reader.readline():
            while (line := await reader.readline()) != b"\r\n":
                head = line if line.startswith(b"content-length") else head
            if head.startswith(b"content-length"):
                await reader.readexactly(int(head.partition(b":")[2]))
            writer.write(bodies[number % len(bodies)])
            number += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Site(server.sockets[0].getsockname()[1])
    finally:
        server.close()


def _http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _stream(text: str) -> bytes:
    body = b"".join(event({"content": one}) for one in text) + b"data: [DONE]\n\n"
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def _server(name: str, site: Site, *, is_ours: bool = False) -> Server:
    child = start_watched(["true"], log=Path("/dev/null"))
    child.process.wait()
    child.release()
    return Server(name, child, Path("/dev/null"), site, is_ours)


def test_answers_are_read_whole_and_in_pieces() -> None:
    async def asked() -> tuple[list[HttpAnswer], list[HttpAnswer], float]:
        async with _saying([_http(whole(TEXT, 20))]) as plain, _saying([_stream(TEXT)]) as streamed:
            took_s = await load(plain, clients=3, answers=10, stream=False)
            return await ask(plain, range(2), stream=False), await ask(streamed, range(2), stream=True), took_s

    plain, streamed, took_s = asyncio.run(asked())
    assert plain == [HttpAnswer(TEXT)] * 2 and streamed == [HttpAnswer(TEXT, len(TEXT))] * 2 and took_s > 0
    with pytest.raises(RuntimeError, match="a stream ends with"):
        read(event({"content": "half"}), stream=True)


def test_an_answer_with_another_status_is_no_answer() -> None:
    async def asked() -> None:
        async with _saying([_http(b"no room", "429 Too Many Requests")]) as site:
            await load(site, clients=1, answers=1, stream=False)

    with pytest.raises(RuntimeError, match=r"429 too many requests: no room"):
        asyncio.run(asked())


def test_prompts_differ_and_are_of_one_length() -> None:
    asked = {request(Site(1, "k"), number, stream=False) for number in range(500)}
    assert len(asked) == 500 and len({len(one) for one in asked}) == 1


def test_servers_that_say_other_things_are_not_timed() -> None:
    async def agreed(one: str, other: str, streamed: str) -> None:
        pairs = (
            [_http(whole(one, 20))] * 4 + [_stream(one)] * 4,
            [_http(whole(other, 20))] * 4 + [_stream(streamed)] * 4,
        )
        async with _saying(pairs[0]) as first, _saying(pairs[1]) as second:
            await agree([_server(OURS, first), _server(BARE, second)])

    asyncio.run(agreed(TEXT, TEXT, TEXT))
    for other in ((TEXT, "else", TEXT), (TEXT, TEXT, "else"), ("", "", "")):
        with pytest.raises(RuntimeError, match="expected"):
            asyncio.run(agreed(*other))


@pytest.mark.parametrize(("written", "found"), [(5.0, True), (6.0, False)])
def test_every_answer_that_was_given_has_to_lie_in_the_log_and_no_other(written: float, found: bool) -> None:
    told = f'headrace_written_total{{topic="experiences"}} {written}\nheadrace_written_total{{topic="feedback"}} 9.0\n'

    async def looked() -> None:
        before = _http(b'headrace_written_total{topic="experiences"} 4.0\n')
        async with _saying([before, _http(told.encode())]) as site:
            await recorded(msgspec.structs.replace(_server(OURS, site, is_ours=True), asked=5))

    if found:
        asyncio.run(looked())
    else:
        with pytest.raises(RuntimeError, match="6 answers were recorded, and 5 given"):
            asyncio.run(looked())


def test_the_echo_says_its_tokens_at_once_or_one_a_step() -> None:
    async def said() -> None:
        engine, chunks = EchoEngine(range(3), step_s=0.0), list[Chunk]()
        completion = await engine.generate((), Sampling(max_tokens=3))
        both = [engine.generate((), Sampling(max_tokens=3), on_chunk=chunks.append) for _ in range(2)]
        assert await asyncio.gather(*both) == [completion] * 2 and completion.tokens == (0, 1, 2)
        assert [chunk.tokens for chunk in chunks] == [(0,), (0,), (1,), (1,), (2,), (2,)]
        again = await engine.generate((), Sampling(max_tokens=3), on_chunk=chunks.append)
        assert again == completion and len(chunks) == 9

    asyncio.run(said())


def test_the_targets_are_of_many_clients_and_a_ratio_of_wall_time_has_its_own() -> None:
    assert targets(1) == ({}, {})
    assert targets(16) == ({name: 0.25 for name in BARE_KINDS}, {gateway_peers.VLLM: 1.0})
    spent = {OURS: [Spent(2.0, 1.0)], gateway_peers.VLLM: [Spent(4.0, 0.5)]}
    _, peer = compared("model", spent, 1, *targets(64))
    assert (peer.times, peer.target, peer.sooner, peer.sooner_target) == ((2.0, 2.0), None, (0.5, 0.5), 1.0)


def test_vllms_own_server_has_the_engine_arguments_of_the_gateway_and_is_named_where_it_is_missing() -> None:
    assert vllm_lacks(PeersPlan(), "no_such_vllm") == "no no_such_vllm is installed"
    assert vllm_lacks(PeersPlan(model=False)) == "it was not asked for"
    arguments = vllm_arguments(Path("model"), 1)
    named = {one.removeprefix("--").partition("=")[0].replace("-", "_") for one in arguments}
    assert set(CPU_DEFAULTS) <= named and "--enforce-eager" in arguments and "--dtype=float32" in arguments
    known = argument_names()
    assert known is None or named - known <= {"port", "host", "disable_uvicorn_access_log"}


@pytest.mark.full
def test_the_gateway_is_measured_beside_bare_servers() -> None:
    said: list[str] = []
    plan = PeersPlan(clients=(1, 16), rounds=1, echoed=32, idle_s=0.2, model=False)
    found = gateway_peers.run(plan, said.append)
    assert [one.name for one in found] == [OURS, *BARE_KINDS] * 4
    assert all(one.cpu_us[1] > 0 and one.wall_us[0] > 0 for one in found if one.name == OURS)
    assert json.loads(msgspec.json.encode(found))[1]["sooner"] is not None
    assert any("say the same" in line for line in said) and "left out" in said[-1]
