"""Runs a program's command in the sandbox: of all networks it reaches the policy's address alone, of all files its own folders.

    episode ─> Sandbox (a thread of its own waits) ─> actors.program.inside ─> command
                                                       └── Unix socket ─> actors.program.site

Guarantees: no network but the policy's address; no host file but its folders, read-only, and a system's runtime; when the
episode ends, however it does, so has every process of it; memory and output are bounded. Where that cannot be had, the role
does not start.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.program import inside
from actors.program.inside import joined_to
from actors.program.launch import ProgramInput, in_thread_of_its_own, printed, variables
from actors.rollout.workflow import EpisodeFailed
from infra.sandbox.child import SandboxChild
from infra.sandbox.command import PROGRAM, SandboxLimits
from infra.sandbox.sandbox import Sandbox
from infra.settings.config import Section, Table, decode
from schemas.errors import ConfigError, SandboxUnavailable

SCRIPT = "inside.py"
ADDRESS = f"http://127.0.0.1:{inside.PORT}"
MEBIBYTE = 1024 * 1024
# A program ends with its episode (`explore.episode_timeout_s`); a JavaScript engine reserves far more memory than it uses.
LIMITS = SandboxLimits(
    wall_s=30 * 86_400.0, cpu_s=86_400, memory_bytes=1024 * 1024 * MEBIBYTE, total_bytes=2048 * MEBIBYTE, processes=512,
    open_files=1024, file_bytes=256 * MEBIBYTE, tmp_bytes=256 * MEBIBYTE,
)  # fmt: skip
AT_ONCE = 65_536  # `explore.episodes_in_flight` bounds them


class Confinement(Section, frozen=True):
    """Confinement of a command. folders: what it may read beside the system's programs and this Python's library: its own
    folder, and those of its packages. limits: fields of `infra.sandbox.command.SandboxLimits`; of memory, processes and files
    there is more by default than there.

    Example: Confinement(folders=("agent", ".venv/agents"))
    """

    folders: tuple[str, ...] = ()
    limits: Table = msgspec.field(default_factory=dict)


class Confined:
    """A sandbox for one command. Raises ConfigError."""

    def __init__(self, options: Confinement) -> None:
        asked = decode({**msgspec.structs.asdict(LIMITS), **options.limits}, SandboxLimits, "program.sandbox.limits")
        folders = [path for folder in options.folders for path in _readable(folder)]
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")  # which this user alone enters
        self._socket = str(Path(self._folder.name) / "policy.sock")
        self._server: asyncio.Server | None = None
        folders.append(f"{sys.base_prefix}/bin")  # an environment's python is a link to one of there
        try:
            self._sandbox = Sandbox(asked, readable=(*folders, self._socket), concurrency=AT_ONCE, sockets=True)
        except SandboxUnavailable as error:
            raise ConfigError(f"program.sandbox: {error}") from error
        self._script = Path(inside.__file__).read_bytes()

    async def run(self, command: Sequence[str], access: ProgramInput, environment: Mapping[str, str], port: int) -> Any:
        """Run the command; its result as of `run_command`. port: of the policy on the loopback. Raises EpisodeFailed."""
        await self._lead(port)
        inner = msgspec.structs.replace(access, base_url=ADDRESS)
        first = {"command": command, "folder": os.getcwd(), "environment": {**environment, **variables(inner)}}
        given = msgspec.json.encode(first) + b"\n" + msgspec.json.encode(access.task) + b"\n"
        running: list[SandboxChild] = []
        stopping = asyncio.Event()

        def work() -> Any:
            start = self._sandbox.python_command(f"{PROGRAM}/{SCRIPT}", self._socket)
            with self._sandbox.open(start, {SCRIPT: self._script}) as child:
                running.append(child)
                if stopping.is_set():
                    child.expire()
                child.send(given)
                code = child.finish()
                if code is None:
                    raise EpisodeFailed("agent", f"{command[0]} was stopped: {child.fault}")
                return printed(command, code, bytes(child.stdout), bytes(child.stderr))

        waiting = asyncio.create_task(in_thread_of_its_own(work))
        try:
            return await asyncio.shield(waiting)
        except SandboxUnavailable as error:
            raise EpisodeFailed("environment", str(error)) from error
        except asyncio.CancelledError:
            stopping.set()
            for child in running:
                child.expire()
            await asyncio.wait([waiting])  # it is over within a moment, and nothing is left behind then
            raise

    async def _lead(self, port: int) -> None:
        """Lead the socket to this port of the loopback until the event loop ends; again is fine."""
        server = self._server
        if server is not None and server.is_serving() and server.get_loop() is asyncio.get_running_loop():
            return
        joined = joined_to(lambda: asyncio.open_connection("127.0.0.1", port))
        self._server = await asyncio.start_unix_server(joined, self._socket, backlog=1024)
        os.chmod(self._socket, 0o666)  # a program in a sandbox is another user


def _readable(folder: str) -> list[str]:
    """The whole path of a folder that a program in the sandbox can read, and where it leads as a link. Raises ConfigError."""
    path = Path(folder).absolute()
    if not path.is_dir():
        raise ConfigError(f'program.sandbox.folders: got "{folder}", expected a folder (looked at {path})')
    if os.geteuid() == 0 and path.stat().st_mode & 0o005 != 0o005:
        raise ConfigError(
            f"program.sandbox.folders: {path} is its owner's alone, expected one that everyone can read: where root explores, "
            f"a sandbox runs programs as another user (chmod -R o+rX {path})"
        )
    return [str(path), str(path.resolve())]
