"""Compiling a JSON schema in a process first, which is ended if it takes too long: a thread that compiles cannot be.

    schema ──short──────────────────────────────────────> compiled here
       └────long──> process, the same vocabulary ──in time──┘
                       └── not in time: ended, and the schema is refused

The process takes some 500 MB and seconds to start, so it is started when the first long schema comes.

Guarantee: for any schema, its caller has the answer within the deadline, and the next schema finds a process.
"""

import os
import re
import resource
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

import msgspec

from actors.engines.engine import SchemaNotTried, SchemaRefused
from actors.engines.token_spellings import TokenSpellings, make_compiler

SHORT_CHARS = 512  # what is shorter, and has none of SLOW, takes a second or two of a processor over 150,000 tokens too
SLOW = re.compile(r'"(?:pattern|patternProperties|format|m(?:in|ax)(?:Length|Items|Properties))"')
MAX_MORE_BYTES = 2 * 1024**3  # of memory, that a schema may take
DEADLINE_S = 10.0
START_S = 120.0
_SIZE = struct.Struct("<I")
_DONE = b"."


class SchemaCompiler:
    """Says which schemas compile in time. spellings: of the vocabulary. deadline_s: for one schema."""

    def __init__(self, spellings: Sequence[bytes], deadline_s: float = DEADLINE_S) -> None:
        self._spellings = list(spellings)
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._one = threading.Lock()
        self._closed = False

    def check(self, json_schema: str) -> None:
        """Return once it has compiled. Raises SchemaRefused where it takes too long. Blocks; one at a time."""
        if len(json_schema) <= SHORT_CHARS and not SLOW.search(json_schema):
            return
        with self._one:
            for _ in range(2):  # one that ended for reasons of its own is started again
                process = self._process or self._started()
                end = _answer(process, json_schema.encode(), self._deadline_s)
                if end == "done":
                    return
                _end(process)
                self._process = None
                if end == "late":
                    reason = f"it takes longer than {self._deadline_s:g} s to compile"
                    raise SchemaRefused(f"{reason}; a smaller schema does not")
        raise SchemaNotTried("the process that compiles it has ended")

    def close(self) -> None:
        """End the process; a schema that waits for it is refused."""
        self._closed = True
        process = self._process
        if process is not None:
            _end(process)

    def _started(self) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-P", "-m", "actors.engines.judge"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._process = process
        if self._closed or _answer(process, msgspec.msgpack.encode(self._spellings), START_S) != "done":
            _end(process)
            self._process = None
            raise SchemaNotTried("there is no process to compile it in")
        return process


def _answer(process: "subprocess.Popen[bytes]", payload: bytes, wait_s: float) -> Literal["done", "late", "gone"]:
    """Whether the process says within the time that it is done."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(_SIZE.pack(len(payload)) + payload)
        process.stdin.flush()
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(1000 * wait_s):
            return "late"
        return "done" if process.stdout.read(len(_DONE)) == _DONE else "gone"
    except (OSError, ValueError):
        return "gone"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not yet sent
                continue


def _received(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_SIZE.size)
    return stream.read(_SIZE.unpack(head)[0]) if len(head) == _SIZE.size else None


def main() -> None:
    """The process: the vocabulary, then schemas, until its parent closes the pipe."""
    os.nice(5)  # below the processes that serve
    given = _received(sys.stdin.buffer)
    compile_schema = make_compiler(TokenSpellings(msgspec.msgpack.decode(given or b"\x90", type=list[bytes])))
    size = (
        int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize() + MAX_MORE_BYTES
    )
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    while given is not None:
        sys.stdout.buffer.write(_DONE)
        sys.stdout.buffer.flush()
        given = _received(sys.stdin.buffer)
        try:
            compile_schema((given or b"{}").decode())
        except (RuntimeError, MemoryError):  # no schema: said where it is compiled for use
            continue


if __name__ == "__main__":
    main()
