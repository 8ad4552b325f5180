"""Keeps the indexes of a run up, in this process or in one of its own that takes no processor from a role.

    python -m infra.cli.console.keeping STATE --config FILE [--set NAME=VALUE …]      until its input ends

Folding a busy log is work. A process of its own does it when the machine has nothing else to do (SCHED_IDLE), and the process
of the pages has no part in it. It prints a line of JSON when it has read further; a line of input says that a page was asked
for. On a machine without an idle moment the index falls behind, and the pages say by how much.
"""

import asyncio
import contextlib
import logging
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from infra.cli.connect import connected, log_to_stderr
from infra.cli.console.fold import FOLDED, Folder
from infra.cli.console.index import ConsoleIndex
from infra.cli.look.console_bounds import trim
from infra.cli.settings import Settings, load_settings
from infra.ledger.following import Following
from infra.ledger.index import LogIndex
from infra.local.idle_time import take_idle_time
from infra.log.follower import Follower
from infra.log.log import Log
from infra.settings.config import duration_s
from schemas.errors import HeadraceError, UnknownMajor

LOOKED_S = 3.0  # as often as a page looks
CALM_S = 10.0
MAX_WAIT_S = 15.0
END_S = 10.0  # for the process to end by itself
AGAIN_S = 2.0
FILE = "console.sqlite"
TRACE_FILE = "trace.sqlite"

_log = logging.getLogger(__name__)


class IndexState(msgspec.Struct):
    """How far the indexes are. fault: why the log cannot be read now. left: records still to be folded, by topic. held: that
    the log has. tracing: records that the index of `trace` has still to note, of the topic that it is at. is_caught_up: whether
    all was read that was there at the start. is_traced: whether the index of `trace` has it.
    """

    fault: str = ""
    left: dict[str, int] = {}
    held: dict[str, int] = {}
    tracing: dict[str, int] = {}
    is_caught_up: bool = False
    is_traced: bool = False


class Keeper:
    """Keeps the indexes in the folder `state` up. kept: how far they are. looked: set for each page."""

    def __init__(self, settings: Settings, log: Log, state: Path, kept: IndexState, looked: asyncio.Event) -> None:
        self._run, self._policy = run, policy = settings.run or settings.app, settings.policy.name
        self.kept = kept
        self.looked = looked
        self.index = ConsoleIndex(state / FILE)
        self._log = log
        self._keep_s = duration_s(settings.keep.replay)
        self._folder = Folder(self.index, run=run, policy=policy)
        self._follower = Follower(log, FOLDED)
        self._trace = LogIndex(state / TRACE_FILE, run=run, policy=policy)
        self._following = Following(log, self._trace)

    async def run(self, on_kept: Callable[[], None] = lambda: None) -> None:
        """Fold what comes until cancelled: every LOOKED_S while pages are asked for, else every CALM_S; try again after errors.

        on_kept: called when `kept` has changed.
        """
        wait_s = LOOKED_S
        try:
            while True:
                self.looked.clear()
                try:
                    await self._read_on(on_kept)
                    self.kept.fault, wait_s = "", LOOKED_S
                    self.kept.is_caught_up |= not any(self.kept.left.values())
                except UnknownMajor as error:
                    self.kept.fault, wait_s = f"{error}", 30.0
                except (HeadraceError, sqlite3.Error, OSError) as error:
                    self.kept.fault = f"{type(error).__name__}: {error}"
                    wait_s = min(2 * wait_s, MAX_WAIT_S)
                    _log.warning("console_behind error=%s", error)
                on_kept()
                await asyncio.sleep(wait_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CALM_S - LOOKED_S):
                        await self.looked.wait()
        finally:
            await self._close()

    async def _read_on(self, on_kept: Callable[[], None]) -> None:
        def on_left(topic: str, left: int, held: int) -> None:
            self.kept.left[topic], self.kept.held[topic] = left, held
            if left:
                on_kept()

        if not self.kept.is_traced:
            await self._folder.tell(self._log, on_left)
        if not self.index.is_there():
            _log.warning("index_gone path=%s: it is made again from the log", self.index.path)
            self.index.close()
            self.index = ConsoleIndex(self.index.path)
            self._folder = Folder(self.index, run=self._run, policy=self._policy)
        writes = self.index.is_writer or self.index.take_over()
        if not (writes and self.kept.is_traced and self._trace.is_ordered):
            await self._trace_alone(on_kept)
        if writes:
            await self._following.close()
            await self._folder.refresh(self._log, on_left, self._follower, self._trace)
            await asyncio.to_thread(self._prune)
        else:
            await self._folder.tell(self._log, on_left)

    async def _trace_alone(self, on_kept: Callable[[], None]) -> None:
        """The index of `trace` by itself: at first, since it is a tenth of the work, and where another console folds."""

        def on_read(topic: str, left: int) -> None:
            if not self.kept.is_traced:
                self.kept.tracing = {topic: left}
                on_kept()

        await self._following.read_on(on_read)
        self.kept.tracing = {}
        if not self.kept.is_traced:
            self.kept.is_traced = True
            on_kept()

    def _prune(self) -> None:
        index = self.index
        with index.turn:
            (newest_ms,) = index.database.execute("SELECT max(time_ms) FROM answers").fetchone()
            before_ms = (newest_ms or 0) - int(self._keep_s * 1000)
            index.prune(before_ms)
            trim(index.database, before_ms)

    async def _close(self) -> None:
        await self._follower.close()
        await self._following.close()
        self._trace.close()
        self.index.close()


