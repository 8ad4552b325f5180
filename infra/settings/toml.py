"""The tables of a settings file, with what the command line sets in them."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infra.settings.config import Table
from schemas.errors import ConfigError


def read_toml(path: Path, sets: Iterable[str] = ()) -> Table:
    """The file's tables with every `--set a.b=c` applied on top; raises ConfigError naming the file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; expected a TOML file") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for setting in sets:
        _apply_set(table, setting)
    if "folder" in table:
        raise ConfigError(f"{path}: folder: unknown key; the folder is where the file lies")
    return table


def _apply_set(table: Table, setting: str) -> None:
    """Put the value of `a.b=c` into `table`: TOML syntax, else a bare string; a number steps into a list."""
    key, equals, value_text = setting.partition("=")
    where = f"--set {setting}"
    if not equals:
        raise ConfigError(f"{where}: got no '=', expected a.b=value")
    try:
        value: Any = tomllib.loads(f"value = {value_text}")["value"]
    except tomllib.TOMLDecodeError:
        value = value_text.strip()
    keys = _split_key(key.strip(), where)
    node: Any = table
    for depth, name in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                table_path = ".".join(keys[:depth])
                raise ConfigError(f"{where}: got {name!r}, expected an index below {len(node)} of {table_path}")
            if last:
                node[int(name)] = value
            else:
                node = node[int(name)]
        elif isinstance(node, dict):
            if last:
                node[name] = value
            else:
                node = node.setdefault(name, {})
        else:
            raise ConfigError(f"{where}: {'.'.join(keys[:depth])} is a value, expected a table")


def _split_key(key: str, where: str) -> list[str]:
    try:
        node: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: got the key {key!r}, expected names joined by dots") from error
    names = []
    while isinstance(node, dict):
        (name, node), *more = node.items()
        if more:
            raise ConfigError(f"{where}: got the key {key!r}, expected names joined by dots")
        names.append(name)
    return names
