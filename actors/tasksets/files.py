"""Tasks and demonstrations from files, one per row, with columns renamed by the options.

    .parquet       columns as they are
    any other      one JSON object a line

A conversation is `messages` (objects with role and content) or `prompt` (a string: one user message). The id of a row without
an id is a hash of its conversation, and of its answer, response and meta if it has any. Guarantee: a broken row goes to
`on_broken` with file, line and reason, and reading continues; an unreadable file is a ConfigError.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from actors.tasksets.taskset import Demonstration, Preference
from schemas import Task
from schemas.errors import ConfigError

Row = TypeVar("Row", Task, Demonstration, Preference)

BATCH = 64  # rows of a Parquet file that are held at a time
TEXTS = ("id", "answer", "response", "chosen", "rejected")


class Broken(msgspec.Struct, frozen=True):
    """A row that could not be read. where: file and line. reason: the actual and the expected value."""

    where: str
    reason: str


Cells = dict[str, Any]
OnBroken = Callable[[Broken], None]


def raise_broken(broken: Broken) -> None:
    """Raise ConfigError for a broken row: for readers that skip no row."""
    raise ConfigError(f"{broken.where}: {broken.reason}")


def tasks(*, path: str, fields: dict[str, str] | None = None, split: str = "") -> Iterator[Task]:
    """Tasks of a file. Raises ConfigError for a broken row.

    path: JSONL or Parquet file. fields: Column of each field, as {"prompt": "question"}. Default: columns are named like the
    fields. split: Split of rows without a split. "" for none.
    """
    return read_rows(Path(path), Task, fields=fields, split=split)


def read_rows(
    path: Path,
    kind: type[Row],
    *,
    fields: Mapping[str, str] | None = None,
    split: str = "",
    on_broken: OnBroken = raise_broken,
) -> Iterator[Row]:
    """Every row of the file as `kind`.

    fields: our name to the file's, as {"prompt": "question", "meta.level": "level"}. split: of rows without one.
    """
    yield from as_rows(_cells(path), kind, fields=fields, split=split, on_broken=on_broken)


def as_rows(
    cells_found: Iterable[tuple[str, Cells | Broken]],
    kind: type[Row],
    *,
    fields: Mapping[str, str] | None = None,
    split: str = "",
    on_broken: OnBroken = raise_broken,
) -> Iterator[Row]:
    """Each row, with its place, as `kind`; the other parameters as in `read_rows`."""
    for where, cells in cells_found:
        row = cells if isinstance(cells, Broken) else _row(cells, kind, fields or {}, split, where)
        if isinstance(row, Broken):
            on_broken(row)
        else:
            yield row


def _cells(path: Path) -> Iterator[tuple[str, Cells | Broken]]:
    yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_lines(path)


def _parquet_rows(path: Path) -> Iterator[tuple[str, Cells | Broken]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'headrace[tasks]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for cells in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", cells
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: broken behind row {number} ({error}); expected a Parquet file") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Cells | Broken]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _object(line, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected JSONL or Parquet") from error


def _object(line: bytes, where: str) -> Cells | Broken:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Broken(where, f"{error}; expected one JSON object")


def _row(cells: Cells, kind: type[Row], fields: Mapping[str, str], split: str, where: str) -> Row | Broken:
    for ours, theirs in fields.items():
        if theirs not in cells:
            return Broken(where, f"no field {theirs!r}, which {ours} is mapped to; there are {', '.join(cells)}")
    renamed = {ours: cells[theirs] for ours, theirs in fields.items()}
    row = {name: value for name, value in cells.items() if name not in fields.values()}
    for ours, value in renamed.items():
        if ours.startswith("meta."):
            meta = row.get("meta") or {}
            if not isinstance(meta, dict):
                return Broken(where, f"meta: got {type(meta).__name__}, expected an object")
            row["meta"] = {**meta, ours.removeprefix("meta."): value}
        else:
            row[ours] = value
    row = {name: value for name, value in row.items() if value is not None}
    if "messages" not in row and isinstance(prompt := row.pop("prompt", None), str) and prompt:
        row["messages"] = [{"role": "user", "content": prompt}]
    if not row.get("messages"):
        return Broken(where, 'got no conversation, expected "messages" or "prompt"')
    if split:
        row.setdefault("split", split)
    row = {name: _text(value) if name in TEXTS else value for name, value in row.items()}
    row.pop("kind", None)
    try:
        row.setdefault("id", _row_id(row))
        return msgspec.convert({"kind": "task", **row} if kind is Task else row, kind, strict=False)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return Broken(where, str(error))


def _text(value: object) -> object:
    """Ids, answers and responses may be numbers in a file; here they are text."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _row_id(row: Cells) -> str:
    """Depends on the conversation alone where that is all there is: rows of one prompt may have several answers."""
    more = {name: row[name] for name in ("answer", "response", "meta") if row.get(name)}
    told = [row["messages"], more] if more else row["messages"]
    return hashlib.sha256(msgspec.json.encode(told, order="deterministic" if more else None)).hexdigest()[:16]
