"""`headrace bench all`: every benchmark that is declared.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.bench.found import Found, some_of, tell


def every_of(known: Collection[str]) -> Callable[..., Found]:
    """The command over these benchmarks."""

    def every(
        only: Annotated[str, typer.Option(help="Benchmarks by commas; every one where left out.")] = "",
        quick: Annotated[
            bool,
            typer.Option(
                "--quick", help="A first look: the smallest sizes, five minutes each, and what takes longer left out."
            ),
        ] = False,
        out: Annotated[
            Path, typer.Option(help="Folder for all.json, of a first look quick.json: written anew as each ends.")
        ] = Path("bench"),
    ) -> Found:
        """Every benchmark there is, one after the other, those that take least first, and one table of all targets at the end.

        What is left out keeps the figures of an earlier run in the same folder, with their date. Each needs the machine for
        itself, and has a time of its own; one that fails is one line, and the rest continues. Exit code 1: one failed. Targets
        are shown, and change no exit code. Hours, of which off-policy and mix take most.
        """
        from infra.cli.bench.all import in_order, run
        from infra.cli.bench.ends import BenchEnd, as_figures, read_ends, with_end, write_ends
        from infra.cli.bench.tables import all_table

        file = out / ("quick.json" if quick else "all.json")
        read_ends(file, known)  # one that cannot be gone on with is refused before hours of work

        def ended(one: BenchEnd) -> None:
            write_ends(file, with_end(read_ends(file, known), one))

        done = run(in_order(some_of("--only", only, known) or known), tell, quick=quick, ended=ended)
        failed = any(one.is_run and one.why for one in done)
        found = read_ends(file, known)
        return Found(as_figures(found), lambda: [all_table(found)], width=190, code=1 if failed else 0)

    return every
