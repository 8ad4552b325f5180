"""Faust as its tutorial has it: one agent, one record an answer, JSON records of its own or bytes that msgspec reads.

python -m infra.cli.bench.peers.stock_faust BOOTSTRAP STAGE json|lists SOURCE SINK
"""

import asyncio
import sys
from typing import Any, cast

import faust

from infra.cli.bench.peers.plain import FORMS, StageName, stage_of


class FaustAnswer(faust.Record, serializer="json"):  # type: ignore[misc, call-arg]
    """The same answer as a record of Faust.

    id, group, episode, group_size, num_prompt, tokens, logprobs, messages, answer, version, score, reward, advantage,
    priority, reason: as in PlainAnswer.
    """

    id: str
    group: str
    episode: int
    group_size: int
    num_prompt: int
    tokens: list[int]
    logprobs: list[float]
    messages: list[dict[str, str]]
    answer: str
    version: int
    score: float | None = None
    reward: float | None = None
    advantage: float | None = None
    priority: float = 1.0
    reason: str = ""


async def run(bootstrap: str, stage: StageName, form: str, source: str, sink: str) -> None:
    """Take records of one topic and send what comes of them to another, for ever."""
    app = faust.App(
        f"{source}.group", broker=f"kafka://{bootstrap}", store="memory://", autodiscover=False, web_enabled=False,
        topic_disable_leader=True, topic_allow_declare=False,
    )  # fmt: skip
    work = stage_of(stage)
    if form == "json":
        incoming, outgoing = (app.topic(name, value_type=FaustAnswer) for name in (source, sink))

        async def answers(stream: Any) -> None:
            async for one in stream:
                for out in work.take(one):
                    await outgoing.send(key=out.group, value=out)
    else:
        incoming, outgoing = (app.topic(name, value_type=bytes, value_serializer="raw") for name in (source, sink))
        wire = FORMS[form]

        async def answers(stream: Any) -> None:
            async for value in stream:
                for out in work.take(wire.decode(value)):
                    await outgoing.send(key=out.group, value=wire.encode(out))

    app.agent(incoming, name=f"{source}.agent")(answers)
    await app.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], cast(StageName, sys.argv[2]), *sys.argv[3:6]))
