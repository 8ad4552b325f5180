"""Runs untrusted programs under bubblewrap with a system-call filter, within limits, or not at all.

Guarantees (tests/infra/sandbox and tests/streams/scores/test_code_score.py try each): no network, no host file but a
read-only runtime, no other process, no new privileges, no namespaces of its own, and an end within `wall_s` that leaves
no process. **Fails closed**: without these means, SandboxUnavailable says what to install; nothing runs unconfined.
"""

import os
import platform
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import msgspec

from infra.sandbox.child import Fault, SandboxChild
from infra.sandbox.command import SandboxLimits, confined, is_machine_root, python_executable
from infra.sandbox.seccomp import seccomp_filter
from schemas.errors import SandboxUnavailable

INSTALL = "install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap)"
ADVICE = (
    f"{INSTALL}, and allow it namespaces: run as root with CAP_SYS_ADMIN, or let users have them "
    "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0)"
)
DEFAULT_LIMITS = SandboxLimits()
PROBE = "import os; print(os.getuid(), os.path.exists('/proc/1'))"


class SandboxResult(msgspec.Struct, frozen=True):
    """End of a run. code: 128 + n for signal n, None where `fault` says why it was stopped. stdout, stderr: up to the limit."""

    code: int | None
    fault: Fault
    stdout: bytes
    stderr: bytes


class Sandbox:
    """Confines programs; safe to use from several threads, at most `concurrency` run at once (0: one per CPU).

    readable: further host paths that the program may read (of /tmp too). as_root: by real users instead of a user namespace; by
    default as this process can. Raises SandboxUnavailable where this machine cannot confine.
    """

    def __init__(
        self,
        limits: SandboxLimits = DEFAULT_LIMITS,
        *,
        readable: Sequence[str] = (),
        concurrency: int = 0,
        as_root: bool | None = None,
    ) -> None:
        self.limits = limits
        self.python = python_executable()
        self._readable = tuple(readable)
        self._bwrap = _required()
        self._as_root = is_machine_root() if as_root is None else as_root
        self._filter = seccomp_filter()
        self._free = threading.BoundedSemaphore(concurrency or os.cpu_count() or 1)
        self._probe()

    def python_command(self, *arguments: str) -> list[str]:
        """A Python that sees neither the environment nor installed packages; scripts lie below /program."""
        return [self.python, "-I", "-S", "-B", "-X", "utf8", *arguments]

    def run(
        self, program: Sequence[str], stdin: bytes = b"", files: Mapping[str, bytes] | None = None
    ) -> SandboxResult:
        """Run a program to its end. files: name below /program to content. Raises SandboxUnavailable."""
        with self.open(program, files) as child:
            child.send(stdin)
            code = child.finish()
            return SandboxResult(code, child.fault, bytes(child.stdout), bytes(child.stderr))

    @contextmanager
    def open(self, program: Sequence[str], files: Mapping[str, bytes] | None = None) -> Iterator[SandboxChild]:
        """A program to talk to; it ends with the block. Raises SandboxUnavailable."""
        with self._free:
            status, written = os.pipe()
            descriptors = [written]
            try:
                held = {name: _held(content, descriptors) for name, content in (files or {}).items()}
                seccomp = _held(self._filter, descriptors)
                command = confined(
                    program, bwrap=self._bwrap, limits=self.limits, as_root=self._as_root, files=held,
                    readable=self._readable, seccomp=seccomp, status=written,
                )  # fmt: skip
                child = SandboxChild(command, descriptors, status, self.limits)
            except BaseException:
                os.close(status)
                raise
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            with closing(child):
                child.begin()
                yield child

    def _probe(self) -> None:
        """One run that must work, so that a machine without a sandbox fails before anything waits for a verdict."""
        try:
            finished = self.run(self.python_command("-c", PROBE))
        except (OSError, SandboxUnavailable) as error:
            raise SandboxUnavailable(f"code cannot be confined here: {error}; {ADVICE}") from error
        user, _, sees = finished.stdout.decode().strip().partition(" ")
        if finished.code != 0 or sees != "False" or user in ("", "0"):
            words = finished.stderr.decode(errors="replace").strip()[:300] or finished.fault or f"it printed {user!r}"
            raise SandboxUnavailable(f"code cannot be confined here: {words}; {ADVICE}")


def _required() -> str:
    """Path of bubblewrap, once everything else is there too."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        got = f"{sys.platform} on {platform.machine()}"
        raise SandboxUnavailable(f"the sandbox needs Linux on x86-64, got {got}: its filter knows no other numbers")
    for tool in ("prlimit", "setpriv"):
        if not os.access(f"/usr/bin/{tool}", os.X_OK):
            raise SandboxUnavailable(f"the sandbox needs /usr/bin/{tool}: install util-linux")
    if (found := shutil.which("bwrap")) is None:
        raise SandboxUnavailable(f"no bwrap on PATH: {INSTALL}")
    return found


def _held(content: bytes, descriptors: list[int]) -> int:
    """A descriptor that reads `content`; it is added to `descriptors`, to be closed."""
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    descriptors.append(descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
