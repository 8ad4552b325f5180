"""The commands for what is broken, or may be: backup, restore, recover.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from typing import Annotated

import typer

from infra.cli.options import DEFAULT, ConfigOption, SetOption, exit_with


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
    made anew.

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
