"""The commands that look: status, peek, audit, trace, eval, console.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with
from infra.observe.alarms import MAX_LAG


def status(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if there is an alarm, for monitoring.")] = False,
    max_lag: Annotated[
        int, typer.Option(help="Records waiting for a stage above which its lag is an alarm.")
    ] = MAX_LAG,
    kept: Annotated[
        bool, typer.Option("--kept", help="Also print the size and the bound of each topic, folder and file.")
    ] = False,
) -> None:
    """Roles, versions, rates, lags, drops by reason, and alarms.

    Read from the log alone, so it works from any machine that reaches the broker.
    Rates cover the last minute.
    An alarm is a role that does not report, a stage that lags, a refused policy, or a diagnostic out of its range.

    Example: [cyan]headrace status --check --json[/]
    """
    from infra.cli.look.status import run_status

    exit_with(lambda: run_status(config, sets, as_json=as_json, check=check, max_lag=max_lag, kept=kept))


def peek(
    topic: Annotated[str, typer.Argument(help="With or without the app's prefix.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many of the newest records.")] = 5,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what arrives.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the newest records of a topic as a person reads them.

    Topics: taskset.raw, taskset, tasks, experiences, experts, feedback, verified, buffer, evals, batches,
    progress, policies, dead-letters.
    With --json each record is one line.

    Example: [cyan]headrace peek buffer -n 3[/], [cyan]headrace peek dead-letters --follow[/]
    """
    from infra.cli.look.peek import run_peek

    exit_with(lambda: run_peek(topic, config, sets, last=last, follow=follow, as_json=as_json))


def audit(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="First have the master issue nothing new, and wait until all is finished.")
    ] = False,
    timeout: Annotated[str, typer.Option(help="How long a drain may take.")] = "10m",
    then_continue: Annotated[
        bool, typer.Option("--then-continue", help="Afterwards let the master issue again, drained now or earlier.")
    ] = False,
) -> None:
    """Account for every published experience: trained, dropped with a reason, or pending.

    Reads the whole kept log and may run at any time. A long log takes room for temporary files (TMPDIR), about 400 MB per
    million experiences.
    After a drain nothing is pending but what waits in the buffer to be drawn without an issue order, such as demonstrations.
    A drained app stays drained, also over restarts, until --then-continue.
    Exits with 1 if an experience was trained twice, trained without having been published, or is still on its way
    when a drain's time is up.

    Example: [cyan]headrace audit --drain --then-continue[/], [cyan]headrace audit --json | jq .dropped[/]
    """
    from infra.cli.look.audit import run_audit

    exit_with(lambda: run_audit(config, sets, as_json, drained=drain, within=timeout, then_continue=then_continue))


def trace(
    answer: Annotated[str | None, typer.Argument(help="An answer id (hr-…) or an experience id.")] = None,
    policy: Annotated[int | None, typer.Option("--policy", help="A version: show what it learned from.")] = None,
    keep_up: Annotated[
        bool, typer.Option("--keep-up", help="Ask nothing: keep the index up until stopped, as `up` does.")
    ] = False,
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Follow an answer to the steps that trained on it, or a policy back to its answers.

    Who sampled what, what every processor and score said, the feedback and when it came, how the group ended, the steps
    that used it with their advantages, and the first version that learned from it, or what is waited for and until when.
    Where the records lie is kept in an index next to the TOML, which `headrace up` keeps up with the log; without it the
    first trace reads the whole log, and the next ones what has come since.

    Example: [cyan]headrace trace hr-add-37-45.2.0-7-0[/], [cyan]headrace trace --policy 40[/]
    """
    from infra.cli.look.trace import run_follow, run_trace

    if keep_up:
        exit_with(lambda: run_follow(config, sets))
        return
    exit_with(lambda: run_trace(answer, policy, config, sets, as_json=as_json))


def evaluate(
    suite: Annotated[str, typer.Argument(help="A suite of [[master.evals]].")],
    version: Annotated[
        int | None, typer.Option(min=0, help="A policy version, the newest or one to come; the newest by default.")
    ] = None,
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    within: Annotated[str, typer.Option(help="How long to wait for the result.")] = "10m",
    as_json: JsonOption = False,
) -> None:
    """Have exactly one version answer a suite, in addition to its schedule, and print the result.

    The request is in the log, so it outlives this command. An engine cannot go back: an older version is refused,
    and one that explorers pass meanwhile is answered by a later one.

    Example: [cyan]headrace eval held-out --version 144[/]
    """
    from infra.cli.govern.evaluate import run_eval

    exit_with(lambda: run_eval(suite, version, config, sets, within=within, as_json=as_json))


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
    """Show a run in the browser: the flow, the curves, every answer, the versions and why, the data.

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
