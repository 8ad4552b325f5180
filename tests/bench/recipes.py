"""`python -m tests.bench.recipes [--only NAME]`: run the recipes of infra/docs and compare their figures with the pages."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tests.bench.report import ROOT, Row, table

PAGES = ROOT / "infra" / "docs" / "recipes"
RUNS = "runs/recipes"
LIMIT_S = 1500.0  # a row of each page bounds wall_s by 1200
STOP_S = 120.0
TOO_EARLY = "the run ended before this version"
EXPECTED = re.compile(r"^\| `([\w-]+(?: \d+)?)` \| at (least|most) ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def pages() -> dict[str, str]:
    """The recipes by name, in the order in which the README lists them: some continue from an earlier run."""
    listed = re.findall(r"^\| \[.*\]\(([\w-]+)\.md\)", (PAGES / "README.md").read_text(), re.MULTILINE)
    return {name: (PAGES / f"{name}.md").read_text() for name in listed}


def commands(page: str) -> str:
    """A page's first sh block."""
    return str(re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0])


def figure(report: Mapping[str, Any], name: str) -> float | None:
    """A figure of report.json, None if the run ended before its version. "dev 10": accuracy on dev at version 10 or the first
    after it. "users_liked_last 12": the figure of a run that published 12 versions.
    """
    if name == "memory_gb":
        return sum(report["peak_rss_mb"].values()) / 1000
    what, _, version = name.partition(" ")
    found = report["accuracy"][what] if what in report["accuracy"] else [(report["policy_versions"], report[what])]
    return next((value for number, value in found if number >= int(version or 0)), None)


def carried_out(page: str, folder: Path) -> str:
    """Run a page's commands, LIMIT_S in all; returns why they failed, "" if they did not."""
    shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", "-euc", commands(page)], cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(STOP_S)
        return f"not done after {LIMIT_S:g} s"
    return f"exit code {code}" if code else ""


def compared(name: str, page: str) -> Iterator[Row]:
    """Run a recipe; yields a row for each figure that its page expects."""
    folder = ROOT / RUNS / name
    failure = carried_out(page, folder)
    report = {} if failure else json.loads((folder / "report.json").read_text())
    for what, side, bound, _ in EXPECTED.findall(page):
        bounds = {"low" if side == "least" else "high": float(bound)}
        why = failure or (TOO_EARLY if " " in what else "not in report.json")
        yield Row(f"{name}: {what}", None if failure else figure(report, what), why=why, **bounds)


def main(only: Annotated[str, typer.Option(help="Name of a single recipe. Default: all.")] = "") -> None:
    """Run the recipes one after the other; exits with 1 if one fails or a figure is outside its page's bounds."""
    rows = [row for name, page in pages().items() if only in ("", name) for row in compared(name, page)]
    Console(width=120).print(table("recipes", rows))
    raise typer.Exit(not rows or any(row.verdict not in ("met", f"not measured: {TOO_EARLY}") for row in rows))


if __name__ == "__main__":
    typer.run(main)
