"""The repository's own sources as the house rules ask about them: each file is read, parsed and walked once."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Import(NamedTuple):
    """One import. at_top: it runs when its module is imported."""

    path: str
    line: int
    module: str
    at_top: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


@cache
def sources(*folders: str) -> list[Path]:
    found = {
        folder: [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
        for folder in folders
    }
    assert all(found.values()), f"no modules in one of {folders}"
    return sorted(path for paths in found.values() for path in paths)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


class SourceFile(NamedTuple):
    """A source file for the rules: read, parsed and walked once."""

    docstring: str | None
    imports: tuple[Import, ...]
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    calls: tuple[ast.Call, ...]
    reads_numbers: tuple[int, ...]


@cache
def read(path: Path) -> SourceFile:
    module = ast.parse(text_of(path), filename=str(path))
    imports, functions, calls, reads = [], [], [], []
    waiting: list[tuple[ast.AST, bool]] = [(module, True)]
    while waiting:
        node, at_top = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports += imports_of(path, node, at_top)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node)
        elif isinstance(node, ast.Call):
            calls.append(node)
        if _reads_numbers(node):
            reads.append(node.lineno)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        waiting += [(child, at_top and not inside and not types_only) for child in ast.iter_child_nodes(node)]
    return SourceFile(ast.get_docstring(module), tuple(imports), tuple(functions), tuple(calls), tuple(reads))


def _reads_numbers(node: ast.AST) -> bool:
    """`x.gauges[...]` and `x.gauges.get(...)`, and those of counters."""
    is_read = isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "get")
    of = getattr(node, "value", None)
    return is_read and isinstance(of, ast.Attribute) and of.attr in ("gauges", "counters")


def imports_of(path: Path, node: ast.Import | ast.ImportFrom, at_top: bool) -> list[Import]:
    """The imports of one statement; `from package import module` counts as the module where it is one."""
    if isinstance(node, ast.Import):
        named = [alias.name for alias in node.names]
    else:
        named = [full_name(node.module or "", alias.name) for alias in node.names]
    return [Import(name_of(path), node.lineno, name, at_top) for name in named]


@cache
def full_name(module: str, name: str) -> str:
    folder = ROOT.joinpath(*module.split("."))
    return f"{module}.{name}" if (folder / f"{name}.py").exists() or (folder / name).is_dir() else module


def all_imports(*folders: str) -> list[Import]:
    return [one for path in sources(*folders) for one in read(path).imports]
