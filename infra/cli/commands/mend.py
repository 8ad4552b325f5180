"""The command for what is broken: recover.

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
    from infra.cli.recover import run_recover

    exit_with(lambda: run_recover(config, sets, yes=yes))