def keeper_of(state: Path, command: Sequence[str]) -> tuple[str, ...]:
    """What starts the process. command: the arguments that name the run (see `infra.cli.console.serve.command_of`)."""
    return (sys.executable, "-m", "infra.cli.console.keeping", str(state), *command)


async def keep_apart(arguments: Sequence[str], kept: IndexState, looked: asyncio.Event) -> None:
    """Keep the indexes up by a process of its own until cancelled; one that ends, or says what is not understood, is started
    again. kept: set to what the process says.
    """
    wait_s = LOOKED_S
    while True:
        child = await asyncio.create_subprocess_exec(*arguments, stdin=PIPE, stdout=PIPE, start_new_session=True)
        passing = asyncio.create_task(_pass_on(child, looked))
        try:
            assert child.stdout is not None
            async for line in child.stdout:
                try:
                    new = msgspec.json.decode(line, type=IndexState)
                except msgspec.DecodeError as error:
                    _log.error("keeper_said line=%r error=%s", line[:200], error)
                    break  # `_end` ends it
                for name in IndexState.__struct_fields__:
                    setattr(kept, name, getattr(new, name))
                wait_s = LOOKED_S
        finally:
            passing.cancel()
            await _end(child)
        code = child.returncode
        kept.fault = f"the process that keeps the index up has ended with code {code}; the console's log says why"
        _log.warning("keeper_ended code=%d", code)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_WAIT_S)


async def _pass_on(child: Process, looked: asyncio.Event) -> None:
    assert child.stdin is not None
    while True:
        await looked.wait()
        looked.clear()
        child.stdin.write(b"\n")
        with contextlib.suppress(ConnectionError):
            await child.stdin.drain()
        await asyncio.sleep(LOOKED_S)


async def _end(child: Process) -> None:
    """End it by the end of its input; kill it where that does not do."""
    assert child.stdin is not None
    child.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


async def run_keeper(state: Path, settings: Settings) -> None:
    """Keep the indexes up until the end of the input. Raises BrokerUnavailable where the log cannot be reached at all."""
    async with connected(settings, deadline_s=10.0) as log:
        await keep(state, settings, log)


async def keep(state: Path, settings: Settings, log: Log) -> None:
    """`run_keeper` over a log that is open."""
    keeper = Keeper(settings, log, state, IndexState(), asyncio.Event())

    def say() -> None:
        sys.stdout.buffer.write(msgspec.json.encode(keeper.kept) + b"\n")
        sys.stdout.buffer.flush()

    keeping = asyncio.create_task(keeper.run(say))
    listening = asyncio.create_task(_listen(keeper.looked))
    try:
        await asyncio.wait([keeping, listening], return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
    finally:
        listening.cancel()
        while not keeping.done():  # a cancellation can get lost: see `infra.cli.console.leaving`
            keeping.cancel()
            await asyncio.wait([keeping], timeout=AGAIN_S)
        await asyncio.gather(keeping, listening, return_exceptions=True)


async def _listen(looked: asyncio.Event) -> None:
    """Until the end of the input; each line of it is a page that was asked for."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for _ in reader:
        looked.set()


def main(arguments: Sequence[str]) -> int:
    """See the module. Exit code 3 for a run that cannot be read."""
    state, *rest = arguments
    named = dict(zip(rest[::2], rest[1::2], strict=True))
    sets = [value for name, value in zip(rest[::2], rest[1::2], strict=True) if name == "--set"]
    log_to_stderr()
    take_idle_time()
    try:
        asyncio.run(run_keeper(Path(state), load_settings(Path(named["--config"]), sets)))
    except HeadraceError as error:
        _log.error("console_not_kept_up error=%s", error)
        return 3
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
