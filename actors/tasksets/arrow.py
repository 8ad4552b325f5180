"""Rows of Parquet files, read in batches: no file is held whole. Only this module imports pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

Cells = dict[str, Any]
_BATCH = 64


def read_parquet(path: Path) -> Iterator[tuple[str, Cells]]:
    """Every row of a file with its place, numbered from 1. Raises ConfigError."""
    number = 0
    with _opened(path) as file:
        try:
            for batch in file.iter_batches(batch_size=_BATCH):
                for cells in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", cells
        except (OSError, _pyarrow().ArrowException) as error:
            raise ConfigError(f"{path}: broken behind row {number}: {error}") from error


def count_parquet(path: Path) -> int:
    """Rows of the file, from its footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


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
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'headrace[tasks]'") from error
    return pyarrow
