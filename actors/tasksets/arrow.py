"""Rows of Parquet files and of folders saved by Hugging Face `datasets`. Only this module imports pyarrow.

`datasets` writes each split as Arrow streams beside a state.json that lists them; a dictionary of splits is a folder of
such folders, and the folder's name becomes the rows' split. Files are read in batches: none is held whole.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

Cells = dict[str, Any]
_BATCH = 64


def read_table(path: Path) -> Iterator[tuple[str, Cells]]:
    """Every row of a Parquet file or a folder with its place, numbered from 1. Raises ConfigError."""
    if not path.is_dir():
        with _opened(path) as file:
            yield from _numbered(path, file.iter_batches(batch_size=_BATCH))
    elif (path / "dataset_dict.json").is_file():
        for split in _listed(path / "dataset_dict.json", "splits"):
            for where, cells in _read_split(path / split):
                yield where, {"split": split, **cells}
    else:
        yield from _read_split(path)


def count_parquet(path: Path) -> int:
    """Rows of the file, from its footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def _read_split(folder: Path) -> Iterator[tuple[str, Cells]]:
    arrow = _pyarrow()
    for entry in _listed(folder / "state.json", "_data_files"):
        name = entry.get("filename", "") if isinstance(entry, dict) else ""
        path = folder / Path(str(name)).name  # a file of this folder, whatever the list says
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as stream:
                yield from _numbered(path, stream)
        except (OSError, arrow.ArrowException) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); expected an Arrow stream") from error


def _numbered(path: Path, batches: Any) -> Iterator[tuple[str, Cells]]:
    number = 0
    try:
        for batch in batches:
            for cells in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", cells
    except (OSError, _pyarrow().ArrowException) as error:
        raise ConfigError(f"{path}: broken behind row {number}: {error}") from error


def _listed(path: Path, key: str) -> list[Any]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path.parent}: expected a folder saved by datasets, with {path.name}: {error}") from error
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: {key}: expected a list")
    return listed


def _opened(path: Path) -> Any:
    arrow = _pyarrow()
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected a Parquet file") from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ConfigError("Parquet and saved datasets need pyarrow: pip install 'headrace[tasks]'") from error
    return pyarrow
