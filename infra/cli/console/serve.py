"""`headrace console`: the pages over a run, at work or over, until Ctrl-C."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from infra.cli.connect import app_store, log_to_stderr, reading
from infra.cli.console.access import ConsoleAccess
from infra.cli.console.answers import Spell
from infra.cli.console.app import make_app
from infra.cli.console.pages import Console
from infra.cli.console.reading import NotReadYet, Reading
from infra.cli.exit_codes import INTERRUPTED
from infra.cli.look.trace import open_index
from infra.cli.options import SettingsFile, command
from infra.cli.run.roles import shown_host
from infra.cli.run.up import CONSOLE_LINK, CONSOLE_READY, Stopped
from infra.cli.settings import Settings
from infra.files import replace_file
from infra.ledger.index import EVERY_S, follow
from infra.local.http_server import HttpBounds, bound, make_server, serve_on
from infra.local.process import give_way
from infra.log.log import Log
from infra.roles.process import unless
from schemas.errors import HeadraceError

CONSOLE_BOUNDS = HttpBounds(connections=200)
DRAIN_S = 2.0  # at a stop, for the pages that are being made


@command
async def console(chosen: SettingsFile) -> int:
    """Show a run in the browser: flow, curves, answers, versions, data.

    The console reads the log of a running or finished run, like [bold]status[/] and [bold]trace[/]. [bold]headrace up[/] starts
    it too. The printed link gives read access; encrypted texts need a key with the scope unseal.

    Example: [cyan]headrace console -c runs/demo/headrace.toml --set console.listen=127.0.0.1:8401[/]
    """
    give_way(10)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log_to_stderr()
    async with AsyncExitStack() as opened:
        try:
            app, sock = await unless(stop.wait(), _open_pages(opened, chosen), Stopped)
        except Stopped:
            return INTERRUPTED
        server = make_server(app, DRAIN_S, CONSOLE_BOUNDS)
        stopping = asyncio.create_task(stop.wait())
        stopping.add_done_callback(lambda task: server.leave())
        await serve_on(server, sock, lambda port: None)
    return 0


async def _open_pages(opened: AsyncExitStack, chosen: SettingsFile) -> tuple[ASGIApp, socket.socket]:
    """Print the link; returns the application and its socket. opened: exit stack that closes them and the log."""
    settings = chosen.load()
    log, state = await opened.enter_async_context(reading(settings)), settings.folder / "state"
    sock = bound(settings.console.listen, "console.listen")
    opened.callback(sock.close)
    sock.listen()  # a link that is opened at once waits for its page
    given = os.environ.get(CONSOLE_LINK, "")  # `up` knows it and prints it; it must not be in a log
    link = given or secrets.token_urlsafe(24)
    host, port = sock.getsockname()[:2]
    address = f"{shown_host(host)}:{port}"
    where = settings.console.opened_at(address)
    print(f"console {where}" + ("" if given else f"/enter?link={link}"), file=sys.stderr, flush=True)
    print("encrypted texts need a key: headrace keys create --scope unseal", file=sys.stderr)
    if given:
        replace_file(state / CONSOLE_READY, where.encode())
    access = ConsoleAccess(app_store(settings), link)
    run = made(settings, log, state, access=access, command=chosen.arguments, address=address)
    app, known = await opened.enter_async_context(run)
    with contextlib.suppress(NotReadYet):  # it goes on: the first page is read before it is asked for
        await known.status(wait_s=0)
    return app, sock


@asynccontextmanager
async def made(
    settings: Settings,
    log: Log,
    state: Path,
    *,
    access: ConsoleAccess,
    command: Sequence[str],
    address: str,
    every_s: float = EVERY_S,
) -> AsyncIterator[tuple[ASGIApp, Reading]]:
    """The application and its `Reading`. address: its host:port. every_s: seconds between two readings of the
    log into the index, which this process does while no other process does.
    """
    host, port = address.lower().rpartition(":")[::2]
    known, index = Reading(settings, log, state), open_index(settings, state)
    console = Console(known, command, partial(load_speller, settings))
    hosts = ("localhost", "127.0.0.1", "[::1]", host, *settings.console.names)
    app = make_app(console, access, hosts=hosts, port=port, own=settings.console.origin)
    keeping = asyncio.create_task(follow(log, index, every_s=every_s))
    try:
        yield app, known
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await known.close()
        index.close()


def load_speller(settings: Settings) -> Spell | None:
    """A function from token ids to texts; None where the model's tokenizer is not here: then ids are shown."""
    try:
        from streams.spelling import TokenTexts

        return TokenTexts(settings.model_path).texts
    except (ImportError, HeadraceError):
        return None
