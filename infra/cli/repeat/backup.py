"""`headrace backup` and `headrace restore`: an app's topics, store and keys, somewhere else and back."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from infra.cli.connect import app_store, broker_address, reading
from infra.cli.options import SettingsFile, command
from infra.cli.settings import Settings
from infra.cli.terminal import Screen, printable
from infra.ledger.backup import committed_offsets, copy_all, open_backup, put_keys
from infra.ledger.backup import restore as put_back
from infra.ledger.bundle import Bundle, StoreWriter, Tell, describe
from infra.log.access import kafka_access
from infra.log.placing import PlacingConnection
from infra.settings.config import duration_s
from infra.store.open import open_store
from infra.store.store import PRIVATE, Store
from schemas.errors import ConfigError
from trainer.journal import checkpoint

FOLLOWS = (
    "The checkpoint that was copied is gone: the trainer has written newer ones. Back up again, into an empty place."
)


@command
async def backup(
    chosen: SettingsFile,
    to: Annotated[str, typer.Argument(help="Empty folder or s3://bucket/prefix.")],
    keys: Annotated[
        str, typer.Option(help="Place for keys: another folder or s3://bucket/prefix. Default: no keys.")
    ] = "",
) -> int:
    """Copy an app, its topics and its store, while it runs.

    After an interruption, use another empty place. Without --keys, a restored app cannot decrypt named users' texts and needs
    new API keys.

    Example: [cyan]headrace backup s3://backups/support-11-23 --keys /safe/support-11-23[/]
    """
    settings = chosen.load()
    store, place = app_store(settings), open_store(to, base=Path.cwd())
    secrets = _apart(keys, to)
    with _telling(f"backup of {settings.app}") as tell:
        shelf = StoreWriter(place, tell)
        private = None if secrets is None else StoreWriter(secrets, tell)
        async with (
            reading(settings) as log,
            PlacingConnection(broker_address(settings), access=kafka_access(settings)) as placing,
        ):
            committed = await committed_offsets(log, await placing.groups(log.group("")))
            newest = await asyncio.to_thread(_newest, settings, store)
            copied = await copy_all(log, store, shelf, committed)
            if newest and newest not in await asyncio.to_thread(_manifests, settings, store):
                raise ConfigError(FOLLOWS)
        if private is not None:
            await asyncio.to_thread(private.copy, store, lambda key: key.startswith(PRIVATE))
            private.finish(msgspec.structs.replace(copied, topics={}, committed={}))
        whole = shelf.finish(copied)
    screen = Screen(stderr=True, soft_wrap=True)
    screen.print(f"{to}: whole, {describe(whole)}", markup=False)
    if secrets is None:
        screen.print(
            "Without keys, sealed texts stay unreadable after a restore: --keys PLACE copies the keys.", markup=False
        )
    return 0


@command
async def restore(
    chosen: SettingsFile,
    source: Annotated[
        str, typer.Argument(help="Complete backup: a folder or s3://bucket/prefix. Default: restore only keys.")
    ] = "",
    keys: Annotated[str, typer.Option(help="Place of the backup's keys.")] = "",
) -> int:
    """Restore a backup into a broker and a store without data of the app.

    Every record gets its offset and time back; the command compares every byte with its hash. Stop all roles first. After an
    interruption, empty the store, delete the topics and run it again. It does not replace existing keys.

    Example: [cyan]headrace restore s3://backups/support-11-23 --keys /safe/support-11-23[/]
    """
    settings = chosen.load()
    store = app_store(settings)
    screen = Screen(stderr=True, soft_wrap=True)
    secrets = _apart(keys, source)
    sealed = open_backup(secrets, settings.app) if secrets is not None else None
    if not source and secrets is None:
        raise ConfigError("restore: got neither a backup nor --keys, expected at least one")
    if source:
        backup = await _restore_data(settings, store, open_store(source, base=Path.cwd()))
        screen.print(f"{settings.app}: restored, {describe(backup)}", markup=False)
    if secrets is not None and sealed is not None:
        count = await asyncio.to_thread(put_keys, store, secrets, sealed)
        screen.print(
            f"{settings.app}: {count:,} keys put back, {sealed.num_objects - count:,} were there", markup=False
        )
    return 0


async def _restore_data(settings: Settings, store: Store, place: Store) -> Bundle:
    backup = open_backup(place, settings.app)
    with _telling(f"restore of {settings.app}") as tell:
        async with (
            reading(settings, create=True) as log,
            PlacingConnection(broker_address(settings), access=kafka_access(settings)) as placing,
        ):
            keep_ms, replication = int(duration_s(settings.keep.replay) * 1000), settings.kafka.replication
            await put_back(log, store, placing, place, backup, keep_ms=keep_ms, replication=replication, tell=tell)
    return backup


def _apart(keys: str, place: str) -> Store | None:
    if not keys:
        return None
    if (place and Path(keys).absolute() == Path(place).absolute()) or keys.rstrip("/") == place.rstrip("/"):
        raise ConfigError(f"--keys {keys}: the place of the backup itself; expected a separate place for keys")
    return open_store(keys, base=Path.cwd())


def _manifests(settings: Settings, store: Store) -> list[str]:
    run = settings.run or settings.app
    return [checkpoint.folder(run, place) for place in checkpoint.places(store, run)]


def _newest(settings: Settings, store: Store) -> str:
    found = _manifests(settings, store)
    return found[-1] if found else ""


@contextmanager
def _telling(title: str) -> Iterator[Tell]:
    console = Screen(stderr=True)
    with console.status(title) as status:
        yield lambda words: status.update(escape(printable(f"{title}: {words}")))
