"""One confined process: bytes in, bytes out, within its limits, and an end that leaves nothing behind.

Guarantees: when `close` returns, every process of the run is gone: the first of its process namespace is killed and
waited for, and the kernel ends a namespace with its first process. Should this process die instead, the sandbox dies
with it. A flood of output ends the run at its limit, and no output beyond it is kept. So does memory: while this process
waits for the run, it checks all processes of the run every LOOK_S.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Literal

from infra.sandbox.command import SandboxLimits
from schemas.errors import SandboxUnavailable

CHUNK_BYTES = 65_536
LOOK_S = 0.02
START_S = 30.0
KILL_S = 30.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
INODE_BYTES = 1280  # of the kernel's memory, for each file and folder of a tmpfs, about
WRITABLE = ("tmp", "dev/shm")
Fault = Literal["", "wall time", "output limit", "memory"]


class SandboxChild:
    """One run, until `close`; not safe for concurrent use. fault: why it was stopped, "" while it was not."""

    def __init__(self, command: list[str], descriptors: Sequence[int], status: int, limits: SandboxLimits) -> None:
        """Start it with `descriptors`. status: read end of the pipe for bubblewrap's status; `close` closes it."""
        self.deadline_s = time.monotonic() + limits.wall_s
        self.fault: Fault = ""
        self.stdout = bytearray()
        self.stderr = bytearray()
        self._limits = limits
        self._pending = b""
        self._words = b""
        self._inner = self._outer = -1  # descriptors of the first process of the namespace, and of bubblewrap
        self._first_pid = 0
        self._looked_s = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={}, cwd="/", bufsize=0, pass_fds=descriptors,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._status = status
        self._in = self._process.stdin
        self._open = {self._process.stdout.fileno(): self.stdout, self._process.stderr.fileno(): self.stderr}
        for descriptor in (self._in.fileno(), *self._open):
            os.set_blocking(descriptor, False)

    def begin(self) -> None:
        """Wait until it runs. Raises SandboxUnavailable."""
        self._outer = os.pidfd_open(self._process.pid)
        if not wait([self._status, self._outer], START_S):
            raise SandboxUnavailable(f"bubblewrap did not start within {START_S:g} s")
        while b"\n" not in self._words and (chunk := os.read(self._status, CHUNK_BYTES)):
            self._words += chunk  # a program that is over by now has its exit code among them
        if (pid := self._said("child-pid")) is not None:
            with suppress(ProcessLookupError):  # it is over already
                self._inner, self._first_pid = os.pidfd_open(pid), pid

    def send(self, data: bytes) -> None:
        """Queue bytes for its standard input; they are written while something is waited for."""
        self._pending += data

    def line(self) -> bytes | None:
        """The next line of its standard output, None where none comes (it ended, or was stopped: see `fault`)."""
        while b"\n" not in self.stdout:
            if not self._step() and b"\n" not in self.stdout:
                return None
        line, _, rest = bytes(self.stdout).partition(b"\n")
        self.stdout[:] = rest
        return line

    def finish(self) -> int | None:
        """Close its input once that is written, wait for its end, and return its exit code; None where it was stopped.

        128 + n means that signal n ended it. Raises SandboxUnavailable where it was never started.
        """
        while self._step(close_input=True):
            pass
        self.close()
        if self.fault:
            return None
        if (code := self._said("exit-code")) is None:
            words = self.stderr.decode(errors="replace").strip()[:300]
            raise SandboxUnavailable(
                f"bubblewrap could not confine the program: {words or 'it ended and printed nothing'}"
            )
        return code

    def close(self) -> None:
        if self._status < 0:
            return
        if self._inner >= 0:
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
            # It need not be our child: its descriptor is readable once it has ended.
            if not wait([self._inner], KILL_S):
                raise SandboxUnavailable(f"a sandbox did not end within {KILL_S:g} s of SIGKILL")
        else:
            self._process.kill()
        self._process.wait(KILL_S)
        if self._inner >= 0:
            os.close(self._inner)
        self._drain()
        for stream in (self._in, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        with open(self._status, "rb") as status:
            self._words += status.read()
        if self._outer >= 0:
            os.close(self._outer)
        self._outer = self._inner = self._status = -1

    def _step(self, close_input: bool = False) -> bool:
        """Wait for something to happen and take it; False once nothing more will."""
        remaining_s = self.deadline_s - time.monotonic()
        if remaining_s <= 0:
            self.fault = self.fault or "wall time"
        if self._inner >= 0 and time.monotonic() >= self._looked_s + LOOK_S:
            if used_bytes(self._first_pid, self._limits.tmp_bytes) > self._limits.total_bytes:
                self.fault = self.fault or "memory"
            self._looked_s = time.monotonic()
        if self.fault:
            return False
        poll = select.poll()
        for descriptor in (*self._open, self._outer):
            poll.register(descriptor, select.POLLIN)
        if self._pending and not self._in.closed:
            poll.register(self._in, select.POLLOUT)
        elif close_input:
            self._in.close()
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(remaining_s, LOOK_S))]
        for descriptor in ready:
            if descriptor in self._open:
                self._read(descriptor)
            elif descriptor != self._outer:
                self._write()
        if self._outer in ready:
            self._drain()
            return False
        return True

    def _write(self) -> None:
        try:
            self._pending = self._pending[os.write(self._in.fileno(), self._pending[:CHUNK_BYTES]) :]
        except (BrokenPipeError, BlockingIOError):  # it has closed its input: unread bytes are not missed
            self._pending = b""

    def _read(self, descriptor: int) -> bool:
        """Take one chunk; False where nothing can be read."""
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        kept = self._open[descriptor]
        room = self._limits.output_bytes - len(kept)
        kept += chunk[:room]
        if len(chunk) > room:
            self.fault = self.fault or "output limit"
        if not chunk:
            del self._open[descriptor]
        return bool(chunk) and not self.fault

    def _drain(self) -> None:
        for descriptor in list(self._open):
            while self._read(descriptor):
                pass

    def _said(self, name: str) -> int | None:
        """A number of bubblewrap's status."""
        return next((said[name] for said in map(json.loads, self._words.splitlines()) if name in said), None)


def used_bytes(pid: int, tmp_bytes: int) -> int:
    """Bytes that a process and all below it hold for themselves, and that the names of its files take in the kernel.

    The contents of files have limits of their own. Memory that a fork shares with its parent is counted for both. A process
    that has ended counts for nothing. A kernel that names no children (built without CONFIG_PROC_CHILDREN) has only the first
    process counted.
    """
    total = 0
    for folder in WRITABLE:
        try:
            found = os.statvfs(f"/proc/{pid}/root/{folder}")
        except OSError:  # it has ended
            continue
        # A larger one is still the host's: the mounts are not made yet.
        if found.f_blocks * found.f_frsize <= tmp_bytes + PAGE_BYTES:
            total += (found.f_files - found.f_ffree) * INODE_BYTES
    left = [pid]
    while left:
        process = Path(f"/proc/{left.pop()}")
        try:
            _, resident, shared, *_ = (process / "statm").read_bytes().split()
            total += max(0, int(resident) - int(shared)) * PAGE_BYTES
            for thread in (process / "task").iterdir():
                left += [int(child) for child in (thread / "children").read_bytes().split()]
        except (FileNotFoundError, ProcessLookupError):  # it has ended, or a thread of it
            continue
    return total
