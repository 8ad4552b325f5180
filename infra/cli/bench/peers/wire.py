"""How the processes of the benchmark of transports speak to each other; nothing of headrace and nothing that has to be
installed, for it runs in the environment of the peers too.

A reader's process reads `check N` or `go N` from stdin, line by line. It has its sender send the N answers, makes arrays of
all of them, and says so in a line of JSON: `digest` of what it holds (of `check` alone) and the seconds it took.
"""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


def told_rounds() -> Iterable[tuple[str, int]]:
    """Commands and numbers from stdin, until it ends."""
    for line in sys.stdin:
        what, _, number = line.partition(" ")
        yield what, int(number)


def serve(read: Callable[[int], list[tuple[str, Any, Any]]]) -> None:
    """The reader's side. read: has N answers sent, and returns the id, tokens and logprobs of each, as arrays."""
    say({"ready": True})
    for what, number in told_rounds():
        begin = time.perf_counter()
        answers = read(number)
        wall_s = time.perf_counter() - begin
        say({"wall_s": wall_s, "answers": len(answers), "digest": digest(answers) if what == "check" else ""})


def digest(answers: list[tuple[str, Any, Any]]) -> str:
    """A hash of ids, tokens and logprobs, whatever their order. Tokens as uint32, logprobs as float32."""
    found = hashlib.sha256()
    for name, tokens, logprobs in sorted(answers, key=lambda one: one[0]):
        assert str(tokens.dtype) == "uint32" and str(logprobs.dtype) == "float32", (tokens.dtype, logprobs.dtype)
        found.update(f"{name} {len(tokens)} {len(logprobs)} ".encode() + tokens.tobytes() + logprobs.tobytes())
    return found.hexdigest()


def say(what: dict[str, Any]) -> None:
    """One line for the parent process."""
    print(json.dumps(what), flush=True)


class Sender:
    """A process that sends as many as a number on its stdin says."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"{command}: ended before it was ready")

    def go(self, number: int) -> None:
        """Have it send so many; returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"go {number}\n")
        self._process.stdin.flush()
