"""What a docstring writes after "Example:" can be written: it is evaluated where it is a call of what it documents."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import schemas
from schemas import topics

ROOT = Path(__file__).resolve().parent.parent
WORLD = {**vars(topics), **vars(schemas), "sys": sys, "inf": inf}  # what an example may name beside its own module


def examples() -> Iterator[tuple[str, str]]:
    """(module, expression) of each example that is written out in full."""
    for package in ("schemas", "infra", "streams", "actors", "trainer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                found = re.search(r"Example: (.*?)(?:\n\n|\Z)", ast.get_docstring(node) or "", re.DOTALL)
                text = " ".join(found[1].split()) if found else ""
                if text.startswith(f"{node.name}(") and "…" not in text and "..." not in text:
                    yield ".".join(path.relative_to(ROOT).with_suffix("").parts), text.rstrip(".")


def test_examples_of_docstrings_make_what_they_show() -> None:
    wrong, made = [], 0
    for module, text in examples():
        names: dict[str, Any] = {**WORLD, **vars(importlib.import_module(module))}
        try:
            eval(text, names)
            made += 1
        except NameError:
            pass  # it names something of the reader's, such as a function
        except Exception as error:
            wrong.append(f"{module}: {text}: {error!r}")
    assert not wrong
    assert made > 30
