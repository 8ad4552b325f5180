"""Files that somebody else made: whatever they announce, loading them takes bounded memory and ends with words."""

from pathlib import Path

import pytest

from actors.tasksets import arrow
from actors.tasksets.files import MAX_LINE_BYTES, Broken, count_rows, read_rows
from infra.policies.tensors import MAX_RANK, load_tensors
from schemas import Task
from schemas.errors import ConfigError

GOOD = b'{"id": "a", "prompt": "37+45="}\n'


def rows(path: Path) -> tuple[list[str], list[Broken]]:
    broken: list[Broken] = []
    return [row.id for row in read_rows(path, Task, on_broken=broken.append)], broken


def test_a_line_without_an_end_is_named_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(GOOD + b"x" * (3 * MAX_LINE_BYTES) + b"\n" + GOOD + b"y" * (2 * MAX_LINE_BYTES))
    found, broken = rows(path)
    assert found == ["a", "a"]
    assert [one.where for one in broken] == [f"{path}:2", f"{path}:4"]
    assert all("got a line of more than 16777216 bytes" in one.reason for one in broken)
    assert count_rows(path) == 4


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_line_of_just_the_length_that_is_allowed_is_one_line(tmp_path: Path, more: int) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(GOOD.rstrip().ljust(MAX_LINE_BYTES + more) + b"\n" + GOOD)
    assert count_rows(path) == 2
    assert len(rows(path)[0]) + len(rows(path)[1]) == 2


def test_a_table_with_a_line_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_bytes(b"id,prompt\na," + b"x" * (2 * MAX_LINE_BYTES))
    with pytest.raises(ConfigError, match="got a line of more than"):
        rows(path)


def test_a_small_parquet_file_that_says_gigabytes_is_refused_within_the_memory_it_may_take(tmp_path: Path) -> None:
    """2,000 rows that all name one text of 16 MB: 32 GB as rows, for a reader that may take half a gigabyte."""
    import pyarrow
    from pyarrow import parquet

    text = pyarrow.array(["x" * (16 * 1024 * 1024)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), text)
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pyarrow.table({"prompt": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(ConfigError, match="of memory"):
        list(arrow.read_apart(path, memory_bytes=512 * 1024 * 1024))


def test_a_row_that_is_too_large_is_named_and_the_next_one_read(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "large.parquet"
    table = pyarrow.table({"id": ["a", "b"], "prompt": ["x" * (arrow.MAX_ROW_BYTES + 1), "37+45="]})
    parquet.write_table(table, path)
    found, (broken,) = rows(path)
    assert found == ["b"] and "got a row of" in broken.reason


@pytest.mark.parametrize(
    "shape",
    [b"[" + b",".join([b"9223372036854775807"] * 40_000) + b"]", b"[1" + b",1" * MAX_RANK + b"]", b"[-1]", b"[1e3]"],
)
def test_a_header_of_many_dimensions_is_refused_before_they_are_multiplied(shape: bytes) -> None:
    header = b'{"w": {"dtype": "F32", "shape": ' + shape + b', "data_offsets": [0, 4]}}'
    with pytest.raises(ValueError, match="safetensors"):
        load_tensors(len(header).to_bytes(8, "little") + header + bytes(4))
