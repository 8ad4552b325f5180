"""The targets of the way of weights, a row each: the worst that was seen, and whether it is met; a sweep, a column a size."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.targets import TARGETS

if TYPE_CHECKING:
    from rich.table import Table


class WeightsTarget(msgspec.Struct, frozen=True):
    """One target. what: is aimed at. bench: that measures it, whose target of the figures counts. figures: a pattern of
    their names.
    """

    what: str
    bench: str
    figures: str


class WeightsRow(msgspec.Struct, frozen=True):
    """A target and what was measured. target: as named below. low, high: what it is to lie between. seen: the worst of
    the figures, None where none was measured.
    """

    target: WeightsTarget
    low: float
    high: float
    seen: float | None

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.seen is None else self.low <= self.seen <= self.high


ROWS = (
    WeightsTarget("first version of a run, CPU s per GB to publish", "weights", r"trainer_v0_cpu_s_per_gb"),
    WeightsTarget("any later version, CPU s per GB to publish", "weights", r"trainer_v[1-9]\d*_cpu_s_per_gb"),
    WeightsTarget("next version, CPU s per GB before the pause", "weights", r"explorer_v\d+_cpu_s_per_gb"),
    WeightsTarget("5 versions behind", "weights", r"explorer_behind_5_cpu_s_per_gb"),
    WeightsTarget("15 versions behind", "weights", r"explorer_behind_15_cpu_s_per_gb"),
    WeightsTarget("30 versions behind: begun anew", "weights", r"explorer_behind_30_cpu_s_per_gb"),
    WeightsTarget("an anchor from the host's cache, CPU s per GB", "weights", r"cached_anchor_cpu_s_per_gb"),
    WeightsTarget("wall over CPU to publish", "weights", r"trainer_wall_over_cpu"),
    WeightsTarget("wall over CPU before the pause", "weights", r"explorer_wall_over_cpu"),
    WeightsTarget("longest stall of another thread, ms", "weights", r"(trainer|explorer)_stall_ms"),
    WeightsTarget("peak memory of the first engine of a host, times the weights", "weights", r"engine_peak.*"),
    WeightsTarget("of the second engine, more", "weights", r"second_engine_peak.*"),
    WeightsTarget("a version from the store, 8 followers on a host, times", "fan-out", r"cached_version_bytes.*"),
    WeightsTarget("throughput over that of one connection", "fan-out", r"(get|put)_over_one_connection"),
    WeightsTarget("pause p50, ms, rebuilt", "reload", r"rebuild_pause_ms_p50"),
    WeightsTarget("pause p50, ms, kept", "reload", r"keep_pause_ms_p50"),
    WeightsTarget("requests failed over reloads", "reload", r"(rebuild|keep)_requests_failed"),
)
COMPUTED = ("trainer_s_computed_8b", "trainer_s_computed_70b", "explorer_s_computed_8b", "explorer_s_computed_70b")


def rows(found: Mapping[str, Mapping[str, float]]) -> list[WeightsRow]:
    """Of figures by the name of their benchmark."""
    made = []
    for target in ROWS:
        names = [name for name in TARGETS[target.bench] if re.fullmatch(target.figures, name)]
        (low, high) = TARGETS[target.bench][names[0]]
        seen = [found[target.bench][name] for name in names if name in found.get(target.bench, {})]
        worst = (max(seen) if high != float("inf") else min(seen)) if seen else None
        made.append(WeightsRow(target, low, high, worst))
    return made


def targets_table(found: Mapping[str, Mapping[str, float]]) -> "Table":
    """See `rows`; beneath them the seconds that are computed from them."""
    from rich.table import Table
    from rich.text import Text

    from infra.cli.bench.common.figures import number, words

    table = Table("target of the way of weights", title="bench weights: the targets")
    for name in ("target", "seen", ""):
        table.add_column(name, justify="right")
    for row in rows(found):
        said = {True: "met", False: "missed", None: f"headrace bench {row.target.bench}"}[row.is_met]
        style = {True: "green", False: "red", None: ""}[row.is_met]
        seen = "" if row.seen is None else number(row.seen)
        table.add_row(row.target.what, words(row.low, row.high), Text(seen, style=style), Text(said, style=style))
    for name in COMPUTED:
        side, _, size = name.partition("_s_computed_")
        what = f"{'publish' if side == 'trainer' else 'before the pause'} at {size.upper()}, s of this machine's wall"
        table.add_row(what, "", number(found["weights"][name]), "computed")
    return table


def sweep_table(found: Mapping[float, Mapping[str, float]], curves: Mapping[str, tuple[str, ...]]) -> "Table":
    """CPU seconds a GB of each curve, and what came of them, by GB of weights."""
    from rich.table import Table

    from infra.cli.bench.common.figures import number

    table = Table("CPU seconds a GB", title="bench weights: by GB of weights")
    for gb in found:
        table.add_column(number(gb), justify="right")
    for label, names in curves.items():
        sums = (sum(one[f"{name}_cpu_s_per_gb"] for name in names) for one in found.values())
        table.add_row(label, *map(number, sums))
    for name in ("trainer_wall_over_cpu", "explorer_wall_over_cpu", "trainer_stall_ms", "explorer_stall_ms"):
        table.add_row(name.replace("_", " "), *(number(one[name]) for one in found.values()))
    for name in COMPUTED:
        table.add_row(name.replace("_", " "), *(number(one[name]) for one in found.values()))
    return table
