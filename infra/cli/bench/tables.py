"""What benchmarks found, as a person reads it: tables with the targets beside the figures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from infra.cli.bench.beside import OURS, Beside
from infra.cli.bench.common.figures import number, words
from infra.cli.bench.growth.growth import LINEAR
from infra.cli.bench.targets import TARGETS

if TYPE_CHECKING:
    from infra.cli.bench.ends import BenchEnd
    from infra.cli.bench.growth.growth import GrowthLine, GrowthPoint
    from infra.cli.bench.learner.families import Family
    from infra.cli.bench.learner.learner import BenchMachine, LearnerBenchPlan, ShapeComparison
    from infra.cli.bench.learning.gate import Figures as GateFigures
    from infra.cli.bench.learning.train import TrainRun


def figures_table(name: str, figures: dict[str, float]) -> Table:
    """One figure a line, with its target if it has one."""
    table = Table("figure", title=f"bench {name}")
    table.add_column("value", justify="right")
    table.add_column("target", justify="right")
    targets = TARGETS.get(name, {})
    for figure, value in figures.items():
        if figure not in targets:
            table.add_row(figure, number(value), "")
            continue
        low, high = targets[figure]
        met = low <= value <= high
        table.add_row(figure, number(value), Text(words(low, high), style="green" if met else "red"), style="bold")
    return table


def shapes_table(name: str, rows: list[tuple[str, ...]]) -> Table:
    """Figures of several cases side by side, the first row their names; figures with a target stand out."""
    (_, *cases), *others = rows
    table = Table(title=f"bench {name}")
    table.add_column("figure")
    for case in cases:
        table.add_column(case, justify="right")
    for row in others:
        table.add_row(*row, style="bold" if "target" in row[0] else None)
    return table


def beside_table(name: str, found: Sequence[Beside]) -> Table:
    """One row a contestant; of each figure the best round and the median one. How much sooner ours is, is given where it has
    a target.
    """
    table = Table("case", "", title=f"bench {name}: µs of an answer, best round and median")
    is_timed = any(one.sooner_target is not None for one in found)
    for title in ("CPU", "wall", "headrace is cheaper by", "target", *(("sooner by", "target") if is_timed else ())):
        table.add_column(title, justify="right")
    for one in found:
        cells: list[str | Text] = [", ".join(number(round(us, 1)) for us in pair) for pair in (one.cpu_us, one.wall_us)]
        cells += _against(one.times, one.target)
        if is_timed:
            cells += _against(one.sooner, one.sooner_target)
        table.add_row(one.case if one.name == OURS else "", one.name, *cells)
    return table


def _against(times: tuple[float, float] | None, target: float | None) -> tuple[Text, str]:
    """A ratio, green where its target is met and red where it is not, and the target."""
    met = times is not None and target is not None and times[0] >= target
    style = "" if target is None else "green" if met else "red"
    said = "" if times is None else f"{times[0]:.2f}, {times[1]:.2f} times"
    return Text(said, style=style), "" if target is None else f"at least {number(target)}"


def all_table(found: "Sequence[BenchEnd]") -> Table:
    """One row a figure: what was aimed at, what was seen, and whether that is met."""
    table = Table("bench", "what", title="bench all")
    for title in ("headrace", "peer", "target", "seen"):
        table.add_column(title, justify="right")
    table.add_column("")
    table.add_column("minutes", justify="right")
    table.add_column("ended at, UTC")
    styles = {"met": "green", "missed": "red", "not run": "yellow", "": ""}
    for end in found:
        for at, one in enumerate(end.rows):
            both = ["" if value is None else number(round(value, 1)) for value in (one.ours, one.peer)]
            target = words(one.low, one.high) if one.has_target else ""
            seen = Text("" if one.value is None else number(one.value), style=styles[one.verdict])
            said = Text(one.verdict + (f": {one.why}" if one.why else ""), style=styles[one.verdict])
            took = f"{end.took_s / 60:.1f}" if end.is_run and not at else ""
            ended = end.at if not at else ""
            table.add_row(one.bench if not at else "", one.what, *both, target, seen, said, took, ended)
    return table


def learner_about(plan: "LearnerBenchPlan", machine: "BenchMachine") -> str:
    """What was measured, and on what."""
    peak = f"{machine.peak_tflops:,.0f} TFLOP/s" if machine.peak_tflops else "a peak that is not known: --peak"
    return (
        f"{machine.parameters_m:,.0f} M parameters, {machine.dtype}, microbatches of {plan.max_tokens:,} tokens, on "
        f"{machine.device} of {peak}"
    )


def learner_table(found: "Sequence[ShapeComparison]") -> Table:
    """Two rows a shape, headrace's step and the plain one; seconds are the least and the median."""
    table = Table("batch", "step", title="bench learner")
    for name in ("CPU s", "wall s", "tokens/s", "TFLOP/s", "MFU", "peak MiB", "times as fast"):
        table.add_column(name, justify="right")
    for one in found:
        for name, timed in (("headrace", one.headrace), ("plain", one.plain)):
            is_ours = timed is one.headrace
            table.add_row(
                one.shape if is_ours else "",
                name,
                f"{number(timed.cpu_s_min)}, {number(timed.cpu_s_median)}",
                f"{number(timed.wall_s_min)}, {number(timed.wall_s_median)}",
                number(round(timed.tokens_per_s, 1)),
                number(timed.tflops),
                "" if timed.mfu is None else f"{timed.mfu:.1%}",
                number(round(timed.peak_mib)),
                Text(f"{one.faster:.2f}", style="green" if one.faster >= 1 else "red") if is_ours else "",
            )
    return table


