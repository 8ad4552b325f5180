"""A process in place of a role that a restart cannot fix, for a supervisor that restarts every ended process.

python -I -S stay_down.py CODE      waits for SIGTERM or SIGINT, then ends with this code

It holds nothing of the role: no memory, no card, no port. Its health check fails.
"""

import os
import signal
import sys

VARIABLE = "HEADRACE_STAYS_DOWN"
STOPS = (signal.SIGTERM, signal.SIGINT)


def stay_down(role: str, code: int) -> None:
    """Become the process that waits; does not return."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # kept over exec: a stop from here on waits until it is asked for
    print(f"headrace: a restart cannot fix this: {role} waits for a fix", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, str(code)])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    signal.sigwait(STOPS)
    sys.exit(int(sys.argv[1]))
