"""The benchmarks beside peers, and others with a target alone, one after the other, and their figures in one table.

Each is a process of `headrace bench`, so that none finds what another left behind. One that fails is said in one line, and the
rest goes on. What runs ends with this process, however that ends.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.cli.bench.beside import OURS, Beside
from infra.cli.bench.children import end
from infra.cli.bench.targets import TARGETS
from infra.local.process import start_watched

Say = Callable[[str], None]
SHARED, ALONE = 1.3, 1.0  # what a step of the learner aims at beside the plain one


class BenchRow(msgspec.Struct, frozen=True):
    """One line of the table. ours, peer: what they took, None where the benchmark has only a ratio or a figure. value: the
    ratio, or the figure itself. low, high: what it is to lie between.
    """

    bench: str
    what: str
    value: float
    ours: float | None = None
    peer: float | None = None
    low: float = float("-inf")
    high: float = float("inf")

    @property
    def is_met(self) -> bool:
        """Whether the target is, where there is one."""
        return self.low <= self.value <= self.high


class BenchFailure(msgspec.Struct, frozen=True):
    """A benchmark without figures, and the last line that it wrote."""

    bench: str
    why: str


def _flat(name: str, figures: Any) -> list[BenchRow]:
    """Figures that have a target."""
    return [
        BenchRow(name, figure, figures[figure], low=low, high=high)
        for figure, (low, high) in TARGETS[name].items()
        if figure in figures
    ]


def _beside(name: str, figures: Any) -> list[BenchRow]:
    """Each peer by the best rounds, in µs of processor time of an answer; of wall time where that has a target."""
    found = msgspec.convert(figures, list[Beside])
    ours = {one.case: one for one in found if one.name == OURS}
    rows = []
    for one in found:
        own, what = ours[one.case], f"{one.case}, {one.name}"
        if one.times is not None:
            low = float("-inf") if one.target is None else one.target
            rows.append(BenchRow(name, what, one.times[0], ours=own.cpu_us[0], peer=one.cpu_us[0], low=low))
        if one.sooner is not None and one.sooner_target is not None:
            low = one.sooner_target
            rows.append(
                BenchRow(name, f"{what}, wall", one.sooner[0], ours=own.wall_us[0], peer=one.wall_us[0], low=low)
            )
    return rows


def _codec(name: str, figures: Any) -> list[BenchRow]:
    from infra.cli.bench.codec import TARGETS as CODEC

    return [
        BenchRow(name, f"{shape}, {figure}", numbers[figure], low=low)
        for shape, numbers in figures.items()
        for figure, low in CODEC.items()
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
    from infra.cli.bench.growth import LINEAR, GrowthLine

    found = msgspec.convert(figures, list[GrowthLine])
    return [
        BenchRow(name, f"{one.what}: exponent", one.exponent, high=LINEAR) for one in found if one.exponent is not None
    ]


def _train(name: str, figures: Any) -> list[BenchRow]:
    """How many times as soon as TRL each side of headrace arrived, by the clock."""
    from infra.cli.bench.train import SOONER, TRL, TrainRun, sooner

    found = msgspec.convert(figures, list[TrainRun])
    peers = {one.seed: one.wall_s for one in found if one.side == TRL}
    return [
        BenchRow(name, f"seed {one.seed}, {one.side}, {TRL}{times[0]}", times[1], one.wall_s, peers[one.seed], SOONER)
        for one in found
        if one.side != TRL and (times := sooner(found, one.seed, one.side)) is not None
    ]


BENCHES: Mapping[str, Callable[[str, Any], list[BenchRow]]] = {
    "codec": _codec,
    "hop": _beside,
    "transport": _beside,
    "draw": _flat,
    "delta": _flat,
    "weights": _flat,
    "learner": _learner,
    "gateway": _flat,
    "gateway-peers": _beside,
    "console": _flat,
    "console-load": _flat,
    "growth": _growth,
    "overlap": _flat,
    "start": _flat,
    "train": _train,
}


def command_of(name: str) -> list[str]:
    """What runs a benchmark."""
    return [sys.executable, "-m", "infra.cli.main", "bench", name, "--json"]


def run(
    names: Sequence[str], say: Say, command: Callable[[str], list[str]] = command_of
) -> tuple[list[BenchRow], list[BenchFailure]]:
    """Rows of those that ended well, and those that did not."""
    rows: list[BenchRow] = []
    failures: list[BenchFailure] = []
    for number, name in enumerate(names, 1):
        say(f"bench {name} ({number} of {len(names)})")
        try:
            rows += BENCHES[name](name, _figures(command(name), say))
        except (RuntimeError, ValueError, KeyError, TypeError, OSError) as error:
            failures.append(BenchFailure(name, str(error)))
            say(f"bench {name} failed: {error}")
    return rows, failures


def _figures(command: list[str], say: Say) -> Any:
    """What a benchmark printed as JSON, its progress said as it comes. Raises RuntimeError with its last line."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed.json"
        child = start_watched(command, log=printed, stderr=subprocess.PIPE)
        try:
            last = "it said nothing"
            for raw in child.process.stderr or ():
                line = raw.decode(errors="replace").rstrip()
                last = line or last
                say(f"  {line}")
            if code := child.process.wait():
                raise RuntimeError(f"exit code {code}: {last[-300:]}")
            return msgspec.json.decode(printed.read_bytes())
        finally:
            end(child)
            if child.process.stderr is not None:
                child.process.stderr.close()
