"""Clients of a server of chat completions: they keep their connections and ask one answer after the other."""

import asyncio
import json
import time
from collections.abc import Sequence

import msgspec

PATH = "/v1/chat/completions"
TOKENS = 20  # of an answer
ECHO = tuple("Eighty-two, of course")[:TOKENS]  # what an engine that only echoes says, token by token


class Site(msgspec.Struct, frozen=True):
    """Where to ask. port: on this machine. key: "" for a server that knows none. model: as the request calls it."""

    port: int
    key: str = ""
    model: str = "m"


class HttpAnswer(msgspec.Struct, frozen=True):
    """What a server said. text: all of it. events: pieces of a stream with text in them, 1 where it is whole."""

    text: str
    events: int = 1


def request(site: Site, number: int, *, stream: bool) -> bytes:
    """A request, as it goes over the wire; prompts differ, and are of one length."""
    first, second = number % 90 + 10, number // 90 % 90 + 10
    asked = {
        "model": site.model,
        "messages": [{"role": "user", "content": f"How much is {first}+{second}, and why is it so much?"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        **({"stream": True} if stream else {}),
    }
    body = json.dumps(asked).encode()
    key = f"authorization: Bearer {site.key}\r\n" if site.key else ""
    head = f"POST {PATH} HTTP/1.1\r\nhost: bench\r\n{key}content-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def answered(reader: asyncio.StreamReader) -> bytes:
    """The body of one response, its chunks put together. Raises RuntimeError unless its status is 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    fields = dict(line.partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    if b"content-length" in fields:
        body = await reader.readexactly(int(fields[b"content-length"]))
    else:
        pieces = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        body = b"".join(pieces)
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"{head.splitlines()[0].decode()}: {body[:300].decode(errors='replace')}")
    return body


def read(body: bytes, *, stream: bool) -> HttpAnswer:
    """What a body says."""
    if not stream:
        return HttpAnswer(json.loads(body)["choices"][0]["message"]["content"])
    events = [one.removeprefix(b"data: ") for one in body.strip().split(b"\n\n")]
    if events[-1] != b"[DONE]":
        raise RuntimeError(f"a stream ends with {events[-1][:100]!r}")
    choices = [choice for one in events[:-1] for choice in json.loads(one)["choices"]]
    pieces = [piece for one in choices if (piece := one["delta"].get("content"))]
    return HttpAnswer("".join(pieces), len(pieces))


async def ask(site: Site, numbers: Sequence[int], *, stream: bool) -> list[HttpAnswer]:
    """Answers to a few requests, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    found = []
    for number in numbers:
        writer.write(request(site, number, stream=stream))
        found.append(read(await answered(reader), stream=stream))
    writer.close()
    return found


async def load(site: Site, *, clients: int, answers: int, stream: bool) -> float:
    """Seconds in which so many clients got so many answers."""
    connections = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(clients)]
    requests = [request(site, number, stream=stream) for number in range(answers)]

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while requests:
            writer.write(requests.pop())
            await answered(reader)

    begin = time.perf_counter()
    await asyncio.gather(*(client(*connection) for connection in connections))
    took_s = time.perf_counter() - begin
    for _, writer in connections:
        writer.close()
    return took_s
