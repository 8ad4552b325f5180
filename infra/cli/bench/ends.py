"""What benchmarks came to, kept in a file over several runs of `headrace bench all`: each with its date and the machine's load.

A benchmark that is run again replaces what it had. One that is left out of a run keeps it.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.cli.bench.rows import NO_LEAST, NO_MOST, BenchRow
from schemas.errors import ConfigError


class BenchEnd(msgspec.Struct, frozen=True):
    """One that is over. bench: its name. rows: of the table. why: it has no figures, "" where it has. took_s: on the
    clock. is_run: whether it was run, not left out. at: when it ended, in UTC, "" where it was not run. load: processes that
    ran or waited for a core, on average while it ran, about. options: other than its own defaults.
    """

    bench: str
    rows: tuple[BenchRow, ...]
    why: str = ""
    took_s: float = 0.0
    is_run: bool = True
    at: str = ""
    load: float = 0.0
    options: tuple[str, ...] = ()


def as_figures(found: Sequence[BenchEnd]) -> dict[str, Any]:
    """As JSON has them: rows with their verdicts, and of each benchmark the rest."""
    ends = [msgspec.to_builtins(one) for one in found]
    return {
        "rows": [_as_json(row) for one in found for row in one.rows],
        "benches": [{name: value for name, value in one.items() if name != "rows"} for one in ends],
    }


def _as_json(row: BenchRow) -> dict[str, Any]:
    limits = {name: value for name, value in (("low", row.low), ("high", row.high)) if math.isfinite(value)}
    return {**msgspec.to_builtins(row), "low": None, "high": None, **limits, "verdict": row.verdict}


def read_ends(file: Path, known: Collection[str]) -> list[BenchEnd]:
    """What is in the file of the benchmarks that are known, none where there is no file. Raises ConfigError."""
    if not file.is_file():
        return []
    try:
        figures = msgspec.json.decode(file.read_bytes())
        rows = [msgspec.convert(_with_limits(row), BenchRow) for row in figures["rows"]]
        ends = [
            msgspec.convert({**one, "rows": [row for row in rows if row.bench == one["bench"]]}, BenchEnd)
            for one in figures["benches"]
        ]
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: got what `headrace bench all` does not write ({error}); give another --out"
        ) from error
    return [one for one in ends if one.bench in known]


def _with_limits(row: dict[str, Any]) -> dict[str, Any]:
    low, high = row["low"], row["high"]
    return {**row, "low": NO_LEAST if low is None else low, "high": NO_MOST if high is None else high}


def write_ends(file: Path, found: Sequence[BenchEnd]) -> None:
    """Replace the file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(as_figures(found)), indent=1))
    temporary.replace(file)


def with_end(found: Sequence[BenchEnd], one: BenchEnd) -> list[BenchEnd]:
    """With one more, instead of what it had before; one that is left out leaves that as it is."""
    if not one.is_run and any(other.bench == one.bench for other in found):
        return list(found)
    return [*(other for other in found if other.bench != one.bench), one]
