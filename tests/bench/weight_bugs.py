"""Public weight-sync bugs planted in this project's path: what refuses each, and what would have been trained."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.report import Row
from tests.contracts.weight_bugs import BUGS, exhibits


def run(rooms: str = ",".join(BUGS), dtype: str = "float32") -> Iterator[Row]:
    """rooms: rooms of the bugs to show. dtype: dtype of the models."""
    for room in rooms.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for shown in exhibits(room, Path(folder) / "model", dtype):
                case = f"{shown.bug.name} ({shown.bug.source}), refused by the {shown.keeper}"
                yield Row(f"{case}: refused after", shown.after_ms, "ms")
                yield Row(f"{case}: requests lost", float(shown.lost), low=0.0, high=0.0)
                figures = ("difference", shown.apart, "nats"), ("outside the clip", shown.outside, "%")
                for what, value, unit in figures:
                    if value is None:
                        yield Row(f"{case}: {what}", why="no request gets an answer")
                    else:
                        yield Row(f"{case}: {what}", 100 * value if unit == "%" else value, unit)
