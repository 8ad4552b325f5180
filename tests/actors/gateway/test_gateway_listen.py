"""The gateway's socket: what it sends is on its way at once."""

import asyncio
import socket

from actors.gateway.http.listen import bound


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