def growth_table(found: "Sequence[GrowthLine]") -> Table:
    """One row a thing that grows: what it took at each size, the most memory, and its exponent, green where it is linear."""
    sizes = sorted({point.size for one in found for point in one.points})
    table = Table("", title="bench growth: CPU seconds and the most MB, by size")
    for size in sizes:
        table.add_column(number(size), justify="right")
    table.add_column("exponent", justify="right")
    table.add_column("target", justify="right")
    for one in found:
        at = {point.size: point for point in one.points}
        cells = [_grown(at[size]) if size in at else "" for size in sizes]
        style = {True: "green", False: "red", None: ""}[one.is_met]
        said = "" if one.exponent is None else f"{one.exponent:.2f}"
        table.add_row(one.what, *cells, Text(said, style=style), f"at most {number(LINEAR)}" if said else "")
    return table


def _grown(point: "GrowthPoint") -> str:
    if point.why:
        return f"left out: {point.why}"
    return f"{number(float(f'{point.cpu_s:.3g}'))}, {number(round(point.mb))}"


def train_table(found: "Sequence[TrainRun]") -> Table:
    """One row a side and seed: when it arrived, or that it did not, and how many times as soon as the peer."""
    from infra.cli.bench.learning.train import SOONER, TRL, sooner

    table = Table("seed", "", title="bench train: to 90 % of the development set, from the same weights")
    for title in ("begins at", "arrives", "sooner than TRL by", "target", "in CPU by"):
        table.add_column(title, justify="right")
    for one in found:
        by_clock, by_cpu = (sooner(found, one.seed, one.side, clock) for clock in ("wall_s", "cpu_s"))
        style = "" if by_clock is None else "green" if by_clock[1] >= SOONER else "red"
        target = "" if one.side == TRL else f"at least {number(SOONER)}"
        said, of_cpu = (
            "" if times is None else f"{times[0].lstrip(': ')} {times[1]:.2f} times".strip()
            for times in (by_clock, by_cpu)
        )
        table.add_row(str(one.seed), one.side, f"{one.begun:.1%}", one.words, Text(said, style=style), target, of_cpu)
    return table


def families_table(found: "Sequence[Family]") -> Table:
    """One row a family: how the learner reads it, and by how much gradients and logprobs are off; or why it is refused."""
    table = Table("family", "learner reads rows", title="bench families")
    table.add_column("gradients off by", justify="right")
    table.add_column("engine off by, nats", justify="right")
    table.add_column("refused")
    for one in found:
        style = "red" if one.refused else "green" if one.works else "yellow"
        figures = ("", "") if one.refused else (number(one.gradient), number(one.engine))
        table.add_row(one.name, one.reading, *figures, Text(one.refused), style=style)
    return table


def gate_table(found: "Sequence[GateFigures]") -> Table:
    """One row a line, green where its promise is kept and red where it is not."""
    table = Table("test", "what differs", title="bench gate: turned away, taken back or held")
    for name in ("paths", "found", "", "let through", "restless", "ratings"):
        table.add_column(name, justify="right")
    for one in found:
        style = {True: "green", False: "red", None: None}[one.kept]
        wanted = "" if one.kept is None else "at least 80 %" if one.worse else "at most 1 %"
        share = Text(f"{one.failed:.1%} ± {one.error:.1%}", style=style or "")
        cells = (f"{one.passed:.0%}", f"{one.restless:.0%}", number(round(one.ratings)) if one.ratings else "")
        table.add_row(one.test, one.name, str(one.paths), share, wanted, *cells)
    return table
