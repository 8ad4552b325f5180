"""Events that the gateway streams a second, and how long a stream pauses.

240 clients ask for answers of 100 tokens a second, each token an event. The gateway runs in a process of its own, on one core,
over an engine that gives every request a token at each step and costs next to nothing; the clients read on another core.
`events_per_cpu_s` is by processor time of the gateway's process: unlike the others it means the same on a machine that does
other work too.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

from infra.cli.bench.serving.echo import EchoEngine
from infra.cli.bench.serving.gateway import BenchChild, gateway_child, pinned

STREAMS = 240
TOKENS = 300
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "How much is 37+45?"}],
    "stream": True,
    "max_tokens": TOKENS,
}


def run() -> dict[str, float]:
    """Events by wall and by processor second, and the gaps of a stream in milliseconds."""
    from actors.gateway.http.listen import new_loop

    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "infra.cli.bench.serving.stream"]
    with (
        tempfile.TemporaryDirectory() as folder,
        pinned(cores[0]),
        gateway_child([*command, folder, str(cores[-1])]) as child,
        asyncio.Runner(loop_factory=new_loop) as clients,
    ):
        return clients.run(_streamed(child))


class Stream(asyncio.Protocol):
    """One client. gaps_s: between its events, as far as these came apart."""

    def __init__(self, request: bytes) -> None:
        self.gaps_s: list[float] = []
        self.num_events = 0
        self.ended = asyncio.get_running_loop().create_future()
        self._request = request
        self._last_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's own kind
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        now_s, num = time.perf_counter(), data.count(b"data: ")
        if num and self._last_s:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s if num else self._last_s
        self.num_events += num
        if b"[DONE]" in data:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        if not self.ended.done():
            self.ended.set_result(None)


async def _streamed(child: BenchChild) -> dict[str, float]:
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {child.address['key']}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    loop, port = asyncio.get_running_loop(), child.address["port"]
    begin_s, cpu_s = time.perf_counter(), child.ask("cpu").cpu_s
    streams = [(await loop.create_connection(lambda: Stream(request), "127.0.0.1", port))[1] for _ in range(STREAMS)]
    await asyncio.gather(*(stream.ended for stream in streams))
    wall_s, cpu_s = time.perf_counter() - begin_s, child.ask("cpu").cpu_s - cpu_s
    num_events = sum(stream.num_events for stream in streams)
    gaps_ms = sorted(1000 * gap for stream in streams for gap in stream.gaps_s)
    return {
        "events_per_s": num_events / wall_s,
        "events_per_cpu_s": num_events / cpu_s,
        "gap_ms_p50": gaps_ms[len(gaps_ms) // 2],
        "gap_ms_p99": gaps_ms[len(gaps_ms) * 99 // 100],
    }


async def _serve(folder: Path) -> None:
    """The child: a gateway, until stdin ends."""
    from actors.gateway.access.keys import create_key
    from actors.gateway.config import GatewayLimits
    from actors.gateway.http.listen import forget_loaded
    from infra.cli.bench.serving.gateway import gateway_over, tell_cpu
    from infra.cli.demo.char_model import build_char_model
    from infra.model.model import load_tokenizer
    from infra.store.memory import MemoryStore

    tokenizer = load_tokenizer(build_char_model(folder / "model", seed=0))
    store, stop = MemoryStore(), asyncio.Event()
    _, key = create_key(store, tenant="bench", scopes=("serve",), train="yes", rpm=0, tpm=0)

    def listening(port: int) -> None:
        forget_loaded()
        print(json.dumps({"port": port, "key": key}), flush=True)

    limits = GatewayLimits(concurrency=2 * STREAMS, max_tokens=TOKENS)
    engine = EchoEngine([tokenizer.encode("7")[0]] * TOKENS)
    serving = asyncio.create_task(gateway_over(engine, tokenizer, store, folder, listening, stop, limits=limits))
    await tell_cpu()
    stop.set()
    await serving


if __name__ == "__main__":
    from actors.gateway.http.listen import new_loop

    os.sched_setaffinity(0, {int(sys.argv[2])})
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(Path(sys.argv[1])))
