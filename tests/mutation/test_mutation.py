"""The map of the cores, the list of explained survivors, and the mutants themselves."""

import subprocess
import sys

import pytest

from tests.mutation.mutate import mutants
from tests.mutation.score import ROOT, Survivor, cores, explained, sampled, wilson


def test_the_map_names_cores_and_tests_that_exist() -> None:
    missing = [path for core, tests in cores().items() for path in (core, *tests) if not (ROOT / path).exists()]
    assert not missing


def test_the_list_of_explained_survivors_names_only_mutants_that_still_exist_each_with_its_reason() -> None:
    listed = explained()
    assert {one.core for one in listed} <= set(cores())
    there = {
        Survivor(core=core, function=one.function, was=one.was, becomes=one.becomes)
        for core in {one.core for one in listed}
        for one, _ in mutants((ROOT / core).read_text())
    }
    gone = [
        one
        for one in listed
        if Survivor(core=one.core, function=one.function, was=one.was, becomes=one.becomes) not in there
    ]
    assert not gone
    assert all(one.why for one in listed)


@pytest.mark.full
def test_a_cores_own_code_is_killed_by_no_test_also_where_another_core_was_tried_before() -> None:
    """Both are imported by the tests of the first. Without mutants the tool only runs them on their own code."""
    given = ["streams/collect/decision.py", "streams/collect/needs.py", "--sample", "0"]
    command = [sys.executable, "-m", "tests.mutation.score", *given]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and found.stdout.count(": 0 mutants") == 4, found.stdout + found.stderr


def changes(source: str) -> list[tuple[str, str, str]]:
    return [(one.function, one.was, one.becomes) for one, _ in mutants(source)]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("return a < b", {"return a <= b", "return a >= b", "return None"}),
        ("return a and b", {"return a or b", "return None"}),
        ("return not a", {"return not not a", "return None"}),
        ("x = a + 2", {"x = a - 2", "x = a + 3", "x = a + 1"}),
        ("x = f(a, b, c=d)", {"x = f(b, a, c=d)", "x = f(a, b)"}),
        ("x = [y for y in z if y]", {"x = [y for y in z]"}),
        ("x = min(y)", {"x = max(y)"}),
        ("del x[y]", {"pass"}),
        ("self.x = a", {"pass"}),
        ("raise ValueError('x')", {"pass"}),
        ("x = 'y' if z else True", {"x = 'y~' if z else True", "x = 'y' if not z else True", "x = 'y' if z else False"}),
    ],
)  # fmt: skip
def test_a_mutant_is_one_small_change_of_what_is_decided(was: str, becomes: set[str]) -> None:
    source = f'class A:\n    def f(self):\n        """Words."""\n        {was}\n'
    assert {("A.f", was, one) for one in becomes} == set(changes(source))


def test_what_runs_at_import_is_changed_too_and_words_types_and_imports_are_not() -> None:
    source = '"""Words."""\nfrom a import B\nC = B | int\nclass D(B, frozen=True):\n    """Words."""\n    e: "B" = 1\n'
    assert changes(source) == [("", "e: 'B' = 1", "e: 'B' = 2"), ("", "e: 'B' = 1", "e: 'B' = 0")]


def test_a_sample_is_drawn_evenly_from_a_seed_and_its_share_has_an_interval() -> None:
    every = list(range(100))
    assert sampled(None, 0)(every) == sampled(100, 0)(every) == every
    assert sampled(10, 1)(every) == sampled(10, 1)(every) != sampled(10, 2)(every)
    low, high = wilson(90, 100)
    assert low == pytest.approx(0.826, abs=0.001) and high == pytest.approx(0.945, abs=0.001)
