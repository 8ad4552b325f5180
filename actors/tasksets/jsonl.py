"""Tasks and demonstrations from JSON Lines: one object per line, fields renamed as the options say.

A conversation is `messages` (objects with role and content) or `prompt` (a string: one user message). A task without an
id gets a hash of its conversation, so that the same line is the same task everywhere. What is wrong is a ConfigError
that names file and line; nothing is skipped.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.taskset import Demonstration
from schemas import Task
from schemas.errors import ConfigError

Row = TypeVar("Row", Task, Demonstration)

_MAX_LINE_BYTES = 16 * 1024 * 1024


def jsonl(*, path: str, fields: dict[str, str] | None = None, split: str = "") -> Iterator[Task]:
    """Tasks of a file. fields: our name to the file's, as {"prompt": "question"}. split: of rows without one."""
    return read_rows(Path(path), Task, fields=fields or {}, split=split)


def demonstrations(*, path: str, fields: dict[str, str] | None = None, split: str = "") -> Iterator[Demonstration]:
    """Demonstrations of a file; options as for `jsonl`, and "response" among the fields."""
    return read_rows(Path(path), Demonstration, fields=fields or {}, split=split)


def read_rows(path: Path, kind: type[Row], *, fields: Mapping[str, str], split: str) -> Iterator[Row]:
    """Every line of the file as `kind`."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(line, kind, fields, split, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a JSON Lines file") from error


def _row(line: bytes, kind: type[Row], fields: Mapping[str, str], split: str, where: str) -> Row:
    if len(line) > _MAX_LINE_BYTES:
        raise ConfigError(f"{where}: got a line of {len(line)} bytes, expected at most {_MAX_LINE_BYTES}")
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}; expected one JSON object") from error
    for ours, theirs in fields.items():
        if theirs not in row:
            raise ConfigError(f"{where}: no field {theirs!r}, which fields.{ours} names; there are {', '.join(row)}")
        row[ours] = row.pop(theirs)
    if "messages" not in row and isinstance(prompt := row.pop("prompt", None), str):
        row["messages"] = [{"role": "user", "content": prompt}]
    if not row.get("messages"):
        raise ConfigError(f'{where}: got no conversation, expected "messages" or "prompt"')
    if split:
        row.setdefault("split", split)
    _to_text(row)
    row.setdefault("id", _id_of(row["messages"]))
    row.pop("kind", None)
    try:
        return msgspec.convert({"kind": "task", **row} if kind is Task else row, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _to_text(row: dict[str, Any]) -> None:
    """Ids, answers and responses may be numbers in a file; here they are text."""
    for name in ("id", "answer", "response"):
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            row[name] = str(value)


def _id_of(messages: object) -> str:
    return hashlib.sha256(msgspec.json.encode(messages)).hexdigest()[:16]
