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
TrustOption = Annotated[
    bool, typer.Option("--trust-plugins", help="Import and call what its settings name and headrace does not ship.")
]
RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a run (or its TOML), or a file that `export` wrote.", metavar="RUN")
]


def replay(
    run: RunArgument = Path(),
    from_step: FromOption = None,
    to_step: Annotated[int | None, typer.Option("--to", help="Stop after this step.", metavar="STEP")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare; exit with 1 on a difference, or where nothing could be.")
    ] = False,
    trust_plugins: TrustOption = False,
    max_unpacked: Annotated[
        int | None, typer.Option(help="What an archive may unpack to; 32 GiB by default.", metavar="BYTES", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Do a run again, from the oldest kept checkpoint and the log alone, and show the weights' hash at every checkpoint.

    Appends nothing to the log and writes nothing to the store. A record that is missing or was altered is named.
    In one process on the same model of CPU, with the same code, libraries and threads, the hashes are equal; elsewhere the
    batches are, and what differs is said. Code that headrace does not ship is imported with --trust-plugins alone, after its
    names.

    Example: [cyan]headrace replay runs/demo --verify[/]
    """
    from infra.cli.repeat.replay import Trust, run_replay
    from infra.ledger.archive import MAX_BYTES

    trust = Trust(plugins=trust_plugins, max_bytes=max_unpacked or MAX_BYTES)
    exit_with(
        lambda: run_replay(run, from_step=from_step, to_step=to_step, verify=verify, as_json=as_json, trust=trust)
    )


def export(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(help="The archive to write; it must not be there.")],
    from_step: FromOption = None,
    trust_plugins: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write all that a replay needs into one file: checkpoint, model, journal, buffered blocks, settings of the trainer.

    What was decided and measured of every version is in it too, for [bold]headrace console[/].

    No address, no credential and no key is in it: steps that trained on sealed answers, those of named users, cannot be
    replayed from it. Their number is printed.
    Where an objective or a learner comes from a plugin, the plugin must be importable where it is replayed, and
    `headrace replay` asks for --trust-plugins.

    Example: [cyan]headrace export runs/demo demo.headrace[/], elsewhere [cyan]headrace replay demo.headrace --verify[/]
    """
    from infra.cli.repeat.export import run_export

    exit_with(lambda: run_export(run, file, from_step=from_step, as_json=as_json, trusted=trust_plugins))
