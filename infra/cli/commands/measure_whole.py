"""The benchmarks of the whole loop and of whole processes. One function each, by the name of its command."""

from typing import Annotated

import typer

from infra.cli.benches import Found, one_of, some_of, tell


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


def start(
    repeat: Annotated[int, typer.Option(min=1, help="Rounds of each, cold and warm; the best is shown.")] = 1,
    roles: Annotated[str, typer.Option(help="Roles, by commas; all where left out.")] = "",
    engine: Annotated[str, typer.Option(help="What samples: vllm or torch.")] = "vllm",
    demo: Annotated[bool, typer.Option(help="Also the demo, until its first experience.")] = True,
) -> Found:
    """Each role from the start of its process until it works, with nothing compiled and with all of it; the demo's first
    experience. Minutes.
    """
    from infra.cli.bench.start import ROLES, StartPlan, run
    from infra.cli.demo.settings import ENGINES

    wanted = tuple(some_of("--roles", roles, ROLES)) or ROLES
    plan = StartPlan(roles=wanted, rounds=repeat, engine=one_of("--engine", engine, ENGINES), demo=demo)
    return Found(run(plan, tell))
