"""What benchmarks printed as JSON, as rows of one table: what was aimed at, what was seen, and whether it is met.

Figures are read by their shape: those of contestants side by side, one figure to a name, or a reader of READERS. A row that
should be there and is not says why: its benchmark failed, or a peer is missing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from infra.cli.bench.beside import OURS, Beside
from infra.cli.bench.targets import TARGETS

SHARED, ALONE = 1.3, 1.0  # what a step of the learner aims at beside the plain one
NO_LEAST, NO_MOST = float("-inf"), float("inf")
LEFT_OUT = re.compile(r"(?:[\w-]+: )?(.+?) (?:is|are) left out: (.+)")  # how benchmarks say that a peer is missing
Verdict = Literal["met", "missed", "not run", ""]


class BenchRow(msgspec.Struct, frozen=True):
    """One line of the table.

    bench: that measures it. what: is measured. value: the ratio, or the figure itself, None where it was not measured.
    ours, peer: what they took, None where the benchmark has only a ratio or a figure. low, high: what it is to lie
    between. why: it was not measured.
    """

    bench: str
    what: str
    value: float | None = None
    ours: float | None = None
    peer: float | None = None
    low: float = NO_LEAST
    high: float = NO_MOST
    why: str = ""

    @property
    def has_target(self) -> bool:
        """Whether anything is aimed at."""
        return (self.low, self.high) != (NO_LEAST, NO_MOST)

    @property
    def verdict(self) -> Verdict:
        """Whether the target is met, "" where there is none."""
        if self.value is None:
            return "not run"
        if not self.has_target:
            return ""
        return "met" if self.low <= self.value <= self.high else "missed"


def rows_of(name: str, figures: Any, said: Sequence[str] = ()) -> list[BenchRow]:
    """Rows of one benchmark. said: its progress, which names the peers that were missing. Raises msgspec.ValidationError,
    KeyError, TypeError for figures that are not such.
    """
    if name in READERS:
        rows = READERS[name](name, figures)
    elif isinstance(figures, list):
        rows = _beside(name, figures)
    else:
        rows = _flat(name, figures)
    missing = [found for line in said if (found := LEFT_OUT.fullmatch(line.strip()))]
    return rows + [BenchRow(name, found[1], why=found[2]) for found in missing]


def rows_without(name: str, why: str) -> list[BenchRow]:
    """Rows of one that has no figures: its targets, where they have names, and why none is measured."""
    targets = TARGETS.get(name, {})
    return [BenchRow(name, figure, low=low, high=high, why=why) for figure, (low, high) in targets.items()] or [
        BenchRow(name, "", why=why)
    ]


def _flat(name: str, figures: Mapping[str, Any]) -> list[BenchRow]:
    """Figures that have a target; all of them where none has."""
    targets = TARGETS.get(name, {})
    if not targets:
        numbers = {what: value for what, value in figures.items() if isinstance(value, int | float)}
        return [BenchRow(name, what, float(value)) for what, value in numbers.items()]
    return [
        BenchRow(name, figure, float(figures[figure]), low=low, high=high)
        if figure in figures
        else BenchRow(name, figure, low=low, high=high, why="it was not measured")
        for figure, (low, high) in targets.items()
    ]


def _beside(name: str, figures: Any) -> list[BenchRow]:
    """Each peer by the best rounds, in µs of processor time of an answer; of wall time where that has a target."""
    found = msgspec.convert(figures, list[Beside])
    ours = {one.case: one for one in found if one.name == OURS}
    rows = []
    for one in found:
        own, what = ours[one.case], f"{one.case}, {one.name}"
        if one.times is not None:
            low = NO_LEAST if one.target is None else one.target
            rows.append(BenchRow(name, what, one.times[0], ours=own.cpu_us[0], peer=one.cpu_us[0], low=low))
        if one.sooner is not None and one.sooner_target is not None:
            low = one.sooner_target
            rows.append(
                BenchRow(name, f"{what}, wall", one.sooner[0], ours=own.wall_us[0], peer=one.wall_us[0], low=low)
            )
    return rows


def _codec(name: str, figures: Any) -> list[BenchRow]:
    from infra.cli.bench.records.codec import targets_of

    return [
        BenchRow(name, f"{shape}, {figure}", numbers[figure], low=low)
        for shape, numbers in figures.items()
        for figure, low in targets_of(shape).items()
        if figure in numbers
    ]


def _learner(name: str, figures: Any) -> list[BenchRow]:
    return [
        BenchRow(
            name,
            one["shape"],
            one["faster"],
            ours=one["headrace"]["cpu_s_min"],
            peer=one["plain"]["cpu_s_min"],
            low=SHARED if "to one prompt" in one["shape"] else ALONE,
        )
        for one in figures["shapes"]
    ]


def _growth(name: str, figures: Any) -> list[BenchRow]:
    """Exponents, of what is above the noise."""
    from infra.cli.bench.growth.growth import LINEAR, GrowthLine

    found = msgspec.convert(figures, list[GrowthLine])
    return [
        BenchRow(name, f"{one.what}: exponent", one.exponent, high=LINEAR) for one in found if one.exponent is not None
    ]


def _families(name: str, figures: Any) -> list[BenchRow]:
    """By how much of what float32 may differ by; what is refused has no figure."""
    from infra.cli.bench.learner.families import GRADIENT, LOGPROB, Family

    rows = []
    for one in msgspec.convert(figures, list[Family]):
        if one.refused:
            rows.append(BenchRow(name, one.name, why=f"refused: {one.refused}"))
        else:
            off = max(one.gradient / GRADIENT, one.engine / LOGPROB)
            rows.append(BenchRow(name, f"{one.name}: off, of what may be", off, high=1.0))
    return rows


def _gate(name: str, figures: Any) -> list[BenchRow]:
    """Shares of paths that were turned away, taken back or held: of what is worse many, of the rest few."""
    from infra.cli.bench.learning.gate import AT_LEAST, AT_MOST, Figures

    return [
        BenchRow(
            name,
            f"{one.test}, {one.name}",
            one.failed,
            low=AT_LEAST if one.kept is not None and one.worse else NO_LEAST,
            high=AT_MOST + 2 * one.error if one.kept is not None and not one.worse else NO_MOST,
        )
        for one in msgspec.convert(figures, list[Figures])
    ]


def _train(name: str, figures: Any) -> list[BenchRow]:
    """How many times as soon as TRL each side of headrace arrived: by the clock, which has a target, and in processor time."""
    from infra.cli.bench.learning.train import SOONER, TRL, Clock, TrainRun, sooner

    found = msgspec.convert(figures, list[TrainRun])
    peers = {one.seed: one for one in found if one.side == TRL}
    clocks: tuple[tuple[Clock, str, float], ...] = (("wall_s", "", SOONER), ("cpu_s", ", CPU", NO_LEAST))
    return [
        BenchRow(
            name, f"seed {one.seed}, {one.side}, {TRL}{said}{times[0]}", times[1],
            ours=getattr(one, clock), peer=getattr(peers[one.seed], clock), low=low,
        )
        for one in found
        for clock, said, low in clocks
        if one.side != TRL and (times := sooner(found, one.seed, one.side, clock)) is not None
    ]  # fmt: skip


READERS: Mapping[str, Callable[[str, Any], list[BenchRow]]] = {
    "codec": _codec,
    "learner": _learner,
    "growth": _growth,
    "families": _families,
    "gate": _gate,
    "train": _train,
}
