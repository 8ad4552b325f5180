"""The benchmarks of the whole loop and of whole processes. One function each, by the name of its command."""

from typing import Annotated

import typer

from infra.cli.benches import Found, tell


def overlap(
    repeat: Annotated[int, typer.Option(min=1, help="Draws of answer lengths, of which the mean is shown.")] = 2,
    staleness: Annotated[int, typer.Option(min=1, help="Versions that a token may be old.")] = 2,
) -> Found:
    """The whole loop beside its own synchronous mode, under log-normal answer lengths: how busy each side is, and what it waits
    for. In virtual time: a minute.
    """
    from infra.cli.bench.overlap import run
    from infra.cli.bench.overlap_plan import OverlapPlan

    return Found(run(OverlapPlan(seeds=tuple(range(repeat)), staleness=staleness), tell))
