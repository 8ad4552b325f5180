"""`headrace forget`: destroys a user's keys first, then publishes that and prints it."""

import asyncio
import getpass
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from infra.cli.connect import app_store, reading
from infra.cli.look.reader import LastHour, newest
from infra.cli.look.trace import open_index
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, print_json
from infra.ledger.forget import ForgetReport, checkpointed, complete, destroy, tell
from infra.log.bus import Partition
from infra.log.log import Log
from infra.settings.config import duration_s
from infra.store.seal import FRESH_S, Keys
from schemas import Batch, Saved
from schemas.errors import ConfigError
from schemas.topics import BATCHES, POLICIES

LAST_RECORDS = 200
LATELY_MS = 30_000
SHOWN_STEPS = 20


@command
async def forget(
    chosen: SettingsFile,
    user: Annotated[str, typer.Option(help="User, as named by requests (user or safety_identifier).")],
    tenant: Annotated[str, typer.Option(help="Tenant of the API key of those requests.")] = "default",
    as_json: JsonOption = False,
    wait: Annotated[str, typer.Option(help='For a checkpoint that holds nothing of it; "" does not wait.')] = "10m",
) -> int:
    """Destroy a user's keys, so that the user's texts cannot be decrypted again, and list the versions that learned from them.

    The roles drop the user's pending and buffered data, with feedback on it and copies of it. If a trainer runs, the command
    ends with the trainer's first checkpoint after that.
    The output lists the versions that learned from the user, and the steps that replay can no longer reproduce.
    The log records the event without the user's name. You cannot undo it.

    Example: [cyan]headrace forget --user ann@example.org --tenant acme --json[/]
    """
    wait_s = wait_seconds(wait)
    settings = chosen.load()
    keys = Keys(app_store(settings))
    key_ids = await asyncio.to_thread(destroy, keys, tenant, user)
    if not key_ids:
        raise ConfigError(
            f"forget: nothing was written of this user of tenant {tenant!r}, expected the user as requests named them"
            " and the tenant of the API key they came with (`headrace keys list`)"
        )
    secret = await asyncio.to_thread(keys.app_secret)
    index = open_index(settings)
    try:
        async with reading(settings) as log:
            about = await tell(log, tenant, user, secret=secret, owner=getpass.getuser())
            found = await complete(log, index, keys, about, key_ids)
            if not as_json:
                show(Screen(soft_wrap=True), found)
            saved = await first_checkpoint(log, settings.run or settings.app, wait_s)
    finally:
        index.close()
    if as_json:
        table = msgspec.to_builtins(found) | {"checkpoint": saved.step if saved is not None else None}
        print_json(table)
    elif wait_s:
        none = f"none within {wait}, or no trainer runs; a resume from an older one drops it again"
        shown = none if saved is None else f"step {saved.step}"
        Screen(soft_wrap=True).print(f"checkpoint without it: {shown}")
    return 0


def wait_seconds(wait: str) -> float:
    """Seconds of --wait. Raises ConfigError."""
    try:
        return duration_s(wait) if wait else 0.0
    except ConfigError as error:
        raise ConfigError(f"--wait: {error}") from error


async def first_checkpoint(log: Log, run: str, wait_s: float, *, known_s: float = FRESH_S) -> Saved | None:
    """The first checkpoint behind all that was trained on while a key was known, None if there is none in that time.

    known_s: for how long a role may still know a key. Where no trainer runs there is nothing to wait for: none is made.
    """
    if not wait_s or not await trains(log):
        return None
    since = (await log.bus.end_offsets(log.name(BATCHES)))[Partition(log.name(BATCHES), 0)]
    (order,) = await newest(log, POLICIES, 1)  # our own word, by the broker's clock
    await asyncio.sleep(known_s)
    last = [
        message.value
        for message in await newest(log, BATCHES, LAST_RECORDS)
        if isinstance(message.value, Batch | Saved)
    ]
    if last and isinstance(last[-1], Saved) and last[-1].run == run:
        return last[-1]  # nothing was trained on since
    try:
        async with asyncio.timeout(wait_s):
            return await checkpointed(log, run, since, not_before_ms=order.timestamp_ms + round(known_s * 1000))
    except TimeoutError:
        return None


async def trains(log: Log) -> bool:
    """True if a trainer has reported lately, by the broker's clock."""
    (order,) = await newest(log, POLICIES, 1)  # our own word
    last = [spoken.reports[-1] for spoken in (await LastHour(log).spoken()).values()]
    return any(
        report.role == "train" and report.life != "ended" and order.timestamp_ms - 1000 * at_s < LATELY_MS
        for report, at_s in last
    )


def show(console: Console, found: ForgetReport) -> None:
    console.print(
        f"forgotten as {found.about}: {len(found.keys)} keys destroyed, {found.groups} groups cannot be opened"
    )
    if found.texts:
        console.print(
            f"what was written in {found.texts} sessions about their answers, or without their name, cannot be read any more"
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
