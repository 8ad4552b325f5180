"""`headrace pause | resume`: learning stops and continues; serving, recording and feedback never stop.

It is a word in the log: it outlives every process, and `headrace channel` lists who said it, when and why.
"""

from pathlib import Path

from infra.cli.connect import connected
from infra.cli.look.audit import operator
from infra.cli.settings import load_settings
from infra.cli.terminal import Screen
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
