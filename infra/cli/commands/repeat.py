"""The commands that repeat or repair: replay, export, reprocess, backup, restore, recover.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with, with_flags

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
    batches are, and it prints what differs. Code that headrace does not ship is imported with --trust-plugins alone, after its
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

    No address, no credential and no key is in it: steps that trained on sealed answers, answers of named users, cannot be
    replayed from it. Their number is printed.
    Where an objective or a learner comes from a plugin, the plugin must be importable where it is replayed, and
    `headrace replay` asks for --trust-plugins.

    Example: [cyan]headrace export runs/demo demo.headrace[/], elsewhere [cyan]headrace replay demo.headrace --verify[/]
    """
    from infra.cli.repeat.export import run_export

    exit_with(lambda: run_export(run, file, from_step=from_step, as_json=as_json, trusted=trust_plugins))


class ReprocessFlags(msgspec.Struct, frozen=True):
    """Input, settings and result of a reprocess."""

    start: Annotated[
        str,
        typer.Option(
            "--from", help='"beginning", an offset, partition:offset[,…], or a time such as 2026-11-21T12:00.'
        ),
    ] = "beginning"
    stop: Annotated[str, typer.Option("--to", help='"end", or a place as in --from; not included itself.')] = "end"
    topic: Annotated[str, typer.Option(help="Input topic of verify: experiences or experts alone.")] = ""
    other: Annotated[
        Path | None,
        typer.Option(
            "--with",
            help="Judge by this TOML: whole settings, or tables that override those in -c.",
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
    Offsets belong to the stage's input: taskset.raw, experiences (or --topic), verified.
    dead-letters delivers each letter that decodes by now once more to where it came from.

    Example: [cyan]headrace reprocess verify --from 2026-11-20 --with stricter.toml --diff[/]
    """
    from infra.cli.repeat.reprocess import run_reprocess

    options = msgspec.structs.asdict(flags)
    other = options.pop("other")
    exit_with(lambda: run_reprocess(stage, config, sets, other=other, options=options, as_json=as_json))


def recover(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006 (typer copies it)
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Go on after the log's data or the store was lost, or say what can be done.

    Where the log is lost and the store is there, a new journal begins from the newest checkpoint. It says what is lost and
    asks first. Where log and store belong together it changes nothing.

    Example: [cyan]headrace recover -c support/headrace.toml[/]
    """
    from infra.cli.repeat.recover import run_recover

    exit_with(lambda: run_recover(config, sets, yes=yes))


def backup(
    to: Annotated[str, typer.Argument(help="A folder or s3://bucket/prefix, empty or with an unfinished backup.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006 (typer copies it)
    keys: Annotated[
        str,
        typer.Option("--keys", help="Where keys go: another folder or s3://bucket/prefix. Without it they stay out."),
    ] = "",
) -> None:
    """Copy an app, its topics and its store, while it runs.

    Run again after a stop, it continues. Without --keys what was sealed of users stays shut after a restore, and API keys are
    made again.

    Example: [cyan]headrace backup s3://backups/support-11-23 --keys /safe/support-11-23[/]
    """
    from infra.cli.repeat.backup import run_backup

    exit_with(lambda: run_backup(to, config, sets, keys=keys))


def restore(
    source: Annotated[
        str, typer.Argument(help="A whole backup: a folder or s3://bucket/prefix. Without it keys alone come back.")
    ] = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006 (typer copies it)
    keys: Annotated[str, typer.Option("--keys", help="Where the backup's keys are.")] = "",
) -> None:
    """Put a backup back, into a broker and a store that have nothing of the app.

    Every record is at its offset with its time again, and every byte is compared with its hash. Stop all roles first. Run
    again after a stop, it continues. A key that is there is not replaced.

    Example: [cyan]headrace restore s3://backups/support-11-23 --keys /safe/support-11-23[/]
    """
    from infra.cli.repeat.backup import run_restore

    exit_with(lambda: run_restore(source, config, sets, keys=keys))
