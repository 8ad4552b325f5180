"""The command that shows pages: console.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.cli.options import DEFAULT, SetOption, exit_with


def console(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            "-c",
            help="The TOML file of a run, or an archive of it.",
            metavar="FILE",
            rich_help_panel="Settings",
        ),
    ] = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    listen: Annotated[
        str, typer.Option(help="host:port, instead of that of [bold]\\[console][/].", metavar="ADDRESS")
    ] = "",
) -> None:
    """See a run in the browser: the flow, the curves, every answer, the versions and why, the data.

    Reads the log as [bold]status[/] and [bold]trace[/] do, of a run that is at work, over, or in an archive of
    [bold]export[/]. [bold]headrace up[/] starts it too. The link it prints looks; promote, pin, rollback, pause and redeliver
    take a key with the scope operate, sealed texts one with unseal.

    Example: [cyan]headrace console -c runs/demo/headrace.toml --listen 127.0.0.1:8401[/]
    """

    def run() -> Coroutine[Any, Any, int]:
        from infra.local.idle_time import take_small_share
        from schemas.errors import ConfigError

        try:
            from infra.cli.console.serve import run_console
        except ImportError as error:
            raise ConfigError(f"console: {error.name} is not installed: pip install 'headrace[console]'") from error
        take_small_share()
        return run_console(config, sets, listen)

    exit_with(run)
