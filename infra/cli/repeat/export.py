"""`headrace export`: a run as one file, to be replayed elsewhere."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.options import JsonOption, command
from infra.cli.repeat.source import FromOption, ReplaySource, RunArgument, TrustOption, opened, shaping
from infra.cli.terminal import Screen, print_json
from infra.ledger.archive import Archive, writing
from infra.ledger.bundle import Bundle, PartitionRange
from infra.model.vision import vision_if_any
from schemas import topics
from trainer.journal import checkpoint
from trainer.replay.replay import ReplayStart, find_start


@command
async def export(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(help="Archive to write; it must not exist.")],
    from_step: FromOption = None,
    trust_plugins: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Write everything that a replay needs into a file: checkpoint, model, journal, buffered blocks, settings of the trainer.

    It contains no address, no credential and no key. Steps that trained on encrypted answers of named users cannot be
    replayed from it; the command prints their number.
    If a loss or a learner is a plugin, it must be importable at the replay, which needs --trust-plugins.

    Example: [cyan]headrace export runs/demo demo.headrace[/], elsewhere [cyan]headrace replay demo.headrace --verify[/]
    """
    console = Screen(stderr=True)
    async with opened(run, trusted=trust_plugins) as source:
        with console.status("reading the journal"):
            start = await find_start(source.log, source.store, source.run, from_step=from_step, to_step=None)
        with console.status(f"writing {file}"), writing(file) as archive:
            bundle = await fill(archive, source, start)
            archive.finish(bundle)
    counts = {name: item.end - item.begin for name, (item,) in bundle.topics.items()}
    num_bytes = (await asyncio.to_thread(file.stat)).st_size
    step, steps = start.manifest.place.step, start.survey.num_steps
    if as_json:
        found = {"file": str(file), "bytes": num_bytes, "from_step": step, "steps": steps, "records": counts}
        print_json(found | {"sealed": archive.sealed})
        return 0
    records = ", ".join(f"{count:,} of {name}" for name, count in counts.items())
    print(f"{file}  {num_bytes:,} bytes: {steps} steps from {step}, {records}")
    if archive.sealed:
        print(
            f"{archive.sealed:,} of {counts[topics.BUFFER.name]:,} blocks are sealed, and their keys are not in the file: "
            "steps that trained on these cannot be replayed from it, only where the run's store is"
        )
    return 0


async def fill(archive: Archive, source: ReplaySource, start: ReplayStart) -> Bundle:
    """Add everything a replay from `start` reads; not yet ended."""
    await asyncio.to_thread(archive.add_model, Path(source.model))
    for key in checkpoint.objects(source.store, source.run, start.manifest.place):
        archive.add(key, source.store.get(key))
    end = (await source.log.bounds(topics.BUFFER))[1][0]
    begins = {
        topics.BATCHES: start.manifest.position.journal_next,
        topics.BUFFER: min(start.survey.offsets, default=end),
    }
    shows = await asyncio.to_thread(vision_if_any, source.model) is not None
    held: dict[str, tuple[PartitionRange, ...]] = {
        topic.name: (
            await archive.add_topic(source.log, topic, begin, source.store, images=shows and topic is topics.BUFFER),
        )
        for topic, begin in begins.items()
    }
    return Bundle(app=source.settings.app, topics=held, settings=shaping(source.settings))
