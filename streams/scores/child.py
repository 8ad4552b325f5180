"""A child process that answers one line of JSON with another, for work that may hold the interpreter lock for long.

No timeout inside this process would end such work, and no thread beside it would run: so it has a process of its own,
which is killed when it is late.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

START_S = 60.0


class ScoreChild:
    """A process of `module`, started with the first question, again after one that was killed. Safe in several threads.

    Its first line says that it is ready; it ends with its standard input.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._process: _Process | None = _Process(module)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One question, one answer. Raises TimeoutError for one that is late, and where the process ended instead."""
        with self._lock:
            process = self._process = self._process or _Process(self._module)
            try:
                return process.ask(request, timeout_s)
            except (TimeoutError, OSError, ValueError) as error:
                self._process = None
                process.kill()
                raise TimeoutError(str(error)) from error

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.kill()


class _Process:
    def __init__(self, module: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._pending = b""
        self._ready = False

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self._ready:
            self._line(time.monotonic() + START_S)
            self._ready = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s))
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # unsent bytes for a process that is gone
                    continue

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([descriptor], [], [], remaining_s)[0]:
                raise TimeoutError("no verdict in time")
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                raise OSError("the process that was asked ended")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
