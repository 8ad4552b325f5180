"""`headrace skip GROUP`: continues after records that retention deleted before a stage had read them.

A stage never skips a record by itself: a stage that was away for longer than the log keeps its input stops and
names this command. The command prints the lost records, and writes one dead letter for each partition.
"""

from typing import Annotated, NamedTuple

import typer

from infra.cli.connect import connected
from infra.cli.look.reader import READS, Group
from infra.cli.options import SettingsFile, command
from infra.cli.terminal import Screen
from infra.log.bus import CommitRefused, Partition
from infra.log.log import Log, letter_at
from schemas import topics
from schemas.errors import ConfigError

REASON = "deleted unread"


class Lost(NamedTuple):
    """Records of a partition, up to the offset `stop`, that are no longer kept."""

    topic: topics.Topic
    partition: int
    start: int
    stop: int


@command
async def skip(
    chosen: SettingsFile,
    group: Annotated[
        Group, typer.Argument(help="Stopped consumer group: a stage, feedback over HTTP, or the explorers.")
    ],
) -> int:
    """Skip records that retention deleted before they were read, and list them.

    A stage that was down for longer than [bold]\\[keep] replay[/] stops and skips nothing by itself. Stop all processes of the
    group first. Dead letters record each loss.

    Example: [cyan]headrace skip verify[/]
    """
    settings = chosen.load()
    console = Screen()
    async with connected(settings) as log:
        lost = await skip_lost(log, group)
    for gap in lost:
        console.print(
            f"{gap.topic.name}/{gap.partition}: {gap.stop - gap.start:,} records, from offset {gap.start:,}, are lost"
        )
    if not lost:
        console.print(f"{group} has missed nothing: all it has still to read is kept")
    return 0


async def skip_lost(log: Log, group: Group) -> list[Lost]:
    """Commit the oldest kept offset where the group's offset is below it; returns the records that it will never read."""
    found: list[Lost] = []
    for topic in READS[group]:
        name = log.name(topic)
        committed, begin = await log.bus.committed(log.group(group), name), await log.bus.beginning_offsets(name)
        behind = sorted((at.index, offset, begin[at]) for at, offset in committed.items() if offset < begin[at])
        found += [Lost(topic, *gap) for gap in behind]
    for gap in found:
        reader = await log.assigned(gap.topic, {gap.partition: gap.stop}, group=group)
        try:
            await reader.commit({Partition(log.name(gap.topic), gap.partition): gap.stop})
        except CommitRefused as error:
            raise ConfigError(f"{group}: processes of this group are running; stop them, then skip: {error}") from error
        finally:
            await reader.close()
        loss = f"offsets {gap.start} to {gap.stop - 1} were deleted before {group} had read them"
        letter = letter_at((gap.topic.name, gap.partition, gap.start), stage=group, reason=REASON, error=loss)
        await log.publish(topics.DEAD_LETTERS, letter)
    return found
