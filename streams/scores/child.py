"""A child process that answers one line of JSON with another, for work that may hold the interpreter lock for long.

While a thread holds that lock, no timeout and no other thread of its process runs. So the work has a process of its own, which
the parent kills at the time limit.
"""

import json
import os
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from typing import Any

START_S = 60.0


class ScoreChild:
    """A process of `module`; the first request after a kill starts it again. Safe in several threads.

    The process writes one line when it is ready, and ends when its standard input closes.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._pending, self._is_ready = b"", False
        self._process: subprocess.Popen[bytes] | None = self._start()

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to a request. Raises TimeoutError if it is late or the process ends first."""
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            try:
                if not self._is_ready:
                    self._line(process, START_S)
                    self._is_ready = True
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                reply: dict[str, Any] = json.loads(self._line(process, timeout_s))
                return reply
            except (TimeoutError, OSError, ValueError) as error:
                self._kill()
                raise TimeoutError(str(error)) from error

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._pending, self._is_ready = b"", False
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-P", "-m", self._module]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except BrokenPipeError:  # unsent bytes for a process that is gone
                continue

    def _line(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
        assert process.stdout is not None
        descriptor, deadline_s = process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not wait([descriptor], remaining_s):
                raise TimeoutError("no verdict in time")
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                raise OSError("the process that was asked ended")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
