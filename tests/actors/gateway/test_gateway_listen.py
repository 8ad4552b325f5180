"""The gateway's socket: what it sends is on its way at once, and what came in before it closed is recorded."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from actors.gateway.http.listen import bound
from tests.actors.gateway.gateway_rig import RunningGateway, engine, says, serving
from tests.actors.gateway.test_gateway_log_away import ASK, spooled


def test_no_answer_on_a_kept_connection_waits_until_the_one_before_it_is_acknowledged() -> None:
    async def check() -> None:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        sock = bound("127.0.0.1:0")
        async with await asyncio.start_server(came, sock=sock), asyncio.timeout(60):
            _, writer = await asyncio.open_connection(*sock.getsockname())
            assert await accepted, "Nagle's algorithm is on: a second write waits for an acknowledgement, 40 ms"
            writer.close()

    asyncio.run(check())


async def listens(served: RunningGateway) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


def test_a_request_that_comes_in_between_the_stop_and_the_end_of_listening_is_recorded(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, engine(says("late")), drain_s=10.0) as served:
            key = served.key()
            await served.keys_read()
            asked = json.dumps(ASK).encode()

            async def halves() -> AsyncIterator[bytes]:
                yield asked[:9]
                served.stop.set()
                while await listens(served):  # noqa: ASYNC110 (no event tells that a port is closed)
                    await asyncio.sleep(0.005)
                yield asked[9:]

            async with served.http(key) as http:
                answer = await http.post("/v1/chat/completions", content=halves())
        (stored,) = await served.experiences()
        assert answer.json()["id"] == f"hr-{stored.id}" and not spooled(tmp_path)

    asyncio.run(check())
