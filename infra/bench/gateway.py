"""What the gateway adds to an answer: the engine alone and the gateway over it, side by side, and answers a second.

The gateway runs in a process of its own with the scripted engine, the demo's tokenizer, keys, redaction and recording
into a memory log; the clients keep their connections and run in this process. The engine pauses per token, so that the
clients wait for it as they would for a model; for the rate it does not. `cpu_ms_per_answer` is processor time of the
gateway's process, engine included: unlike the others it means the same on a machine that does other work too.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLIENTS = 16
ANSWERS = 1200
TOKENS = 20
TOKEN_S = 0.01
MESSAGES = [{"role": "user", "content": "How much is 37+45, and why is it so much?"}]


def run() -> dict[str, float]:
    """Milliseconds at 16 clients, answers a second, and processor milliseconds of one."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, token_s in (("paced", TOKEN_S), ("free", 0.0)):
            alone, through, rate, cpu_s = _measured(Path(folder) / name, token_s)
            if name == "paced":
                for share in (50, 99):
                    figures[f"engine_ms_p{share}"] = _percentile(alone, share)
                    figures[f"gateway_ms_p{share}"] = _percentile(through, share)
                    figures[f"overhead_ms_p{share}"] = _percentile(through, share) - _percentile(alone, share)
            else:
                figures["answers_per_s"] = rate
                figures["cpu_ms_per_answer"] = cpu_s * 1000 / ANSWERS
    return figures


def _measured(folder: Path, token_s: float) -> tuple[list[float], list[float], float, float]:
    """Seconds of each answer of the engine alone and through the gateway, answers a second, and processor seconds."""
    folder.mkdir()
    command = [sys.executable, "-m", "infra.bench.gateway", str(folder), str(token_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdin is not None
        told = json.loads(child.stdout.readline())
        begin = time.perf_counter()
        through = asyncio.run(_ask_all(int(told["port"]), str(told["key"])))
        rate = len(through) / (time.perf_counter() - begin)
        child.stdin.close()
        cpu_s = float(child.stdout.readline()) - told["cpu_s"]
        child.wait(60)
    return told["alone"], through, rate, cpu_s


async def _ask_all(port: int, key: str) -> list[float]:
    body = json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": TOKENS}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
    request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    took: list[float] = []

    async def client(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            begin = time.perf_counter()
            writer.write(request)
            headers = await reader.readuntil(b"\r\n\r\n")
            assert headers.startswith(b"HTTP/1.1 200"), headers
            length = next(line for line in headers.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            took.append(time.perf_counter() - begin)
        writer.close()

    await asyncio.gather(*(client(ANSWERS // CLIENTS) for _ in range(CLIENTS)))
    return took[CLIENTS:]


def _percentile(seconds: list[float], share: int) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * share // 100)] * 1000


async def _serve(folder: Path, token_s: float) -> None:
    """The child: time the engine alone, then serve it until stdin ends."""
    from actors.engine import Sampling
    from actors.engines.scripted import ScriptedEngine
    from actors.gateway.config import GatewayConfig
    from actors.gateway.keys import create_key
    from actors.gateway.serve import run_gateway
    from infra.bus.log import Log
    from infra.bus.memory import MemoryBus
    from infra.config import Floor
    from infra.demo.char_model import build_char_model
    from infra.metrics import Metrics
    from infra.model import load_tokenizer
    from infra.store_memory import MemoryStore

    tokenizer = load_tokenizer(build_char_model(folder / "model", seed=0))
    prompt = tokenizer.encode_request(MESSAGES)
    alone: list[float] = []
    engine = ScriptedEngine(token_s=token_s)
    await engine.start()

    async def caller() -> None:
        for _ in range(ANSWERS // CLIENTS):
            begin = time.perf_counter()
            await engine.generate(prompt, Sampling(max_tokens=TOKENS, stop=tokenizer.eos_ids))
            alone.append(time.perf_counter() - begin)

    await asyncio.gather(*(caller() for _ in range(CLIENTS)))
    store, stop = MemoryStore(), asyncio.Event()
    log = Log(MemoryBus(), "bench")
    await log.create_topics(partitions=4, keep_ms=3_600_000)
    _, key = create_key(store, tenant="bench", scopes=("serve",), train="yes", rpm=0, tpm=0)

    def listening(port: int) -> None:
        print(json.dumps({"port": port, "key": key, "alone": alone, "cpu_s": time.process_time()}), flush=True)

    serving = asyncio.create_task(
        run_gateway(
            Floor(app="bench", folder=folder),
            GatewayConfig(listen="127.0.0.1:0", train_on="consented"),
            log=log,
            store=store,
            engine=ScriptedEngine(token_s=token_s),
            tokenizer=tokenizer,
            metrics=Metrics("serve"),
            stop=stop,
            listening=listening,
        )
    )
    await asyncio.to_thread(sys.stdin.read)
    print(time.process_time(), flush=True)
    stop.set()
    await serving


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
