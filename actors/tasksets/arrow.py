"""Rows of Parquet files, read in batches: no file is held whole. Only this module imports pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

Cells = dict[str, Any]
_BATCH = 64


def read_parquet(path: Path) -> Iterator[tuple[str, Cells]]:
    """Every row of a file with its place, numbered from 1. Raises ConfigError."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'headrace[tasks]'") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH):
                for cells in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", cells
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: broken behind row {number} ({error}); expected a Parquet file") from error
