"""code: right programs pass, wrong ones do not, and none of the known ways to cheat a grader works."""

import json
from pathlib import Path

import pytest

from streams.scores.code import Code, answer_code, same
from tests.infra.sandbox.confining import sandbox_or_skip
from tests.streams.scores.answers import answered
from tests.streams.scores.cheats import CHEATS, HANGS

CALLS = [{"args": [2, 3], "equals": 5}, {"args": [-4, 1], "equals": -3}, {"args": [0, 0], "equals": 0}]
ADD = json.dumps({"function": "add", "calls": CALLS})
SUM = json.dumps({"runs": [{"stdin": "2 3\n", "stdout": "5\n"}, {"stdin": "-4 1", "stdout": "-3"}]})
LIMITS = {"wall_s": 60.0}


@pytest.fixture(scope="module")
def code() -> Code:
    sandbox_or_skip()
    return Code(limits=LIMITS)


@pytest.fixture(scope="module")
def hasty() -> Code:
    sandbox_or_skip()
    return Code(limits={"wall_s": 1.0})


RIGHT = [
    (ADD, "```python\ndef add(a, b):\n    return a + b\n```"),
    (
        ADD,
        "First try:\n```python\ndef add(a, b): return 0\n```\nNo, rather:\n```py\nadd = lambda a, b: a + b\n```\nDone.",
    ),
    (ADD, "def add(a, b):\n    print('a flood of', a, b)\n    return a + b"),
    (ADD, "def add(a, b): return float(a + b)"),
    (ADD, "import sys\ndef add(a, b): return a + b\nif __name__ == '__main__': sys.exit(add(2, 3))"),
    (ADD, "import numbers, functools\n@functools.cache\ndef add(a, b): return sum([a, b])"),
    (SUM, "a, b = map(int, input().split())\nprint(a + b)"),
    (SUM, "import sys\nprint(sum(map(int, sys.stdin.read().split())), end='  \\n\\n')"),
]
WRONG = [
    (ADD, "def add(a, b): return 5"),
    (ADD, "def add(a, b): return str(a + b)"),
    (ADD, "def add(a, b): return [a + b]"),
    (ADD, "def add(a, b): return (a + b) or False"),
    (ADD, "def add(a, b): return None"),
    (ADD, "def add(a, b): return float('nan')"),
    (ADD, "def plus(a, b): return a + b"),
    (ADD, "def add(a): return a"),
    (ADD, "def add(a, b) return a + b"),
    (ADD, "def add(a, b): raise ValueError"),
    (ADD, "add = 5"),
    (ADD, ""),
    (ADD, "I cannot do that."),
    (ADD, "```python\ndef add(a, b): return a + b\n```\n```python\ndef add(a, b): return a - b\n```"),
    (SUM, "print(5)"),
    (SUM, "print('5 -3')"),
    (SUM, "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)"),
    (SUM, "a, b = map(int, input().split())\nprint('The sum is', a + b)"),
    (SUM, ""),
]


@pytest.mark.parametrize(("tests", "answer"), RIGHT)
def test_right_programs_pass(code: Code, tests: str, answer: str) -> None:
    assert code(answered(answer, tests=tests)) == 1.0


@pytest.mark.parametrize(("tests", "answer"), WRONG)
def test_wrong_programs_do_not(code: Code, tests: str, answer: str) -> None:
    assert code(answered(answer, tests=tests)) == 0.0


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(code: Code, name: str) -> None:
    assert code(answered(CHEATS[name], tests=ADD)) == 0.0


@pytest.mark.parametrize("name", HANGS)
def test_what_never_ends_fails_at_the_deadline(hasty: Code, name: str) -> None:
    assert hasty(answered(HANGS[name], tests=ADD)) == 0.0


def test_the_sandbox_never_sees_tests_or_expected_values(code: Code) -> None:
    found = (
        "import gc\ndef add(a, b):\n    wanted = 'eldeen'[::-1]\n"
        "    return any(wanted in repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, str, bytes)))"
    )
    calls = [{"args": [2, 3], "equals": False}, {"args": [-4, 1], "equals": "needle"}]
    tests = json.dumps({"function": "add", "calls": calls})
    assert Code(limits=LIMITS, partial=True)(answered(found, tests=tests)) == 0.5


def test_partial_gives_the_share_that_passed() -> None:
    sandbox_or_skip()
    partial = Code(partial=True, limits=LIMITS)
    assert partial(answered("def add(a, b): return 5", tests=ADD)) == pytest.approx(1 / 3)
    assert partial(answered("print(5)", tests=SUM)) == 0.5


@pytest.mark.parametrize(
    ("command", "right", "wrong"),
    [
        (["/bin/sh", "{file}"], "read a b\necho $((a + b))", "echo 5"),
        (["/usr/bin/perl", "{file}"], "my ($a, $b) = split ' ', <STDIN>; print $a + $b, qq(\\n);", "print 5"),
    ],
)
def test_other_languages_by_their_command(command: list[str], right: str, wrong: str) -> None:
    sandbox_or_skip()
    if not Path(command[0]).exists():
        pytest.skip(f"no {command[0]} here")
    other = Code(command=command, suffix="txt", limits=LIMITS)
    assert other(answered(right, tests=SUM)) == 1.0
    assert other(answered(wrong, tests=SUM)) == 0.0


def test_without_tests_there_is_no_verdict(code: Code) -> None:
    assert code(answered("def add(a, b): return a + b")) is None


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("{", "expected the JSON of hidden tests"),
        ("{}", "got no calls and no runs"),
        ('{"calls": [{"args": [], "equals": 1}]}', "need the name of a function"),
        ('{"runs": [{"stdin": "1"}]}', "stdout"),
        ('{"function": "f", "call": []}', "unknown field"),
    ],
)
def test_tests_that_cannot_be_read_are_an_error_that_names_them(code: Code, tests: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code(answered("x", tests=tests))


def test_the_last_fenced_block_is_the_code() -> None:
    assert answer_code("a\n```python\nx = 1\n```\nb\n  ```\ny = '```'\n  ```\n") == "y = '```'\n"
    assert answer_code("x = 1") == "x = 1"


@pytest.mark.parametrize(
    ("expected", "got", "equal"),
    [
        (1, 1, True), (1, 1.0, True), (1, True, False), (True, 1, False), (0.3, 0.1 + 0.2, True), (1, 1 + 1e-6, False),
        (10**30, 10**30 + 1, False), ([1, 2], [1, 2, 3], False), ([1, [2]], [1, [2]], True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": [1]}, {"a": [1.0]}, True), (None, None, True), (None, False, False), ("1", 1, False), (0, 0.0, True),
        (1.5, 10**400, False), (float("nan"), float("nan"), False), (1_000_000_007, 1_000_000_007.4, False),
        (1_000_000_007, 1_000_000_007.0, True), (3, 3.0000000000000004, True), (0, 1e-13, True), (10**30, 1e30, True),
        (10**400, 1e300, False), (1_000_000_007.4, 1_000_000_007, True),
    ],
)  # fmt: skip
def test_plain_values_are_compared_by_type_and_value(expected: object, got: object, equal: bool) -> None:
    assert same(expected, got, 1e-9) is equal
