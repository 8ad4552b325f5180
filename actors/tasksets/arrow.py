"""Rows of Parquet files and of folders saved by Hugging Face `datasets`. Only this module imports pyarrow.

`datasets` writes each split as Arrow streams beside a state.json that lists them; a dictionary of splits is a folder of
such folders, and the folder's name becomes the rows' split. Read row group by row group: no file is held whole.

Columns are compressed: some hundred bytes may say gigabytes. So a file is read in a process of its own, in bounded memory,
which hands over one row after the other:

    out   u32 length · msgpack [where, cells], [where, "why it is no row"], ["", "why nothing more comes"] or ["", ""]
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import ConfigError

Cells = dict[str, Any]
MEMORY_BYTES = 4 * 1024**3
MAX_ROW_BYTES = 16 * 1024 * 1024
_BATCH = 64


def read_apart(path: Path, memory_bytes: int = MEMORY_BYTES) -> Iterator[tuple[str, Cells | str]]:
    """Every row of a Parquet file or a folder, or in words why one cannot be had. Raises ConfigError."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    command = [sys.executable, "-P", "-m", "actors.tasksets.arrow", str(path), str(memory_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        try:
            while size := process.stdout.read(4):
                try:
                    where, cells = msgspec.msgpack.decode(process.stdout.read(int.from_bytes(size, "little")))
                except msgspec.DecodeError:  # cut off: it crashed
                    break
                if not where and not cells:
                    return
                if not where:
                    raise ConfigError(cells)
                yield where, cells
        finally:
            process.kill()
    raise ConfigError(f"{path}: reading it took more than {memory_bytes} bytes of memory, or crashed")


def main(path: Path, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        for where, cells in read_folder(path) if path.is_dir() else read_parquet(path):
            body = msgspec.msgpack.encode((where, cells), enc_hook=str)
            if len(body) > MAX_ROW_BYTES:
                why = f"got a row of {len(body)} bytes, expected at most {MAX_ROW_BYTES}"
                body = msgspec.msgpack.encode((where, why))
            _write(body)
        _write(msgspec.msgpack.encode(("", "")))
    except ConfigError as error:
        _write(msgspec.msgpack.encode(("", str(error))))
    except (MemoryError, OverflowError):
        words = f"{path}: {_BATCH} rows take more than {memory_bytes} bytes of memory; write it with smaller rows"
        _write(msgspec.msgpack.encode(("", words)))


def _write(body: bytes) -> None:
    sys.stdout.buffer.write(len(body).to_bytes(4, "little") + body)


def read_parquet(path: Path) -> Iterator[tuple[str, Cells]]:
    """Every row, numbered from 1. Raises ConfigError for a file that is not Arrow."""
    number = 0
    with _opened(path) as file:
        try:
            for batch in file.iter_batches(batch_size=_BATCH):
                for cells in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", cells
        except (OSError, _pyarrow().ArrowException) as error:
            if isinstance(error, MemoryError):
                raise
            raise ConfigError(f"{path}: broken behind row {number}: {error}") from error


def count_parquet(path: Path) -> int:
    """Rows of the file, from its footer."""
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def read_folder(folder: Path) -> Iterator[tuple[str, Cells]]:
    """Every row of a dataset, or of each split of a dictionary of them. Raises ConfigError."""
    if (folder / "dataset_dict.json").is_file():
        for split in _listed(folder / "dataset_dict.json", "splits"):
            for where, cells in _read_split(folder / split):
                yield where, {"split": split, **cells}
    else:
        yield from _read_split(folder)


def _read_split(folder: Path) -> Iterator[tuple[str, Cells]]:
    arrow = _pyarrow()
    for entry in _listed(folder / "state.json", "_data_files"):
        name = entry.get("filename", "") if isinstance(entry, dict) else ""
        path = folder / Path(str(name)).name  # a file of this folder, whatever the list says
        number = 0
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, _BATCH):
                        for cells in batch.slice(start, _BATCH).to_pylist():
                            number += 1
                            yield f"{path}: row {number}", cells
        except (OSError, arrow.ArrowException) as error:
            if isinstance(error, MemoryError):
                raise
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
