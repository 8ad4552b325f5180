"""Ours beside its peers: what a round took, and the ratios that users choose by."""

import io
import subprocess
import sys

from rich.console import Console

from infra.cli.bench.beside import Beside, Spent, compared
from infra.cli.bench.common.children import cpu_s
from infra.cli.bench.tables import beside_table


def test_ratios_are_of_best_rounds_and_of_median_rounds() -> None:
    spent = {
        "loop": [Spent(3.0, 1.0), Spent(1.0, 1.0), Spent(2.0, 1.0)],
        "headrace": [Spent(2.0, 9.0), Spent(4.0, 6.0), Spent(6.0, 3.0)],
    }
    ours, loop = compared("verify", spent, 1000, {"loop": 1.0})
    assert (ours.name, ours.times, ours.target) == ("headrace", None, None)
    assert (ours.cpu_us, ours.wall_us) == ((2000.0, 4000.0), (3000.0, 6000.0))
    assert (loop.times, loop.target) == ((0.5, 0.5), 1.0), "below 1 the peer is cheaper"


def test_a_table_has_a_row_for_each_contestant_and_the_target_where_there_is_one() -> None:
    found = [
        Beside(case="verify", name="headrace", cpu_us=(100.0, 120.0), wall_us=(300.0, 310.0)),
        Beside(case="verify", name="loop", cpu_us=(50.0, 90.0), wall_us=(1.0, 2.0), times=(0.5, 0.75), target=1.0),
        Beside(case="verify", name="other", cpu_us=(50.0, 90.0), wall_us=(1.0, 2.0), times=(0.5, 0.75)),
    ]
    console = Console(file=io.StringIO(), width=140)
    console.print(beside_table("hop", found))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "100, 120" in next(line for line in lines if "headrace " in line and "verify" in line)
    assert "0.50, 0.75 times" in (row := next(line for line in lines if " loop " in line)) and "at least 1" in row
    assert "at least" not in next(line for line in lines if " other " in line)


def test_processor_time_is_of_a_process_and_of_what_it_started() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\n"
    both = (
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {burn + 'input()'!r}])\n{burn}input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", both], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            process.stdout.readline()
        assert cpu_s(process.pid) >= 0.4
        process.kill()
    assert cpu_s(process.pid) == 0.0, "one that has ended"
