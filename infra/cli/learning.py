"""`headrace pause | resume`: learning stops and goes on again; serving, recording and feedback never stop.

It is a word in the log: it outlives every process, and `headrace channel` lists who said it, when and why.
"""

from pathlib import Path

from infra.cli.audit import operator
from infra.cli.connect import connected
from infra.cli.settings import load_settings
from infra.cli.terminal import Screen
from infra.log.log import Log
from schemas import Directive, topics
from schemas.fields import DirectiveKind

SAID: dict[DirectiveKind, str] = {
    "pause": "learning is paused: no new groups, no new steps; `headrace resume` lets it go on",
    "continue": "learning goes on",
}


async def run_learning(order: DirectiveKind, reason: str, config: Path, sets: list[str]) -> int:
    """Say it in the log; the master and the trainer hear it within a second, or when they start."""
    settings = load_settings(config, sets)
    async with connected(settings) as log:
        await log.publish(topics.POLICIES, Directive(order=order, owner=operator(), reason=reason))
    Screen().print(SAID[order])
    return 0


async def learning_history(log: Log) -> list[tuple[int, Directive]]:
    """Every word of an operator about learning, with its time."""
    return [
        (message.timestamp_ms, message.value)
        async for message in log.read_all(topics.POLICIES)
        if isinstance(message.value, Directive) and message.value.is_of_learning
    ]
