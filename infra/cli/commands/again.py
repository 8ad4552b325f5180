"""`headrace reprocess`.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with, with_flags


class ReprocessFlags(msgspec.Struct, frozen=True):
    """What is processed again, by what, and what becomes of the result."""

    start: Annotated[
        str,
        typer.Option(
            "--from", help='"beginning", an offset, partition:offset[,…], or a time such as 2026-11-21T12:00.'
        ),
    ] = "beginning"
    stop: Annotated[str, typer.Option("--to", help='"end", or a place as in --from; not included itself.')] = "end"
    topic: Annotated[str, typer.Option(help="Of verify: experiences or experts alone.")] = ""
    other: Annotated[
        Path | None,
        typer.Option(
            "--with",
            help="Judge by this TOML: whole settings, or tables laid over those of -c.",
            metavar="FILE",
        ),
    ] = None
    diff: Annotated[bool, typer.Option("--diff", help="Compare with what the log records.")] = False
    rescore: Annotated[bool, typer.Option("--rescore", help="Ask for outside verdicts again that are on record.")] = (
        False
    )


@with_flags
def reprocess(
    stage: Annotated[str, typer.Argument(help="tasks, verify, collect, or dead-letters.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    *,
    flags: ReprocessFlags,
    as_json: JsonOption = False,
) -> None:
    """Run a stage over any part of the log again, exactly as the workers do, and see what it would have changed.

    The app that is read is only read; with the settings and processors that made the record, nothing differs.
    Offsets are those of the stage's input: taskset.raw, experiences (or --topic), verified.
    dead-letters delivers each letter that decodes by now once more to where it came from.

    Example: [cyan]headrace reprocess verify --from 2026-11-20 --with stricter.toml --diff[/]
    """
    from infra.cli.repeat.reprocess import run_reprocess

    options = msgspec.structs.asdict(flags)
    other = options.pop("other")
    exit_with(lambda: run_reprocess(stage, config, sets, other=other, options=options, as_json=as_json))
