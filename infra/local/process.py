"""Starting a process so that neither it nor anything it started outlives this one.

Guarantee: no Python process that is started here imports a module from the current folder.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"  # Python then leaves the current folder out of sys.path
WATCH = Path(__file__).with_name("parent_watch.py")


class Watched:
    """A process group that ends when this process does; built by `start_watched`.

    `process.pid` leads the group: signals sent to it reach the command, its exit status is the command's.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: int) -> None:
        self.process = process
        self._pipe = pipe

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill_group(self) -> None:
        """SIGKILL everything that is left of the group, also after its leader has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def release(self) -> None:
        """Close the pipe; call once after the process has ended."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def start_watched(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    stderr: int = subprocess.STDOUT,
) -> Watched:
    """Start `argv` under `parent_watch`, its output appended to `log`. `env` is added to this process's own. stderr: PIPE to
    read it as it comes.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WATCH), str(read_end), str(os.getpid()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=stderr,
                env={**os.environ, SAFE_PATH: "1", **(env or {})},
                cwd=cwd,
                pass_fds=(read_end, *pass_fds),
                start_new_session=True,
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Watched(process, write_end)


def give_way(nice: int) -> None:
    """Let this process and its children give way to the roles: nice 19 in their idle time, 10 for work that people wait for.

    Linux shares processors among sessions first (sched(7), "The autogroup feature"), so the session gets the value too if this
    process or its watcher leads it.
    """
    with contextlib.suppress(OSError):
        os.nice(nice)
        if os.getsid(0) in (os.getpid(), os.getppid()) and not os.isatty(0):  # no shell of a person is in it
            Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")
