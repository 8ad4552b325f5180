"""`headrace recover`: continues a run whose log or store was lost, as far as that is possible.

Guarantee: nothing changes if log and store belong together, if the log has steps of its own, or before the user agrees.
"""

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console

from infra.cli.connect import app_store, create_topics, reading
from infra.cli.look.audit import operator
from infra.cli.options import SettingsFile, command
from infra.log.log import Log
from infra.roles.identity import Fit, fit_of
from infra.settings.config import Floor
from infra.store.store import Store
from schemas import Batch, topics
from schemas.errors import ConfigError
from trainer.journal import checkpoint
from trainer.journal.checkpoint import Checkpoint
from trainer.journal.recover import restart_journal
from trainer.state import StoredState

STORE_LOST = """\
The weights, the optimizer's state, large frames and users' keys lay in the store alone; no log brings them back.
- With a backup: put it back under [store] url and start the roles. What was trained since is executed again.
- Without: name another `app` (its topics begin empty) and a [store] url that is empty, start it, and load tasks and
  demonstrations again. The old topics stay where they are, for `headrace audit` and `headrace peek` with the old name."""


@command
async def recover(chosen: SettingsFile, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> int:
    """Continue after the loss of the log's data, or show what you can do.

    If the log is lost and the store exists, a new journal starts from the newest checkpoint. The command first lists the losses
    and asks. If log and store belong together, it changes nothing.

    Example: [cyan]headrace recover -c support/headrace.toml[/]
    """
    settings = chosen.load()
    store = app_store(settings)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    async with reading(settings, create=True) as log:
        await create_topics(log, settings)
        return await recover_log(log, store, settings, console, agreed=yes)


async def recover_log(log: Log, store: Store, floor: Floor, console: Console, *, agreed: bool) -> int:
    """Compare log and store, print the losses, ask, and begin a new journal. agreed: do not ask. Raises ConfigError where
    nothing can be recovered.
    """
    fit = await fit_of(log, store, floor)
    reason = fit.fault.partition(": ")[0]
    if not reason:
        console.print("The log and the store belong together: there is nothing to recover.")
        return 0
    console.print(f"{reason}.")
    if fit.verdict == "store lost":
        console.print(STORE_LOST)
        return 1
    found = await newest(log, store, floor)
    console.print(plan(found, fit, floor))
    if not agreed and not ask():
        console.print("Nothing was changed.")
        return 1
    state = await restart_journal(log, store, floor, found, owner=operator())
    console.print(
        f"A new journal begins after step {state.position.step}; the first trainer publishes version "
        f"{state.position.version}. Start the roles, then load tasks and demonstrations again."
    )
    return 0


async def newest(log: Log, store: Store, floor: Floor) -> Checkpoint:
    """State to continue from. Raises ConfigError where the log has steps of its own, or the store no checkpoint."""
    run = floor.run or floor.app
    async for message in log.scan(topics.BATCHES):
        if isinstance(message.value, Batch) and message.value.run == run:
            raise ConfigError(
                f'run "{run}": this log has steps of its own (step {message.value.step} at journal offset '
                f"{message.offset}), and {store!r} belongs to another one: name the broker or the store that belongs to "
                "it in [kafka] or [store]; nothing was changed"
            )
    found = await asyncio.to_thread(checkpoint.load_newest, store, run, take=StoredState.verified)
    if found is None:
        raise ConfigError(
            f'run "{run}": no checkpoint in {store!r} verifies, so there is nothing to go on from; give [store] url an '
            "empty place to begin from the configured model"
        )
    return found


def plan(found: Checkpoint, fit: Fit, floor: Floor) -> str:
    position = found.position
    waits = len(found.references)
    rest = "" if fit.here is None else "What this log holds already stays in it and will be learned from.\n"
    return (
        f"Kept: weights and optimizer after step {position.step} (version {position.version}), users' keys, API keys.\n"
        f"Lost with the old log: everything after that step; {waits} groups that waited to be trained; answers and "
        "feedback that were on their way; tasks and demonstrations (load them again); audit, trace and replay of all "
        "steps so far; what the gate decided.\n"
        f"{rest}"
        f'To go on, a new journal is begun in the log of app "{floor.app}" from that checkpoint. Checkpoints of before '
        "are removed, since they fit no log any more. Stop all roles first."
    )


def ask() -> bool:
    if not sys.stdin.isatty():
        print("headrace: recover: no terminal to ask on; give --yes to go on", file=sys.stderr)
        return False
    return input("Begin a new journal? [y/N] ").strip().lower() in ("y", "yes")
