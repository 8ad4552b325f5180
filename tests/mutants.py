"""Mutants: small changes of a module, each of which a test should notice.

python -m tests.mutants trainer/buffer/pool.py [tests/…] [--sample 50]

Each mutant runs, in a copy of the tree, the tests that name the module (or those given) until the first failure. Survivors are
printed: a change that no test notices.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.own_sources import ROOT

COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COUNTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
TIMEOUT_S = 600


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, the changed statement's text, and the whole source of each mutant."""
    tree = ast.parse(source)
    for at, node in enumerate(ast.walk(tree)):
        for number in range(len(list(changes(node)))):
            changed = deepcopy(tree)
            place = next(other for index, other in enumerate(ast.walk(changed)) if index == at)
            field, value = list(changes(place))[number]
            setattr(place, field, value)
            text = ast.unparse(ast.fix_missing_locations(changed))
            if text != ast.unparse(tree):
                yield getattr(node, "lineno", 0), f"{ast.unparse(node)[:80]} -> {ast.unparse(place)[:80]}", text


def changes(node: Any) -> Iterator[tuple[str, Any]]:
    """Fields of a node with their other values."""
    match node:
        case ast.Compare():
            for at, op in enumerate(node.ops):
                yield "ops", [*node.ops[:at], COMPARED[type(op)](), *node.ops[at + 1 :]]
        case ast.BinOp() | ast.AugAssign() if type(node.op) in COUNTED:
            yield "op", COUNTED[type(node.op)]()
        case ast.BoolOp():
            yield "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.If() | ast.IfExp() | ast.While():
            yield "test", ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension(ifs=[_, *_]):
            yield "ifs", node.ifs[1:]
        case ast.Return(value=ast.expr()):
            yield "value", ast.Constant(None)
        case ast.Constant(value=bool()):
            yield "value", not node.value
        case ast.Constant(value=int() | float()):
            yield "value", node.value + 1
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield "func", ast.Name(SWAPPED[name], ast.Load())


def tests_of(module: Path) -> list[str]:
    """Test files that import the module."""
    dotted = ".".join(module.with_suffix("").parts)
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if dotted in path.read_text()]
    return [path.relative_to(ROOT).as_posix() for path in sorted(found)]


def main(
    module: Path,
    tests: Annotated[list[str] | None, typer.Argument(help="Test files; by default those that import it.")] = None,
    sample: Annotated[int, typer.Option(help="Mutants at most, drawn evenly.")] = 100,
) -> None:
    """Try the mutants of a module, given by its path in the tree."""
    chosen = tests or tests_of(module)
    source = (ROOT / module).read_text()
    every = list(mutants(source))
    drawn = sorted(random.Random(0).sample(range(len(every)), min(sample, len(every))))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    survivors = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for file in listed.splitlines():
            if (ROOT / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, copy / file)
        env = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'infra' / 'sdk'}"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu and not full", *chosen]
        for line, words, text in [(0, "nothing changed", source), *(every[at] for at in drawn)]:
            (copy / module).write_text(text)
            try:
                ran = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue  # an endless loop is noticed
            if text == source and ran.returncode:
                sys.exit(f"the tests fail without a change:\n{ran.stdout[-2000:]}")
            if text != source and not ran.returncode:
                survivors += 1
                print(f"{module}:{line}: {words}", flush=True)
    print(f"{len(drawn) - survivors} of {len(drawn)} mutants were noticed by {', '.join(chosen)}")


if __name__ == "__main__":
    typer.run(main)
