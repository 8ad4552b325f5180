"""Runs one command and ends it, with all it started, when its parent dies, by any signal.

    python -I -S parent_watch.py PIPE_FD PARENT_PID COMMAND ...

It leads a session of its own. PIPE_FD is the read end of a pipe that only the parent holds open: its end, or another
parent process, means that the parent is gone, and the whole process group is killed. SIGTERM and SIGINT are passed on; the
exit status is the command's own. Standard library only, and few modules of it: it starts in 20 ms and stays small.
"""

import os
import select
import signal
import sys

POLL_S = 0.3
PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def watch(command: list[str], watch_fd: int, parent: int) -> int:
    """Run the command; returns its exit code, negative for a signal, 127 if it cannot be run."""
    os.set_inheritable(watch_fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until they can be passed on
    try:
        child = os.posix_spawnp(command[0], command, os.environ, setsigmask=())
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
        return 127
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([ended, watch_fd], [], [], POLL_S)
        if watch_fd in ready or os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        if ended in ready:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(arguments: list[str]) -> None:
    code = watch(arguments[2:], int(arguments[0]), int(arguments[1]))
    if code < 0:  # end as the command did, so that its parent sees the same signal
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
