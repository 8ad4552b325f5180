"""What a long run shows of its processes and its disk: looks, how fast a figure grows, a table and a picture.

A process that was killed and came back is another life: it begins anew, and so does what it holds. Growth is that of the
longest life of a name, from `settle_s` after it began. Slope: the median over all pairs of looks (Theil 1950; Sen, JASA 63,
1968), which a burst of less than 29 % of the looks does not move.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

PAGE_MB = 4096 / 2**20
OF_PROCESSES = ("MB", "descriptors", "threads")
DISK = "disk"
NUM_SHOWN = 10  # lines of the picture of the disk


class Look(msgspec.Struct, frozen=True):
    """at_s: since the run began."""

    at_s: float
    values: dict[str, float]


class ProcessLife(msgspec.Struct):
    """A process from its start to its end, or what lies on disk. began_s: since the run began."""

    name: str
    began_s: float
    looks: list[Look] = []

    def settled(self, settle_s: float) -> list[Look]:
        """Looks from then on."""
        return [look for look in self.looks if look.at_s >= self.began_s + settle_s]


def of_process(pid: int) -> dict[str, float]:
    """Resident MB, descriptors and threads of a process and all it started; empty for one that has gone."""
    found = dict.fromkeys(OF_PROCESSES, 0.0)
    waiting = [pid]
    while waiting:
        place = Path("/proc") / str(waiting.pop())
        try:
            found["MB"] += int((place / "statm").read_text().split()[1]) * PAGE_MB
            found["descriptors"] += len(list((place / "fd").iterdir()))
            tasks = list((place / "task").iterdir())
            found["threads"] += len(tasks)
            waiting += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            if place.name == str(pid):
                return {}
    return found


def size_mb(folder: Path) -> float:
    """Blocks taken on disk: a topic's index files are written ahead of what is in them."""
    found = 0
    for path in (folder, *folder.rglob("*")):
        try:
            found += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found / 2**20


def slope(looks: Sequence[Look], name: str) -> float | None:
    """By the hour; None for fewer than three looks."""
    found = [(look.at_s / 3600, look.values[name]) for look in looks if name in look.values]
    if len(found) < 3:
        return None
    hours, values = np.array(found).T
    first, second = np.triu_indices(len(found), k=1)
    return float(np.median((values[second] - values[first]) / (hours[second] - hours[first])))


def longest(lives: Sequence[ProcessLife]) -> dict[str, ProcessLife]:
    """By name, in the order of their first appearance."""
    found: dict[str, ProcessLife] = {}
    for life in lives:
        if life.looks and (life.name not in found or len(life.looks) > len(found[life.name].looks)):
            found[life.name] = life
    return found


def shown(looks: Sequence[Look], name: str) -> tuple[str, str]:
    """First and last value, and growth an hour; empty where the life was too short."""
    values = [look.values[name] for look in looks if name in look.values]
    by_hour = slope(looks, name)
    if by_hour is None:
        return ("", "")
    return (f"{values[0]:,.1f} → {values[-1]:,.1f}".replace(".0", ""), f"{by_hour:+,.1f}")


def tables(lives: Sequence[ProcessLife], settle_s: float) -> tuple[Table, Table]:
    """Of processes, and of what lies on disk."""
    processes = Table("process", "lives", "minutes", title=f"from {settle_s / 60:g} minutes after a start on")
    for name in OF_PROCESSES:
        processes.add_column(name, justify="right")
        processes.add_column("an hour", justify="right")
    disk = Table("on disk", "", "an hour", title="from the same time on")
    for name, life in longest(lives).items():
        looks = life.settled(settle_s)
        minutes = (looks[-1].at_s - looks[0].at_s) / 60 if looks else 0.0
        if name != DISK:
            lived = sum(other.name == name for other in lives)
            figures = (figure for what in OF_PROCESSES for figure in shown(looks, what))
            processes.add_row(name, str(lived), f"{minutes:.0f}", *figures)
            continue
        for what in dict.fromkeys(what for look in looks for what in look.values):
            disk.add_row(what, *shown(looks, what))
    return processes, disk


def plot(lives: Sequence[ProcessLife], out: Path) -> None:
    """Memory of every life above what it was at its first look, and what lies on disk, over minutes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    names = list(longest(lives))
    for life in lives:
        if life.name == DISK:
            last = life.looks[-1].values if life.looks else {}
            for what in sorted(last, key=lambda one: -last[one])[:NUM_SHOWN]:
                if what.endswith(" MB"):
                    _line(right, life.looks, what, what.removesuffix(" MB"), f"C{len(right.lines)}")
        elif life.looks:
            first = life.looks[0].values["MB"]
            label = f"{life.name}, from {first:.0f} MB" if life is longest(lives)[life.name] else ""
            _line(left, life.looks, "MB", label, f"C{names.index(life.name)}", above=first)
    for side, title in ((left, "resident memory above the first look, MB"), (right, "on disk, MB")):
        side.set(xlabel="minutes", title=title)
        side.grid(alpha=0.3)
        side.legend(fontsize=7, loc="upper left")
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _line(axis: Any, looks: Sequence[Look], name: str, label: str, colour: str, above: float = 0.0) -> None:
    found = [(look.at_s / 60, look.values[name] - above) for look in looks if name in look.values]
    axis.plot(*zip(*found, strict=True), label=label or None, color=colour, linewidth=1.2)
