"""`headrace forget`: destroys a user's keys first, then tells the log and whoever asked."""

import asyncio
import getpass
from pathlib import Path

import msgspec
from rich.console import Console

from actors.gateway.keys import server_secret
from infra.cli.connect import reading, store_of
from infra.cli.settings import load_settings
from infra.cli.trace import index_of
from infra.ledger.forget import Report, destroy, report, tell
from infra.seal import FRESH_S, Keys
from schemas.errors import ConfigError

SHOWN_STEPS = 20


async def run_forget(user: str, tenant: str, config: Path, sets: list[str], *, as_json: bool) -> int:
    """Forget one user of a tenant. Raises ConfigError where nothing was ever written of them."""
    settings = load_settings(config, sets)
    store = store_of(settings)
    key_ids = await asyncio.to_thread(destroy, Keys(store), tenant, user)
    if not key_ids:
        raise ConfigError(
            f"forget: nothing was written of this user of tenant {tenant!r}, expected the user as requests named them"
            " and the tenant of the API key they came with (`headrace keys list`)"
        )
    secret = await asyncio.to_thread(server_secret, store)
    index = index_of(settings)
    try:
        async with reading(settings) as log:
            about = await tell(log, tenant, user, secret=secret, owner=getpass.getuser())
            await index.refresh(log)
            found = report(index, about, key_ids)
    finally:
        index.close()
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        show(Console(highlight=False, soft_wrap=True), found)
    return 0


def show(console: Console, found: Report) -> None:
    """The report as a person reads it."""
    console.print(
        f"forgotten as {found.about}: {len(found.keys)} keys destroyed, {found.groups} groups cannot be opened"
    )
    console.print(f"roles that looked a key up drop what they hold within {FRESH_S:g} s, counted as forgotten")
    if not found.steps:
        console.print(
            "no step had trained on it: no version has learned from it, and replay loses nothing", style="green"
        )
        return
    more = f" and {len(found.steps) - SHOWN_STEPS} more" if len(found.steps) > SHOWN_STEPS else ""
    console.print(f"trained in steps {', '.join(map(str, found.steps[:SHOWN_STEPS]))}{more}", style="yellow")
    if found.first_version is None:
        console.print("no published version has learned from it yet; the next one will have")
    else:
        console.print(f"versions {found.first_version} to {found.newest_version} have learned from it")
    console.print(
        f"replay reproduces what comes before step {found.steps[0]}, and what follows a checkpoint of step"
        f" {found.replay_from} or later (--from)"
    )
