"""headrace's side of the benchmark of transports: blocks of 16 through `buffer`, as an explorer sends and a trainer reads them.

python -m infra.cli.bench.records.transport_ours read|send BOOTSTRAP ANSWERS
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from infra.cli.bench.peers.wire import Sender, say, serve, told_rounds
from infra.log.log import Log
from schemas import Block, Message, Span, make_experience
from schemas.topics import BUFFER

APP = "transport"
BLOCK = 16
READ_S = 60.0


def sent_blocks(answers: list[dict[str, Any]], number: int) -> list[Block]:
    """`number` answers, from lists and text, in blocks of one group each."""
    found = []
    for start in range(0, number, BLOCK):
        members = []
        for at in range(start, min(number, start + BLOCK)):
            one = answers[at % len(answers)]
            begin = len(one["tokens"]) - len(one["logprobs"])
            members.append(
                make_experience(
                    id=f"{at}",
                    group=f"g{start}.0",
                    episode=at - start,
                    group_size=BLOCK,
                    tokens=one["tokens"],
                    logprobs=one["logprobs"],
                    messages=[Message(role, content) for role, content in one["messages"]],
                    spans=(Span(begin, len(one["tokens"]), 7),),
                )
            )
        found.append(Block(tuple(members)))
    return found


async def publish(log: Log, answers: list[dict[str, Any]], number: int) -> None:
    """What the explorer does: blocks made and published, a bounded number at once."""
    await log.publish_all(BUFFER, sent_blocks(answers, number))


async def taken(log: Log, reader: Any, number: int) -> list[tuple[str, Any, Any]]:
    """What the trainer does: records read until so many answers are there, and their arrays made."""
    found: list[tuple[str, Any, Any]] = []
    while len(found) < number:
        messages = await log.read(reader, timeout_s=READ_S)
        if not messages:
            raise RuntimeError(f"{len(found)} of {number} answers, and none for {READ_S:g} s")
        for message in messages:
            assert isinstance(message.value, Block), message.error
            found += [(one.id, one.tokens, one.logprobs) for one in message.value.experiences]
    return found


async def _send(log: Log, answers: list[dict[str, Any]]) -> None:
    say({"ready": True})
    rounds = iter(told_rounds())
    while (asked := await asyncio.to_thread(next, rounds, None)) is not None:
        await publish(log, answers, asked[1])


def _read(bootstrap: str, file: Path) -> None:
    command = [sys.executable, "-m", "infra.cli.bench.records.transport_ours", "send", bootstrap, str(file)]
    sender = Sender(command)
    with asyncio.Runner() as runner:
        log, close = runner.run(_opened(bootstrap))
        reader = runner.run(log.assigned(BUFFER, "end"))

        def answers(number: int) -> list[tuple[str, Any, Any]]:
            sender.go(number)
            return runner.run(taken(log, reader, number))

        serve(answers)
        runner.run(close())


async def _opened(bootstrap: str) -> tuple[Log, Callable[[], Coroutine[Any, Any, None]]]:
    from infra.log.kafka import KafkaBus

    bus = KafkaBus(bootstrap)
    await bus.start()
    return Log(bus, APP), bus.close


async def _sending(bootstrap: str, answers: list[dict[str, Any]]) -> None:
    log, close = await _opened(bootstrap)
    await _send(log, answers)
    await close()


if __name__ == "__main__":
    if sys.argv[1] == "send":
        asyncio.run(_sending(sys.argv[2], json.loads(Path(sys.argv[3]).read_text())))
    else:
        _read(sys.argv[2], Path(sys.argv[3]))
