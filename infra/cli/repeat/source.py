"""Sources of a replay: the folder of a run with its log and store, or an archive of one. Nothing of either is changed.

Guarantee: opening one imports nothing that its settings name, unless it is trusted; from an archive's settings
only SHAPING counts.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from infra.cli.connect import app_store, kafka_folder, reading
from infra.cli.run.roles import model_folder
from infra.cli.settings import DEFAULT_FILE, Settings, load_settings
from infra.ledger.archive import MAX_BYTES, restore_log, unpack
from infra.log.log import Log
from infra.settings.config import Table, decode
from infra.store.store import Store
from schemas.errors import ConfigError

# The tables that decide the result of a step; the other tables hold addresses, and are neither needed nor exported.
SHAPING = ("app", "run", "keep", "policy", "pacing", "trainer")
UNPACKED_MODEL = "model"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


FromOption = Annotated[
    int | None, typer.Option("--from", help="Begin at the newest checkpoint at or before this step.", metavar="STEP")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-plugins", help="Import and call what its settings name and headrace does not ship.")
]
RunArgument = Annotated[
    Path, typer.Argument(help="The folder of a run (or its TOML), or a file that `export` wrote.", metavar="RUN")
]


class ReplaySource(NamedTuple):
    """A run to read. model: folder, or name, of the model it began with."""

    settings: Settings
    log: Log
    store: Store
    model: str

    @property
    def run(self) -> str:
        return self.settings.run or self.settings.app


@asynccontextmanager
async def opened(path: Path, max_bytes: int = MAX_BYTES, *, trusted: bool = False) -> AsyncIterator[ReplaySource]:
    """The run at `path`: its folder, its TOML, or an archive that unpacks to at most `max_bytes`. trusted: a store that its
    settings name and headrace does not ship may be imported.

    Raises ConfigError, BadFrame, BrokerUnavailable.
    """
    if path.suffix != ".toml" and await asyncio.to_thread(path.is_file):
        with tempfile.TemporaryDirectory(prefix="headrace-replay-") as folder:
            unpacking = asyncio.create_task(asyncio.to_thread(unpacked, path, Path(folder), max_bytes))
            try:
                yield await asyncio.shield(unpacking)
            finally:  # a folder that a thread still writes to cannot be removed
                await asyncio.wait([unpacking])
        return
    if not await asyncio.to_thread(path.exists):
        raise ConfigError(f"{path}: no run folder and no archive is there")
    settings = load_settings(path if path.suffix == ".toml" else path / DEFAULT_FILE)
    if settings.store.use and not trusted:
        raise ConfigError(
            f'{settings.folder}: store.use = "{settings.store.use}" would be imported, which headrace does not ship. '
            "--trust-plugins does so, where you know who wrote this run's settings"
        )
    if not settings.kafka.bootstrap_servers and not kafka_folder(settings).is_dir():
        raise ConfigError(f"{settings.folder}: no run was started here; expected its log in {kafka_folder(settings)}")
    async with reading(settings) as log:
        yield ReplaySource(settings, log, app_store(settings), model_folder(settings))


def unpacked(path: Path, folder: Path, max_bytes: int = MAX_BYTES) -> ReplaySource:
    """An archive, unpacked below an empty folder. Raises ConfigError, BadFrame."""
    from infra.store.directory import DirectoryStore

    bundle = unpack(path, folder, max_bytes=max_bytes)
    where = f"{path}: settings"
    settings = decode({name: bundle.settings[name] for name in SHAPING if name in bundle.settings}, Settings, where)
    model = settings.policy.model
    if model != UNPACKED_MODEL and not _HUB_NAME.fullmatch(model):
        raise ConfigError(f'{where}: policy.model: got "{model}", expected "{UNPACKED_MODEL}" or a Hugging Face name')
    settings = msgspec.structs.replace(settings, folder=folder)
    store = DirectoryStore(folder / "store")
    log = restore_log(folder, bundle, settings.app, store, max_bytes=max_bytes)
    return ReplaySource(settings, log, store, model_folder(settings))


def shaping(settings: Settings) -> Table:
    """The settings an archive holds; a model folder is next to them."""
    found: Table = {name: msgspec.to_builtins(getattr(settings, name)) for name in SHAPING}
    if (settings.folder / settings.policy.model).is_dir():
        found["policy"]["model"] = UNPACKED_MODEL
    return found
