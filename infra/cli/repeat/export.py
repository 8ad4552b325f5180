"""`headrace export`: a run as one file, to be replayed elsewhere."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec

from infra.cli.repeat.source import ReplaySource, opened, shaping
from infra.cli.terminal import Screen, printable_json
from infra.ledger.archive import ABOUT, Archive, ArchiveHead, writing
from infra.log.bus import Record
from infra.log.log import Log
from infra.model.vision import vision_if_any
from schemas import topics
from schemas.errors import OffsetOutOfRange
from schemas.topics import Topic
from trainer.journal import checkpoint
from trainer.replay.replay import ReplayStart, find_start


async def run_export(run: Path, file: Path, *, from_step: int | None, as_json: bool, trusted: bool = False) -> int:
    """Write the archive; returns the exit code."""
    console = Screen(stderr=True)
    async with opened(run, trusted=trusted) as source:
        with console.status("reading the journal"):
            start = await find_start(source.log, source.store, source.run, from_step=from_step, to_step=None)
        with console.status(f"writing {file}"), writing(file) as archive:
            counts = await fill(archive, source, start)
            num_bytes = archive.close()
    summary = {
        "file": str(file),
        "bytes": num_bytes,
        "from_step": start.manifest.place.step,
        "steps": start.survey.num_steps,
        "records": counts,
        "sealed": archive.sealed,
    }
    if as_json:
        print(printable_json(msgspec.json.encode(summary).decode()))
    else:
        records = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
        print(
            f"{file}  {summary['bytes']:,} bytes: {start.survey.num_steps} steps from {summary['from_step']}, {records}"
        )
        if archive.sealed:
            print(
                f"{archive.sealed:,} of {counts[topics.BUFFER.name]:,} blocks are sealed, and their keys are not in the file: "
                "steps that trained on these cannot be replayed from it, only where the run's store is"
            )
        sys.stdout.flush()
    return 0


async def fill(archive: Archive, source: ReplaySource, start: ReplayStart) -> dict[str, int]:
    """Everything a replay from `start` reads, and the events and evals of every version, for the console; how many
    records of each topic.
    """
    shown = [topic for topic in (topics.POLICIES, topics.EVALS) if await source.log.holds(topic)]
    held = (topics.BATCHES, topics.BUFFER, *shown)
    about = ArchiveHead(settings=shaping(source.settings), topics=tuple(topic.name for topic in held))
    archive.add(ABOUT, msgspec.json.encode(about))
    await asyncio.to_thread(archive.add_model, Path(source.model))
    for key in checkpoint.objects(source.store, source.run, start.manifest.place):
        archive.add(f"store/{key}", source.store.get(key))
    shows = await asyncio.to_thread(vision_if_any, source.model) is not None
    begins = [start.manifest.position.journal_next, min(start.survey.last_use, default=0)]
    begins += [(await source.log.bounds(topic))[0][0] for topic in shown]
    counts = {}
    for topic, begin in zip(held, begins, strict=True):
        records = records_from(source.log, topic, begin)
        images = shows and topic is topics.BUFFER
        counts[topic.name] = await archive.add_records(topic, records, source.store, images=images)
    return counts


async def records_from(log: Log, topic: Topic, start: int) -> AsyncIterator[Record]:
    """The raw records of a topic of one partition from `start` to its present end. Raises OffsetOutOfRange."""
    at = start
    async with aclosing(log.chunks(topic, {0: start})) as chunks:
        async for records in chunks:
            for record in records:
                if record.offset != at:
                    raise OffsetOutOfRange(f"{topic.name}: offset {at} is missing, the next record is {record.offset}")
                yield record
                at += 1
