"""Score of programs by hidden tests, run in `infra.sandbox` and graded outside of it.

Guarantees: tests and expected values never enter the sandbox, and its output is bytes, decoded as plain JSON or compared as
text in this process. So a program gains nothing by changing its own process. Without a sandbox the score does not load; a run
that could not be confined is an error, never a verdict.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from infra.chain.processor import score
from infra.sandbox.command import PROGRAM, SandboxLimits
from infra.sandbox.sandbox import Sandbox
from infra.settings.config import decode
from schemas import Experience
from schemas.errors import ConfigError

MAX_CODE_CHARS = 200_000
CHILD = Path(__file__).with_name("code_child.py")
MAX_RESPONSE_CHARS = 1_000_000
WHOLE_TOLERANCE = 1e-6  # absolute: how far a result with a fraction may be from an expected whole number, however large
_OPENS = re.compile(r"[ \t]*+```[^`]*+")
_CLOSES = re.compile(r"[ \t]*+```[ \t]*+")


class CallCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the function.

    equals: the JSON value it has to return. args: in order. kwargs: by name.

    Example: CallCase(equals=5, args=[2, 3])
    """

    equals: Any
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class RunCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the program.

    stdout: expected output, but for spaces at the ends of lines. stdin: input. arguments: of its command line.

    Example: RunCase(stdin="2 3\\n", stdout="5\\n")
    """

    stdout: str
    stdin: str = ""
    arguments: list[str] = []


class HiddenTests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tests of one task: calls of one function, or runs of the whole program, or both.

    function: its name, "" where there are no calls. calls: all in one process. runs: each in a process of its own.

    Example: HiddenTests(function="add", calls=(CallCase(equals=5, args=[2, 3]),))
    """

    function: str = ""
    calls: tuple[CallCase, ...] = ()
    runs: tuple[RunCase, ...] = ()


