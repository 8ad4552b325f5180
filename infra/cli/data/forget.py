"""`headrace forget`: destroys a user's keys first, then publishes that and prints it."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from infra.cli.connect import app_store, reading
from infra.cli.look.audit import operator
from infra.cli.look.trace import open_index
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, print_json
from infra.ledger.forget import ForgetReport, complete, destroy, tell
from infra.store.seal import FRESH_S, Keys
from schemas.errors import ConfigError

SHOWN_STEPS = 20


@command
async def forget(
    chosen: SettingsFile,
    user: Annotated[str, typer.Option(help="User, as named by requests (user or safety_identifier).")],
    tenant: Annotated[str, typer.Option(help="Tenant of the API key of those requests.")] = "default",
    as_json: JsonOption = False,
) -> int:
    """Destroy a user's keys, so that the user's texts cannot be decrypted again, and list the versions that learned from them.

    The roles drop the user's pending and buffered data, with feedback on it and copies of it; a resume from an older checkpoint
    drops it again. The output lists the versions that learned from the user, and the steps that replay can no longer reproduce.
    The log records the event without the user's name. You cannot undo it.

    Example: [cyan]headrace forget --user ann@example.org --tenant acme --json[/]
    """
    if not user:
        raise ConfigError('--user: got "", expected the user as requests named them')
    settings = chosen.load()
    keys = Keys(app_store(settings))
    key_ids = await asyncio.to_thread(destroy, keys, tenant, user)
    secret = await asyncio.to_thread(keys.app_secret)
    index = open_index(settings)
    try:
        async with reading(settings) as log:
            about = await tell(log, tenant, user, secret=secret, owner=operator())
            found = await complete(log, index, keys, about, key_ids)
    finally:
        index.close()
    if not key_ids:
        raise ConfigError(
            f"forget: nothing was written of this user of tenant {tenant!r}, expected the user as requests named them"
            " and the tenant of the API key they came with (`headrace keys list`); texts that a gateway holds because the"
            " store was away stay unreadable: repeat this command once the gateway has sent them"
        )
    print_json(found) if as_json else show(Screen(soft_wrap=True), found)
    return 0


def show(console: Console, found: ForgetReport) -> None:
    console.print(
        f"forgotten as {found.about}: {len(found.keys)} keys destroyed, {found.groups} groups cannot be opened"
    )
    if found.texts:
        console.print(
            f"in {found.texts} sessions, feedback on their answers and turns without their name are unreadable"
        )
    console.print(f"roles that have read a key drop the user's records within {FRESH_S:g} s, counted as forgotten")
    if not found.steps:
        console.print("no step had trained on it: no version learned from it, replay loses nothing", style="green")
        return
    more = f" and {len(found.steps) - SHOWN_STEPS} more" if len(found.steps) > SHOWN_STEPS else ""
    console.print(f"trained in steps {', '.join(map(str, found.steps[:SHOWN_STEPS]))}{more}", style="yellow")
    learned = f"versions {found.first_version} to {found.newest_version} have learned from it"
    console.print("the next published version will have learned from it" if found.first_version is None else learned)
    again = f"those after a checkpoint of step {found.replay_from} or later (--from)"
    console.print(f"replay reproduces the steps before {found.steps[0]}, and {again}")
