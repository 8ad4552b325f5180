"""The benchmarks of the whole loop and of whole processes. One function each, by the name of its command."""

from typing import Annotated

import msgspec
import typer

from infra.cli.bench.found import Found, one_of, some_of, tell


def overlap(
    repeat: Annotated[int, typer.Option(min=1, help="Draws of answer lengths, of which the mean is shown.")] = 2,
    staleness: Annotated[int, typer.Option(min=1, help="Versions that a token may be old.")] = 2,
) -> Found:
    """The whole loop beside its own synchronous mode, under log-normal answer lengths: how busy each side is, and what it waits
    for. In virtual time: a minute.
    """
    from infra.cli.bench.overlap.overlap import run
    from infra.cli.bench.overlap.plan import OverlapPlan

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
    from infra.cli.bench.growth.start import ROLES, StartPlan, run
    from infra.cli.demo.settings import ENGINES

    wanted = tuple(some_of("--roles", roles, ROLES)) or ROLES
    plan = StartPlan(roles=wanted, rounds=repeat, engine=one_of("--engine", engine, ENGINES), demo=demo)
    return Found(run(plan, tell))


def train(
    seeds: Annotated[int, typer.Option("--seeds", "--repeat", min=1, help="Seeds of task, weights and samples.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Of a side at most, after its warm-up; TRL has 2.2 times what headrace took.")
    ] = 10.0,
    engine: Annotated[str, typer.Option(help="What samples for headrace: vllm or torch.")] = "vllm",
    alone: Annotated[bool, typer.Option(help="Also headrace with rewards alone.")] = True,
) -> Found:
    """Time to 0.9 of the demo's additions from the same warmed-up weights, beside TRL's GRPOTrainer: by the clock and CPU.

    The peer comes from an environment of its own, which `make bench-deps` makes; where it is missing it is named and left
    out. Up to half an hour a seed.
    """
    from infra.cli.bench.beside import OURS
    from infra.cli.bench.learning.train import REWARDS, TrainPlan, run
    from infra.cli.bench.tables import train_table
    from infra.cli.demo.settings import ENGINES

    plan = TrainPlan(
        seeds=tuple(range(seeds)),
        minutes=minutes,
        engine=one_of("--engine", engine, ENGINES),
        sides=(OURS, REWARDS) if alone else (OURS,),
    )
    found = run(plan, tell)
    return Found(msgspec.to_builtins(found), lambda: [train_table(found)], width=170)
