"""Feedback sources as configured: which function reads which events, and who listens to them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.chain import calls
from infra.chain.processor import declared_mark
from infra.chain.redact import Redactor
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.plugin import load
from schemas.errors import ConfigError
from streams.config import FeedbackConfig, RedactConfig
from streams.sources.event import EventSource
from streams.sources.file import run_file
from streams.sources.langfuse import run_langfuse
from streams.sources.received import run_received
from streams.sources.topic import run_topic

REDACT = RedactConfig()


def build_sources(
    configs: Sequence[FeedbackConfig], folder: Path, redact: RedactConfig = REDACT
) -> tuple[EventSource, ...]:
    """The configured sources, their functions loaded; files are relative to `folder`. Raises ConfigError."""
    sources: list[EventSource] = []
    redactor = Redactor(redact.kinds, redact.patterns)
    for index, config in enumerate(configs):
        where = f"feedback[{index}]"
        function: Any = load(config.use, config.options, where)
        try:
            kind = declared_mark(function).kind
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if kind != "feedback":
            raise ConfigError(f"{where}: {config.use} is marked @{kind}, expected @feedback")
        if any(source.name == config.name for source in sources):
            raise ConfigError(f'{where}.name: duplicate source "{config.name}"')
        listens = config.from_
        webhook = listens.webhook
        if webhook and any(source.webhook == webhook for source in sources):
            raise ConfigError(f'{where}.from.webhook: a source listens to "{webhook}" already')
        file = folder / listens.file if listens.file else None
        sources.append(
            EventSource(
                name=config.name, function=function, topic=listens.topic, file=file, webhook=webhook, otlp=listens.otlp,
                langfuse=listens.langfuse, folder=folder, trouble=calls.Trouble(config.name), redactor=redactor,
            )
        )  # fmt: skip
    return tuple(sources)


async def run_sources(sources: Sequence[EventSource], log: Log, metrics: Metrics, folder: Path) -> None:
    """Listen to all sources until cancelled. folder: keeps the positions in files, for all workers of this machine.

    Raises the readers' errors.
    """
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_received([source for source in sources if source.webhook], log, metrics))
        for source in sources:
            state = folder / log.app / f"feedback-{source.name}"
            if source.langfuse is not None:
                tasks.create_task(run_langfuse(source, log, metrics, state))
            elif source.file is not None:
                tasks.create_task(run_file(source, log, metrics, state))
            elif source.topic:
                tasks.create_task(run_topic(source, log, metrics))
