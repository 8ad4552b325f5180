"""Runs one command and ends it, with all it started, when its parent dies, by any signal.

    python -I -S parent_watch.py PIPE_FD PARENT_PID COMMAND ...

It leads a session of its own. PIPE_FD is the read end of a pipe that only the parent holds open: its end, or another
parent process, means the parent is gone, and the whole process group is killed. The command in turn dies with this
process (PR_SET_PDEATHSIG, Linux). SIGTERM and SIGINT are passed on; the exit status is the command's own.
Standard library only, and few modules of it: it starts in 20 ms and stays small.
"""

import os
import select
import signal
import sys

POLL_MS = 300
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; where that is impossible, do nothing."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def spawn(command: list[str], watch_fd: int) -> int:
    """Fork and exec `command` in this process group; 127 if it cannot be run."""
    watcher = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.close(watch_fd)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent(watcher)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def watch(child: int, watch_fd: int, parent: int) -> int:
    """Wait for the command; returns its exit code, negative for a signal. Kills the group if the parent goes first."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number))
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    poll.register(watch_fd, select.POLLIN)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        ready = {fd for fd, _ in poll.poll(POLL_MS)}
        if wake_read in ready:
            os.read(wake_read, 512)
        if watch_fd in ready or os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    watch_fd, parent = int(arguments[0]), int(arguments[1])
    os.set_inheritable(watch_fd, False)
    code = watch(spawn(arguments[2:], watch_fd), watch_fd, parent)
    if code < 0:  # end as the command did, so that its parent sees the same signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
