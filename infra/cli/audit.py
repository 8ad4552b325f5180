"""`headrace audit`: the account as a table, and an exit code."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from infra.cli.connect import reading
from infra.cli.settings import load_settings
from infra.ledger.account import Account
from infra.ledger.audit import audit

SHOWN_IDS = 5


async def run_audit(config: Path, sets: list[str], as_json: bool) -> int:
    """Print the account; exit code 1 if a promise is broken."""
    settings = load_settings(config, sets)
    console = Console(stderr=as_json, highlight=False)
    async with reading(settings) as log:
        with console.status("reading the log") as status:
            account = await audit(log, settings.run or settings.app, lambda name: status.update(f"reading {name}"))
    if as_json:
        print(msgspec.json.encode(msgspec.to_builtins(account) | {"clean": account.is_clean}).decode())
    else:
        console.print(table(account))
        for title, ids in (("trained twice", account.trained_twice), ("trained, never published", account.unknown)):
            if ids:
                console.print(f"{title}: {', '.join(ids[:SHOWN_IDS])}", style="red")
    return 0 if account.is_clean else 1


def table(account: Account) -> Table:
    """What became of what was published."""
    rows = Table(title="clean" if account.is_clean else "NOT CLEAN", show_header=False)
    rows.add_column()
    rows.add_column(justify="right")
    rows.add_row("published", f"{account.published:,}", style="bold")
    rows.add_row("trained", f"{account.trained:,}")
    for reason, count in account.dropped.items():
        rows.add_row(f"dropped: {reason}", f"{count:,}")
    rows.add_row("pending", f"{account.pending:,}")
    for lane, uses in account.uses.items():
        most = max(uses)
        rows.add_row(f"uses in lane {lane}", f"1 to {most}" if most > 1 else "1 each", style="dim")
    return rows
