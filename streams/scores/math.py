"""math: the final answer equals the reference answer as mathematics (math-verify, in a child process).

Guarantees: only one answer is looked at, the last one given, so listing several gains nothing; an answer that cannot be
compared in time raises TimeoutError and never stops the worker.
"""

import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from typing import Any

from infra.processor import score
from schemas import Experience
from schemas.errors import ConfigError

MAX_ANSWER_CHARS = 2000
START_S = 60.0
_MARKER = re.compile(r"(?:final\s+answer|answer)\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_SYMBOL = re.compile(r"\\?[A-Za-z]{1,8}(?:_\{?\w{1,8}\}?)?(?:\([A-Za-z]\))?")
_WORD = re.compile(r"(?<!\\)\b(?:[A-Za-z]{3,}|it|is|so|or|of|we|be|to|as|by)\b", re.IGNORECASE)
_FORMULA = re.compile(r"[\^_=+*<>\\{}]")


@score(version=1)
class Math:
    """1.0 where the last answer equals the reference, 0.0 where not or where there is none; None without a reference.

    The answer is the last \\boxed{…}; else, in the last line, what follows "answer is" or "answer:"; else that line if
    it is a bare expression, or its only number (a sentence with a formula has none). answer: see
    `Experience.reference`. boxed: only \\boxed{…} counts. timeout_s: of one comparison.
    """

    def __init__(self, *, answer: str = "answer", boxed: bool = False, timeout_s: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("the score math needs math-verify: pip install 'headrace[streams]'")
        self.answer = answer
        self.boxed = boxed
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: _Child | None = _Child()

    def __call__(self, experience: Experience) -> float | None:
        """Compare one answer; raises TimeoutError, and ValueError for a reference that cannot be read."""
        expected = experience.reference(self.answer)
        if expected is None:
            return None
        candidate = final_answer(experience.response, boxed=self.boxed)
        if candidate is None or len(candidate) > MAX_ANSWER_CHARS:
            return 0.0
        gold = str(expected).strip()
        if candidate == gold:
            return 1.0
        return float(all(self.equal(gold, side) for side in _sides(gold, candidate)))

    def equal(self, gold: str, candidate: str) -> bool:
        """Whether two answers are equal as mathematics; raises TimeoutError, ValueError."""
        with self._lock:
            child = self._child = self._child or _Child()
            try:
                reply = child.ask({"gold": gold, "candidate": candidate}, self.timeout_s)
            except (TimeoutError, OSError) as error:
                self._child = None
                child.kill()
                raise TimeoutError(f"comparing {candidate[:80]!r} with {gold[:80]!r}: {error}") from error
        if "error" in reply:
            raise ValueError(str(reply["error"]))
        return bool(reply["equal"])

    def close(self) -> None:
        """End the child; the next call starts another."""
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.kill()


def final_answer(response: str, *, boxed: bool = False) -> str | None:
    r"""The one answer of a response, or None.

    >>> final_answer("so \\boxed{1}, no: \\boxed{\\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> final_answer("The answer is 280.")
    '280'
    >>> final_answer("6, not 5") is None
    True
    """
    inside = _last_boxed(response)
    if inside is not None or boxed:
        return inside
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    if not lines:
        return None
    line = lines[-1]
    markers = list(_MARKER.finditer(line))
    if markers:
        line = line[markers[-1].end() :]
    line = line.strip().rstrip(".!").strip().strip("$*").strip()
    if not _WORD.search(line) and "," not in re.sub(r"(?<=\d),(?=\d{3}\b)|[([{][^)\]}]*[)\]}]", "", line):
        return line or None
    numbers = [] if _FORMULA.search(line) else _NUMBER.findall(line)
    return numbers[0].strip() if len(numbers) == 1 else None


def _sides(gold: str, candidate: str) -> list[str]:
    """What must equal the reference: of 281 = 280 both sides (math-verify looks at the last), of x = 280 the value."""
    if "=" in gold or "=" not in candidate:
        return [candidate]
    sides = [side.strip() for side in candidate.split("=")]
    return [side for side in sides if not _SYMBOL.fullmatch(side)] or [candidate]


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : position].strip()
    return None


class _Child:
    """One process of `math_worker`; not safe for concurrent use."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "streams.scores.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._pending = b""
        self._ready = False

    def ask(self, request: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """One question, one answer; raises TimeoutError, and OSError when the process is gone."""
        if not self._ready:
            self._line(time.monotonic() + START_S)
            self._ready = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = json.loads(self._line(time.monotonic() + timeout_s))
        return reply

    def kill(self) -> None:
        """End the process now and reap it."""
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
                raise OSError("the process that compares answers ended")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line
