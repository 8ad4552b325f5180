"""Doing a run again: replay, export.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated

import typer

from infra.cli.options import JsonOption, exit_with

FromOption = Annotated[
    int | None, typer.Option("--from", help="Begin at the newest checkpoint at or before this step.", metavar="STEP")
]
RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a run (or its TOML), or a file that `export` wrote.", metavar="RUN")
]


def replay(
    run: RunArgument = Path(),
    from_step: FromOption = None,
    to_step: Annotated[int | None, typer.Option("--to", help="Stop after this step.", metavar="STEP")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare; exit with 1 on a difference.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Do a run again, from the oldest kept checkpoint and the log alone, and show the weights' hash at every checkpoint.

    Writes nothing: neither to the log nor to the store. A record that is missing or was altered is named.
    On one CPU process with the same code, libraries and threads the hashes are equal; elsewhere the batches are, and
    what differs is said.

    Example: [cyan]headrace replay runs/demo --verify[/]
    """
    from infra.cli.replay import run_replay

    exit_with(lambda: run_replay(run, from_step=from_step, to_step=to_step, verify=verify, as_json=as_json))


def export(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(help="The archive to write; it must not be there.")],
    from_step: FromOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write all that a replay needs into one file: checkpoint, model, journal, buffered blocks, settings of the trainer.

    No address and no credential is in it.
    Where an objective or a learner comes from a plugin, the plugin must be importable where it is replayed.

    Example: [cyan]headrace export runs/demo demo.headrace[/], elsewhere [cyan]headrace replay demo.headrace --verify[/]
    """
    from infra.cli.export import run_export

    exit_with(lambda: run_export(run, file, from_step=from_step, as_json=as_json))
