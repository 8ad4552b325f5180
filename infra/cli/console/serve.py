"""`headrace console`: the pages over a run, until Ctrl-C. The run may be at work, over, or an archive of `headrace export`."""

import asyncio
import contextlib
import os
import secrets
import socket
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from infra.cli.connect import log_to_stderr, reading, store_of
from infra.cli.console.access import ConsoleAccess
from infra.cli.console.answers import Spell
from infra.cli.console.app import make_app
from infra.cli.console.keeping import FILE, IndexState, Keeper, keep_apart, keeper_of
from infra.cli.console.learning import Run
from infra.cli.console.leaving import Leaving
from infra.cli.console.page import Pages
from infra.cli.console.reading import NotReadYet, Reading
from infra.cli.exit_codes import INTERRUPTED
from infra.cli.look.console_bounds import read_only
from infra.cli.repeat.source import opened
from infra.cli.settings import DEFAULT_FILE, Settings, load_settings
from infra.local.http_server import HttpBounds, bound, make_server, serve_on
from infra.log.log import Log
from infra.store.store import Store
from schemas.errors import ConfigError, HeadraceError

CONSOLE_BOUNDS = HttpBounds(connections=200)
LINK_VARIABLE = "HEADRACE_CONSOLE_LINK"  # in the environment: what the printed link says, made by `up`


async def run_console(config: Path, sets: list[str], listen: str) -> int:
    """Serve until SIGINT or SIGTERM; exit code 130 where one came before there were pages. Raises ConfigError, BadFrame,
    BrokerUnavailable.
    """
    leaving = Leaving()
    log_to_stderr()
    try:
        async with source_of(config, sets) as source:
            leaving.check()
            await _serve_source(source, command_of(config, sets), listen, leaving)
    except asyncio.CancelledError:
        if not leaving.is_asked:
            raise
        return INTERRUPTED
    return 0


async def _serve_source(
    source: tuple[Settings, Log, Store, Path], command: Sequence[str], listen: str, leaving: Leaving
) -> None:
    settings, log, store, state = source
    sock = bound(listen or settings.console.listen, "console.listen")
    sock.listen()  # a link that is opened at once waits for its page
    given = os.environ.get(LINK_VARIABLE, "")  # whoever set it knows it, and it must not be in a log
    link = given or secrets.token_urlsafe(24)
    address = f"{shown_host(sock)}:{sock.getsockname()[1]}"
    where = settings.console.opened_at(address) + ("" if given else f"/enter?link={link}")
    print(f"console {where}", file=sys.stderr, flush=True)
    print("this link only looks; to act sign in with a key: headrace keys create --scope operate", file=sys.stderr)
    # An archive lies in this process alone, and no role is at work beside it.
    keeper = partial(keeper_of, command=command) if command else None
    access = ConsoleAccess(store, link)
    run = made(settings, log, state, access=access, command=command, address=address, keeper=keeper)
    async with run as (app, known):
        with contextlib.suppress(NotReadYet):  # it goes on: the first page is read before it is asked for
            await known.status(wait_s=0)
        leaving.check()
        await serve(app, sock, leaving)


@asynccontextmanager
async def source_of(config: Path, sets: Sequence[str]) -> AsyncIterator[tuple[Settings, Log, Store, Path]]:
    """Settings, log and store of a run or an archive, and the folder where its indexes lie."""
    if config.suffix != ".toml" and await asyncio.to_thread(config.is_file):
        async with opened(config) as archive:
            await archive.log.create_topics(partitions=1, keep_ms=-1)
            yield archive.settings, archive.log, archive.store, archive.settings.folder / "state"
        return
    settings = load_settings(config if config.suffix == ".toml" else config / DEFAULT_FILE, sets)
    async with reading(settings) as log:
        yield settings, log, store_of(settings), settings.folder / "state"


def command_of(config: Path, sets: Sequence[str]) -> tuple[str, ...]:
    """The arguments by which another command reads the same run with the same settings; none for an archive.

    >>> command_of(Path("runs/demo"), ["app=mine"])
    ('--config', 'runs/demo/headrace.toml', '--set', 'app=mine')
    """
    if config.suffix != ".toml":
        if config.is_file():
            return ()
        config /= DEFAULT_FILE
    return ("--config", str(config), *(argument for one in sets for argument in ("--set", one)))


@asynccontextmanager
async def made(
    settings: Settings,
    log: Log,
    state: Path,
    *,
    access: ConsoleAccess,
    command: Sequence[str],
    address: str,
    keeper: Callable[[Path], Sequence[str]] | None = None,
) -> AsyncIterator[tuple[ASGIApp, Reading]]:
    """The application and what it reads, kept up inside the `with`. access: its doors. address: host:port that it
    is asked for. keeper: what starts a process of its own that keeps it up in a folder (see `keep_apart`), None for this one.
    """
    host, port = address.lower().rpartition(":")[::2]
    with tempfile.TemporaryDirectory(prefix="headrace-console-") as spare:
        folder = state if writable(state) else Path(spare)
        kept, looked = IndexState(), asyncio.Event()
        reading = Reading(settings, log, folder, kept, looked)
        pages = Pages(reading, access, command, beside_of(settings))
        pages.load_spell = partial(speller_of, settings)
        hosts = ("localhost", "127.0.0.1", "[::1]", host, *settings.console.names)
        app = make_app(pages, access, hosts=hosts, port=port, own=settings.console.origin)
        if keeper is not None:
            kept_up = keep_apart(keeper(folder), kept, looked)
        else:
            kept_up = Keeper(settings, log, folder, kept, looked).run()
        try:
            async with beside(kept_up):
                yield app, reading
        finally:
            await reading.close()
            for _, database in pages.beside:
                database.close()


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Work that runs inside the `with`, and ends with it. Where the work breaks, so does the `with`, by the same error."""
    within = asyncio.current_task()
    task = asyncio.create_task(work)
    broke = False

    def end(done: "asyncio.Task[None]") -> None:
        nonlocal broke
        if not done.cancelled() and within is not None:
            broke = True
            within.cancel()

    task.add_done_callback(end)
    try:
        yield
    finally:
        if broke and within is not None:
            within.uncancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def serve(app: ASGIApp, sock: socket.socket, leaving: Leaving) -> None:
    """Answer until a signal."""
    server = make_server(app, 2.0, CONSOLE_BOUNDS)
    with leaving.ending(server.leave):
        await serve_on(server, sock, lambda port: None)


def shown_host(sock: socket.socket) -> str:
    """The host of an address to open, in brackets where it is IPv6."""
    host = str(sock.getsockname()[0])
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]" if ":" in host else host


def writable(folder: Path) -> bool:
    """Whether the indexes can lie there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def beside_of(settings: Settings) -> list[Run]:
    """The indexes of the runs that are drawn beside this one. Raises ConfigError for one that was never looked at."""
    found: list[Run] = []
    for name in settings.console.beside:
        path = settings.folder / name / "state" / FILE
        try:
            found.append((Path(name).name, read_only(path)))
        except sqlite3.Error as error:
            raise ConfigError(
                f"console.beside: {name}: no index in {path}: run `headrace console` on that run once"
            ) from error
    return found


def speller_of(settings: Settings) -> Spell | None:
    """What token ids are as text; None where the model's tokenizer is not here: then ids are shown."""
    try:
        from infra.model.spelling import TokenTexts

        return TokenTexts(settings.model_path).texts
    except (ImportError, HeadraceError):
        return None
