"""Mutation testing of the pure cores: does a test fail for every small change of what decides?

    python -m tests.mutation.score [CORE …] [--sample N --seed S]

A core's tests (`cores.json`) are imported once and run once; then every mutant gets a process of its own, forked from
there, in which the changed function has its new code, and the tests that enter that function run, the quickest first,
until one fails. A change of what runs at import imports everything anew. First the core's own code is put in both ways:
where a test fails for that, nothing is measured. Hypothesis draws few examples, always the same; what survives them meets
each Hypothesis test with its own number. A mutant under which a test takes more than ten times as long, and some seconds,
counts as killed. Explained survivors are in `survivors.json`, and run like the others.

Prints what survives and nobody explained, and a line for each core; ends with 1 where there is any such.
"""

import argparse
import ast
import functools
import gc
import math
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import hypothesis
import msgspec
import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.mutate import Mutant, mutants

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OWN = tuple(f"{ROOT}/{name}/" for name in ("actors", "infra", "schemas", "streams", "trainer", "tests"))
EXAMPLES = 20
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:warnings", "-m", "not slow", "--no-header", "-r", "N")
SPARE_S = 30  # of wall time, beyond ten times what a test took: for a mutant that waits for ever
SPARE_CPU_S = 3  # the same of processor time: for one that never ends
IMPORT_S = 20  # for the imports of a process that imports anew
SPARE_BYTES = 2 << 30
LruCache = type(functools.lru_cache(lambda: None))
Functions = dict[str, list[FunctionType]]
Changes = list[tuple[FunctionType, CodeType]]
Chosen = Callable[[list[int]], list[int]]
Tell = Callable[[Mutant, str], None]


