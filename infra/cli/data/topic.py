"""`headrace topic create NAME`: a topic for a feedback source, where its producer has no right to create it.

The app's own topics are made by `headrace check --create`.
"""

from typing import Annotated

import typer

from infra.cli.connect import reading
from infra.cli.options import SettingsFile, command
from infra.cli.terminal import Screen
from infra.settings.config import duration_s
from schemas.errors import ConfigError
from schemas.topics import FEEDBACK, topic_config


@command
async def create(
    chosen: SettingsFile,
    name: Annotated[str, typer.Argument(help="Full name of the topic, as in from = { topic = NAME }.")],
    partitions: Annotated[int, typer.Option(min=1, help="Number of partitions: workers that can read it at once.")] = 1,
    keep: Annotated[str, typer.Option(help="Retention of events, such as 7d.", show_default="[keep] replay")] = "",
) -> int:
    """Create a topic for a feedback source, if it does not exist. An existing topic stays unchanged.

    Stream workers that wait for the topic start to read it by themselves. The command starts the embedded broker if needed.

    Example: [cyan]headrace topic create zendesk.closed[/]
    """
    settings = chosen.load()
    if name.startswith(f"{settings.app}."):
        raise ConfigError(f"{name}: topics of the app itself are made by headrace check --create")
    if (
        not 0 < len(name) < 250
        or name in (".", "..")
        or not all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in name)
    ):
        raise ConfigError(f"{name!r}: expected at most 249 letters, digits, dots, - and _")
    keep_ms = int(duration_s(keep or settings.keep.replay) * 1000)
    console = Screen()
    async with reading(settings, create=True) as log:
        try:
            there = len(await log.bus.partitions(name))
        except ValueError:
            made = topic_config(FEEDBACK, keep_ms, settings.kafka.replication)
            await log.bus.create_topic(name, partitions, made, settings.kafka.replication)
            console.print(
                f"{name} created: {partitions} partitions, kept for {keep or settings.keep.replay}", markup=False
            )
        else:
            console.print(f"{name} was there, with {there} partitions: nothing was changed", markup=False)
    return 0
