"""`headrace bench codec|hop|transport|all`: ours beside its peers, as a table or as JSON."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

from infra.cli.bench.beside import OURS, Beside
from infra.cli.benches import number, shapes_table, words
from infra.cli.terminal import Screen
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from infra.cli.bench.all import BenchRow


def run_codec(repeat: int, as_json: bool) -> int:
    """Run `infra/cli/bench/codec.py`."""
    from infra.cli.bench.codec import rows, run

    found = run(Screen(stderr=True).print, rounds=repeat)
    if as_json:
        print(json.dumps(found))
    else:
        Screen(width=170).print(shapes_table("codec", rows(found)))
    return 0


def run_hop(repeat: int, groups: int, as_json: bool) -> int:
    """Run `infra/cli/bench/hop.py`."""
    from infra.cli.bench.hop import HopPlan, run

    return _show("hop", run(HopPlan(rounds=repeat, groups=groups), Screen(stderr=True).print), as_json)


def run_transport(repeat: int, answers: int, as_json: bool) -> int:
    """Run `infra/cli/bench/transport.py`."""
    from infra.cli.bench.transport import TransportPlan, run

    return _show("transport", run(TransportPlan(rounds=repeat, answers=answers), Screen(stderr=True).print), as_json)


def _show(name: str, found: Sequence[Beside], as_json: bool) -> int:
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        Screen(width=130).print(beside_table(name, found))
    return 0


def beside_table(name: str, found: Sequence[Beside]) -> Table:
    """One row a contestant; of each figure the best round and the median one."""
    table = Table("case", "", title=f"bench {name}: µs of an answer, best round and median")
    for title in ("CPU", "wall", "headrace is cheaper by", "target"):
        table.add_column(title, justify="right")
    for one in found:
        times, target = "", ""
        if one.times is not None:
            times = f"{one.times[0]:.2f}, {one.times[1]:.2f} times"
        if one.target is not None:
            target = f"at least {number(one.target)}"
        met = one.times is not None and one.target is not None and one.times[0] >= one.target
        style = "" if one.target is None else "green" if met else "red"
        cells = [", ".join(number(round(us, 1)) for us in pair) for pair in (one.cpu_us, one.wall_us)]
        table.add_row(one.case if one.name == OURS else "", one.name, *cells, Text(times, style=style), target)
    return table


def run_all(names: str, as_json: bool) -> int:
    """Run the benchmarks of `infra/cli/bench/all.py`, or those named by commas; 1 where one failed. Raises ConfigError for a
    name it does not know.
    """
    from infra.cli.bench.all import BENCHES, run

    wanted = [name for name in names.split(",") if name] or list(BENCHES)
    if unknown := [name for name in wanted if name not in BENCHES]:
        raise ConfigError(f"--only: got {unknown[0]!r}, expected some of {', '.join(BENCHES)}")
    rows, failures = run(wanted, Screen(stderr=True).print)
    if as_json:
        print(json.dumps({"rows": msgspec.to_builtins(rows), "failures": msgspec.to_builtins(failures)}))
    else:
        Screen(width=150).print(all_table(rows))
    for one in failures:
        Screen(stderr=True).print(f"bench {one.bench} has no figures: {one.why}")
    return 1 if failures else 0


def all_table(rows: "Sequence[BenchRow]") -> Table:
    """One row a figure, green where its target is met and red where it is not."""
    table = Table("bench", "what", title="bench all")
    for title in ("headrace", "peer", "ratio or figure", "target"):
        table.add_column(title, justify="right")
    for one in rows:
        has_target = (one.low, one.high) != (float("-inf"), float("inf"))
        style = ("green" if one.is_met else "red") if has_target else ""
        both = ["" if value is None else number(round(value, 1)) for value in (one.ours, one.peer)]
        target = words(one.low, one.high) if has_target else ""
        table.add_row(one.bench, one.what, *both, Text(number(round(one.value, 3)), style=style), target)
    return table
