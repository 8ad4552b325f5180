"""Contents of the wheel: everything below one name, `headrace`, so that it collides with no other `infra` or `schemas`.

In the repository `infra.log` is a folder at the top; where it is installed it is `headrace.infra.log`. The build copies the
sources and puts the prefix before the names of modules: in imports, and in strings that are such a name as a whole, as
behind `python -m`. An editable install uses the repository unchanged.
"""

import ast
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("actors", "infra", "schemas", "streams", "trainer")


class Below(BuildHookInterface):  # type: ignore[type-arg]
    """The hook that hatchling calls around the build of a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Copy the packages of the wheel into a folder of their own."""
        if version != "editable":
            self.made = Path(tempfile.mkdtemp())
            copy_below(Path(self.root), self.made / "headrace")
            build_data["force_include"][str(self.made / "headrace")] = "headrace"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.made)


def copy_below(root: Path, folder: Path) -> None:
    """The packages of a repository, without caches, as they are installed in `folder`."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "sdk")
    shutil.copytree(root / "infra" / "sdk" / "headrace", folder, ignore=unwanted)
    for package in PACKAGES:
        shutil.copytree(root / package, folder / package, ignore=unwanted)
    for path in folder.rglob("*.py*"):
        path.write_bytes(renamed(path.read_bytes(), root))


def renamed(source: bytes, root: Path) -> bytes:
    """The source of a module with the names of our modules below `headrace`."""
    lines = source.splitlines(keepends=True)
    for line, column in sorted(_places(ast.parse(source), lines, root), reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + b"headrace." + text[column:]
    return b"".join(lines)


def _places(tree: ast.Module, lines: list[bytes], root: Path) -> Iterator[tuple[int, int]]:
    """Line and column of each name that gets the prefix. Raises ValueError for one that cannot have it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            yield node.lineno, node.col_offset + len("from ")
        elif isinstance(node, ast.Import) and any(alias.name.partition(".")[0] in PACKAGES for alias in node.names):
            raise ValueError(f"got `{ast.unparse(node)}`, expected `from … import …`")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_module(node.value, root):
            quoted = lines[node.lineno - 1][node.col_offset :]
            if not quoted.startswith((f'"{node.value}"'.encode(), f"'{node.value}'".encode())):
                raise ValueError(f"got {quoted!r}, expected {node.value} in plain quotes")
            yield node.lineno, node.col_offset + 1


def _is_module(text: str, root: Path) -> bool:
    names = text.split(".")
    if names[0] not in PACKAGES or len(names) == 1 or not all(name.isidentifier() for name in names):
        return False
    place = root.joinpath(*(names[:-1] if names[-1][:1].isupper() else names))
    return place.is_dir() or place.with_suffix(".py").is_file()