class Survivor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A mutant no test can or need tell from the core, and why. core: its path. The rest as in Mutant."""

    core: str
    function: str
    was: str
    becomes: str
    why: str = ""


def cores() -> dict[str, list[str]]:
    """Core → its test files, by their paths."""
    return msgspec.json.decode((HERE / "cores.json").read_bytes(), type=dict[str, list[str]])


def explained() -> list[Survivor]:
    """The list of those that are known to survive."""
    return msgspec.json.decode((HERE / "survivors.json").read_bytes(), type=list[Survivor])


class Core:
    """A pytest plugin that runs a core's tests against its mutants instead of once."""

    def __init__(self, path: str, tests: Sequence[str], chosen: Chosen, tell: Tell) -> None:
        self.path, self.tests, self.chosen, self.tell = path, tests, chosen, tell
        self.file = str(ROOT / path)
        self.module = path.removesuffix(".py").replace("/", ".")
        self.fates: list[tuple[Mutant, str]] = []
        self.items: list[Any] = []
        self.costs: dict[int, float] = {}
        self.entered: dict[str, set[int]] = {}
        self.caches: list[Any] = []  # what a function remembers would hide that it has changed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = session.items
        if session.testsfailed or not self.items:
            raise pytest.UsageError(f"{self.path}: its tests cannot be imported")
        most = {at: _use_examples(item, EXAMPLES) for at, item in enumerate(self.items)}
        every = {at: examples for at, examples in most.items() if examples > EXAMPLES}
        self._run_once()
        source = Path(self.file).read_text(encoding="utf-8")
        wanted = set(self.chosen(list(range(sum(1 for _ in mutants(source))))))
        gc.unfreeze()  # what an earlier core froze: the garbage collector does not list it
        functions = _functions(self.file)
        self.caches = [one for one in gc.get_objects() if type(one) is LruCache and one.__module__ == self.module]
        gc.freeze()
        self._check(source, functions)
        for number, (mutant, tree) in enumerate(mutants(source)):
            if number in wanted:
                fate = self._fate(mutant, tree, functions, {})
                if fate == "survived" and every:
                    fate = self._fate(mutant, tree, functions, every)
                self.fates.append((mutant, fate))
                self.tell(mutant, fate)
        return True

    def _run_once(self) -> None:
        """Every test passes; remembers its cost and which functions of the core it enters."""
        for at, item in enumerate(self.items):
            names: set[str] = set()

            def note(frame: Any, _: str, __: Any, names: set[str] = names) -> None:
                if frame.f_code.co_filename == self.file:
                    names.add(frame.f_code.co_qualname.partition(".<")[0])

            start = time.perf_counter()
            sys.settrace(note)
            try:
                passed = _passes(item)
            finally:
                sys.settrace(None)
            self.costs[at] = time.perf_counter() - start
            if not passed:
                raise pytest.UsageError(f"{item.nodeid} fails without a mutant")
            for name in names:
                self.entered.setdefault(name, set()).add(at)

    def _check(self, source: str, functions: Functions) -> None:
        """The core's own code survives, put in as that of a mutant is: else a mutant might be killed by that alone."""
        names = sorted({mutant.function for mutant, _ in mutants(source)} & self.entered.keys())
        changes = [one for name in names for one in self._changes(name, ast.parse(source), functions)]
        runs = {at: _Run(self.costs[at], EXAMPLES) for at in sorted(self.costs, key=self.costs.__getitem__)}
        for fate in (
            _forked(lambda: self._run_changed(changes, runs)),
            _forked(lambda: self._run_anew(self._compiled(ast.parse(source)), runs)),
        ):
            if fate != "survived":
                raise pytest.UsageError(f"{self.path}: its tests fail when they run again ({fate})")

    def _compiled(self, tree: ast.Module) -> CodeType:
        return compile(ast.fix_missing_locations(tree), self.file, "exec", dont_inherit=True)

    def _changes(self, name: str, tree: ast.Module, functions: Functions) -> Changes:
        """A function, everywhere it is held, and its code in the tree."""
        return list(zip(functions[name], _codes(self._compiled(tree), name), strict=True))

    def _fate(self, mutant: Mutant, tree: ast.Module, functions: Functions, every: dict[int, int]) -> str:
        """every: tests and their numbers of examples, where only these are to run; all run with few where it is empty."""
        numbers: Iterable[int] = self.entered.get(mutant.function, ()) if mutant.function else self.costs
        if not numbers:
            return "never run"
        wanted = sorted((at for at in numbers if not every or at in every), key=self.costs.__getitem__)
        if not wanted:
            return "survived"
        runs = {at: _Run(self.costs[at] * every.get(at, EXAMPLES) / EXAMPLES, every.get(at, EXAMPLES)) for at in wanted}
        if not mutant.function:
            code = self._compiled(tree)
            return _forked(lambda: self._run_anew(code, runs))
        changes = self._changes(mutant.function, tree, functions)
        return _forked(lambda: self._run_changed(changes, runs))

    def _run_changed(self, changes: Changes, runs: dict[int, "_Run"]) -> bool:
        for function, changed in changes:
            function.__code__ = changed
        for one in self.caches:
            one.cache_clear()
        for at, run in runs.items():
            _use_examples(self.items[at], run.examples)
            self.items[at]._initrequest()
            _limit(run.cost_s)
            if not _passes(self.items[at]):
                return False
        return True

    def _run_anew(self, code: CodeType, runs: dict[int, "_Run"]) -> bool:
        own = [name for name, module in sys.modules.items() if _place(module).startswith(OWN)]
        for name in own:
            if name != "__main__" and not name.startswith("tests.mutation"):
                del sys.modules[name]
        sys.meta_path.insert(0, _Changed(self.module, self.file, code))
        _limit(IMPORT_S)
        anew = _Anew({self.items[at].nodeid: run for at, run in runs.items()})
        return pytest.main([*OPTIONS, *self.tests], plugins=[anew]) == 0


class _Run(NamedTuple):
    """A test to run: what it is expected to take, and with how many examples."""

    cost_s: float
    examples: int


class _Anew:
    """A pytest plugin that runs some of the tests, in a given order."""

    def __init__(self, runs: dict[str, _Run]) -> None:
        self.runs = runs
        self.places = {name: place for place, name in enumerate(runs)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((one for one in items if one.nodeid in self.runs), key=lambda one: self.places[one.nodeid])
        for item in items:
            _use_examples(item, self.runs[item.nodeid].examples)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> None:
        _limit(self.runs[item.nodeid].cost_s)


class _Changed(MetaPathFinder, Loader):
    """Imports one module from given code."""

    def __init__(self, name: str, file: str, code: CodeType) -> None:
        self.name, self.file, self.code = name, file, code

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, origin=self.file) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


