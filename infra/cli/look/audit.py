"""`headrace audit`: the account as a table, and an exit code; with --drain, after everything has been finished."""

import getpass
import os
import socket
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from infra.cli.connect import connected, reading
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, print_json, two_columns
from infra.ledger.account import Account, audit, drain
from infra.settings.config import duration_s

SHOWN_IDS = 5


@command
async def audit_log(
    chosen: SettingsFile,
    as_json: JsonOption = False,
    drained: Annotated[
        bool, typer.Option("--drain", help="First stop issuing tasks, and wait until all groups are finished.")
    ] = False,
    within: Annotated[str, typer.Option("--timeout", metavar="TIMEOUT", help="Maximum duration of a drain.")] = "10m",
) -> int:
    """Account for every published experience: trained, dropped with a reason, or pending.

    The command reads the whole kept log and may run at any time. It needs space for temporary files (TMPDIR), about 400 MB per
    million experiences.
    After a drain only experiences of lanes without an issue order are pending, such as demonstrations.
    A drained app stays drained, also over restarts, until [bold]headrace resume[/].
    Exit code 1: an experience was trained twice, or trained without having been published, or the drain timed out.

    Example: [cyan]headrace audit --drain[/], [cyan]headrace audit --json | jq .dropped[/]
    """
    settings = chosen.load()
    timeout_s = duration_s(within)
    console = Screen(stderr=as_json)
    run = settings.run or settings.app
    is_finished = True
    # A drain needs the roles at work, so a broker that is not there is not started for it.
    async with connected(settings) if drained else reading(settings) as log:
        with console.status("waiting for the master" if drained else "reading the log") as status:
            if drained:
                account, is_finished = await drain(log, run, operator(), timeout_s, status.update)
            else:
                account = await audit(
                    log, run, lambda topic, left: status.update(f"reading {topic}: {left:,} records left")
                )
    if as_json:
        print_json(msgspec.to_builtins(account) | {"clean": account.is_clean, "on_the_way": account.on_the_way})
    else:
        console.print(table(account))
        for title, ids in (("trained twice", account.trained_twice), ("trained, never published", account.unknown)):
            if ids:
                console.print(f"{title}: {', '.join(ids[:SHOWN_IDS])}", style="red")
    if not is_finished:
        some = ", ".join(account.pending_ids[:SHOWN_IDS]) + (", …" if len(account.pending_ids) > SHOWN_IDS else "")
        console.print(f"not drained after {within}; {account.on_the_way:,} on their way {some}", style="red")
    if drained:
        console.print("the app stays drained; `headrace resume` ends that", style="dim")
    return 0 if account.is_clean and is_finished else 1


def operator() -> str:
    """The owner of records that a person publishes: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number without an entry in passwd
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def table(account: Account) -> Table:
    rows: list[tuple[str, ...]] = [("published", f"{account.published:,}", "bold"), ("trained", f"{account.trained:,}")]
    rows += [(f"dropped: {reason}", f"{count:,}") for reason, count in account.dropped.items()]
    rows.append(("pending", f"{account.pending:,}"))
    more = {f"of which waiting to be drawn in lane {lane}": f"{count:,}" for lane, count in account.waiting.items()}
    if account.masked:
        more["tokens of the trained that were too old, not trained"] = f"{account.masked:,}"
    for reason, count in account.cancelled.items():
        more[f"episodes stopped, nothing published: {reason}"] = f"{count:,}"
    if account.repeated:
        more["delivered more than once, counted once"] = f"{account.repeated:,}"
    for lane, uses in account.uses.items():
        more[f"uses in lane {lane}"] = f"1 to {max(uses)}" if max(uses) > 1 else "1 each"
    rows += [(name, value, "dim") for name, value in more.items()]
    return two_columns("clean" if account.is_clean else "NOT CLEAN", rows)