@score(version=2)
class Code:
    """1.0 if the last code block of the response passes all tests in meta[tests], else 0.0. None without tests.

    meta[tests] is JSON: {"function": "add", "calls": [{"args": [2, 3], "equals": 5}]}, or for programs {"runs": [{"stdin": "2
    3", "stdout": "5"}]}. All calls share a process; each run has its own. Without a fenced block the whole response is the
    code.

    tests: Key in meta of the hidden tests. partial: Whether the score is the share of passed tests. command: Command that runs
    a program, with {file} for its path (["perl", "{file}"], ["sh", "-c", "g++ -o /tmp/a {file} && /tmp/a"]). Default: Python;
    calls are for Python only. suffix: File name suffix of the program. tolerance: Relative tolerance of numbers with a
    fraction; whole numbers have a tolerance of 1e-6. limits: Resource limits of each process, see
    `infra.sandbox.command.SandboxLimits`. readable: Host paths that programs may read. concurrency: Maximum concurrent runs. 0:
    one per CPU. The step's timeout_s includes the wait for a free run.
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        partial: bool = False,
        command: list[str] | None = None,
        suffix: str = "py",
        tolerance: float = 1e-9,
        limits: Mapping[str, Any] | None = None,
        readable: list[str] | None = None,
        concurrency: int = 0,
    ) -> None:
        if command is not None and not any("{file}" in word for word in command):
            raise ConfigError(f"command: got {command}, expected {{file}} in it, where the program's path goes")
        self.tests = tests
        self.partial = partial
        self.command = command
        self.tolerance = tolerance
        self._file = f"answer.{suffix}"
        held = decode(dict(limits or {}), SandboxLimits, "limits")
        self.sandbox = Sandbox(held, readable=readable or (), concurrency=concurrency)
        self._child = CHILD.read_bytes()

    def __call__(self, experience: Experience) -> float | None:
        written = experience.meta.get(self.tests)
        if written is None:
            return None
        hidden = self._hidden(str(written))
        response = experience.response
        code = answer_code(response) if len(response) <= MAX_RESPONSE_CHARS else ""
        if len(code) > MAX_CODE_CHARS or not code.strip():
            return 0.0
        total = len(hidden.calls) + len(hidden.runs)
        passed = self._passed_calls(code, hidden) if hidden.calls else 0
        if self.partial or passed == len(hidden.calls):
            passed += self._passed_runs(code, hidden)
        return passed / total if self.partial else float(passed == total)

    def _hidden(self, written: str) -> HiddenTests:
        try:
            hidden = msgspec.json.decode(written, type=HiddenTests)
        except msgspec.DecodeError as error:
            raise ValueError(f"meta.{self.tests}: {error}, expected the JSON of hidden tests") from error
        if not hidden.calls and not hidden.runs:
            raise ValueError(f"meta.{self.tests}: got no calls and no runs, expected one or more")
        if hidden.calls and (not hidden.function or self.command is not None):
            raise ValueError(f"meta.{self.tests}: calls need the name of a function, and Python")
        return hidden

    def _passed_calls(self, code: str, hidden: HiddenTests) -> int:
        files = {"child.py": self._child, "answer.py": code.encode("utf-8", "replace")}
        passed = 0
        with self.sandbox.open(self.sandbox.python_command(f"{PROGRAM}/child.py"), files) as child:
            child.send(json.dumps({"function": hidden.function}).encode() + b"\n")
            for index, call in enumerate(hidden.calls):
                child.send(json.dumps({"index": index, "args": call.args, "kwargs": call.kwargs}).encode() + b"\n")
                line = child.line()
                if line is None:
                    break
                right = same(call.equals, replied(line, index), self.tolerance)
                passed += right
                if not right and not self.partial:
                    break
        return passed

    def _passed_runs(self, code: str, hidden: HiddenTests) -> int:
        path = f"{PROGRAM}/{self._file}"
        python = self.sandbox.python_command(path)
        program = python if self.command is None else [word.replace("{file}", path) for word in self.command]
        files = {self._file: code.encode("utf-8", "replace")}
        passed = 0
        for run in hidden.runs:
            finished = self.sandbox.run([*program, *run.arguments], run.stdin.encode(), files)
            right = finished.code == 0 and _lines(finished.stdout.decode("utf-8", "replace")) == _lines(run.stdout)
            passed += right
            if not right and not self.partial:
                break
        return passed


class _Nothing:
    """Not a JSON value: equal to none."""


def replied(line: bytes, index: int) -> object:
    """The value of a reply to call `index`; for any other line an object that equals no JSON value."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return _Nothing()
    if not isinstance(reply, dict) or reply.get("index") != index or "value" not in reply:
        return _Nothing()
    return reply["value"]


def same(expected: object, got: object, tolerance: float) -> bool:
    """Compare two plain JSON values: no truth values among numbers, fractions within the tolerance, and within
    WHOLE_TOLERANCE where a whole number is expected.

    >>> same([1, 2.0], [1, 2], 1e-9), same(1, True, 1e-9), same(0.3, 0.1 + 0.2, 1e-9)
    (True, False, True)
    """
    if isinstance(expected, bool) or isinstance(got, bool):
        return isinstance(expected, bool) and isinstance(got, bool) and expected == got
    if isinstance(expected, int) and isinstance(got, int):
        return expected == got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        try:
            if isinstance(expected, int) and abs(got - expected) > WHOLE_TOLERANCE:
                return False
            return math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        except OverflowError:
            return False
    if isinstance(expected, list) and isinstance(got, list):
        pairs = zip(expected, got, strict=False)
        return len(expected) == len(got) and all(same(wanted, given, tolerance) for wanted, given in pairs)
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same(expected[key], got[key], tolerance) for key in expected)
    return type(expected) is type(got) and expected == got


def answer_code(response: str) -> str:
    """The last fenced block, or the whole response without one. Each line is looked at once."""
    lines = response.split("\n")
    block = None
    opened = -1
    for index, line in enumerate(lines):
        if opened >= 0 and _CLOSES.fullmatch(line):
            block, opened = (opened, index), -1
        elif opened < 0 and _OPENS.fullmatch(line):
            opened = index + 1
    if block is None:
        return response
    return "".join(f"{line}\n" for line in lines[slice(*block)])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