def _use_examples(item: Any, most: int) -> int:
    """Let a Hypothesis test draw at most so many examples, the same each time; how many it drew before, 0 for no such."""
    test = getattr(item, "obj", None)
    used = getattr(test, "_hypothesis_internal_use_settings", None)
    if used is None:
        return 0
    test._hypothesis_internal_use_settings = hypothesis.settings(
        used, max_examples=most if most > EXAMPLES else min(most, used.max_examples), derandomize=True, database=None,
        deadline=None, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    return used.max_examples


def _passes(item: Any) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _functions(file: str) -> Functions:
    """A module's functions by name, in the order they stand; also those behind properties and decorators."""
    found: dict[tuple[str, int], list[FunctionType]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename == file:
            found.setdefault((one.__code__.co_qualname, one.__code__.co_firstlineno), []).append(one)
    by_name: Functions = {}
    for (name, _), functions in sorted(found.items(), key=lambda pair: pair[0]):
        by_name.setdefault(name, []).extend(functions[:1])
    return by_name


def _codes(code: CodeType, name: str) -> Iterator[CodeType]:
    """A module's code of the functions of that name, in the order they stand."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_qualname == name:
                yield const
            elif name.startswith(f"{const.co_qualname}."):
                yield from _codes(const, name)


def _place(module: ModuleType) -> str:
    """A module's file, or the folder of a package that has none: it holds its modules too."""
    folders = getattr(module, "__path__", None) or [""]
    return getattr(module, "__file__", None) or f"{next(iter(folders))}/"


def _limit(cost_s: float) -> None:
    """From now on this process has ten times so long, and some more."""
    signal.setitimer(signal.ITIMER_REAL, SPARE_S + 10 * cost_s)
    signal.setitimer(signal.ITIMER_PROF, SPARE_CPU_S + 10 * cost_s)


def _forked(run: Callable[[], bool]) -> str:
    """What became of it in a process of its own: "killed", "survived", "too long"."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES, held + SPARE_BYTES))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1), os.dup2(null, 2)
            code = 0 if run() else 1
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGALRM, signal.SIGPROF, signal.SIGKILL):
        return "too long"
    return "survived" if status == 0 else "killed"


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    z, share = 1.96, hits / n
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def sampled(size: int | None, seed: int) -> Chosen:
    """All, or `size` of them drawn evenly."""
    return lambda numbers: (
        numbers if size is None or size >= len(numbers) else random.Random(seed).sample(numbers, size)
    )


def tried(path: str, tests: Sequence[str], chosen: Chosen, tell: Tell) -> list[tuple[Mutant, str]]:
    """The fate of a core's mutants. Raises SystemExit where its tests fail without any."""
    core = Core(path, tests, chosen, tell)
    with tempfile.TemporaryDirectory() as folder:
        status = pytest.main([*OPTIONS, "--basetemp", f"{folder}/base", *tests], plugins=[core])
    if status not in (0, 5):
        sys.exit(f"{path}: its tests fail without a mutant")
    return core.fates


def summary(path: str, fates: Sequence[tuple[Mutant, str]], is_known: Callable[[Mutant], bool]) -> tuple[str, int]:
    """A core's line of the table, and how many survived that nobody explained."""
    alive = [one for one, fate in fates if is_alive(fate)]
    new = sum(not is_known(one) for one in alive)
    killed, late = len(fates) - len(alive), sum(fate == "too long" for _, fate in fates)
    low, high = wilson(killed, max(1, killed + new))
    return (
        f"{path}: {len(fates)} mutants, {killed} killed ({late} took too long), {len(alive) - new} explained, {new} not: "
        f"{killed / max(1, killed + new):.1%} of the others killed (95 % interval {low:.1%} to {high:.1%})"
    ), new


def is_alive(fate: str) -> bool:
    return fate in ("survived", "never run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("core", nargs="*", help="paths; all of cores.json by default")
    parser.add_argument("--sample", type=int, help="mutants per core; all by default")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.chdir(ROOT)
    known = {(one.core, one.function, one.was, one.becomes) for one in explained()}
    out = os.fdopen(os.dup(1), "w", buffering=1)  # pytest keeps what is printed while it runs
    table, unexplained = [], 0
    for path in given.core or cores():

        def is_known(one: Mutant, path: str = path) -> bool:
            return (path, one.function, one.was, one.becomes) in known

        def tell(one: Mutant, fate: str, path: str = path, is_known: Callable[[Mutant], bool] = is_known) -> None:
            if is_alive(fate) and not is_known(one):
                where = f"{path}:{one.line} in {one.function}" if one.function else f"{path}:{one.line} at import"
                print(f"{where}: {fate}\n    - {one.was}\n    + {one.becomes}", file=out)

        line, new = summary(path, tried(path, cores()[path], sampled(given.sample, given.seed), tell), is_known)
        print(line, file=out)
        table.append(line)
        unexplained += new
    print("\n".join(["", *table]), file=out)
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
