"""`python -m tests.bench NAME [options]`: run a benchmark and print its rows; `--save` keeps them for the reference page.

A benchmark is a module of this folder with a function `run`, whose parameters are the options and which yields rows.
"""

import ast
import functools
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tests.bench.report import described, keep, table


def names() -> dict[str, str]:
    """Every benchmark with what it measures."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name.startswith(("_", "test_")):
            continue
        module = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in module.body):
            found[path.stem.replace("_", "-")] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Run what the first argument names; `all` runs each in a process of its own."""
    known = names()
    name, *options = arguments or [""]
    if name == "all":
        runs = [subprocess.run([sys.executable, "-m", "tests.bench", each, *options], check=False) for each in known]
        return max(run.returncode for run in runs)
    if name not in known:
        print("python -m tests.bench NAME [--save] [options], or all; NAME is one of")
        print("\n".join(f"  {each:10} {about}" for each, about in known.items()))
        return 0 if name in ("", "--help") else 2
    measure(name, options)
    return 0


def measure(name: str, options: list[str]) -> None:
    """Run one benchmark with the options of its `run`."""
    run = importlib.import_module(f"tests.bench.{name.replace('-', '_')}").run
    saves = "--save" in options

    @functools.wraps(run)
    def command(**values: Any) -> None:
        began, load = time.time(), os.getloadavg()[0]
        rows = list(run(**values))
        Console(width=150).print(table(name, rows))
        if saves:
            shown = " ".join(f'"{each}"' if " " in each else each for each in options if each != "--save")
            keep(name, described(f"make bench NAME={name}" + (f' ARGS="{shown}"' if shown else ""), began, rows, load))

    app = typer.Typer(add_completion=False)
    app.command(help=names()[name])(command)
    app([each for each in options if each != "--save"], standalone_mode=True, prog_name=f"python -m tests.bench {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
