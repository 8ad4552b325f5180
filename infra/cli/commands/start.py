"""`headrace demo`."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from infra.cli.options import command


class DemoFlags(msgspec.Struct, frozen=True):
    """Run of the demo."""

    directory: Annotated[Path, typer.Option("--dir", help="Folder of the run; an existing run continues.")] = Path(
        "runs/demo"
    )
    task: Annotated[
        str,
        typer.Option(help="Task: instructions, or a toy: add, guess (turns with an environment) or shapes (images)."),
    ] = "instructions"
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Chat model for the task instructions.", show_default="SmolLM2-135M-Instruct"
        ),
    ] = ""
    minutes: Annotated[
        float,
        typer.Option(help="Time after which no more tasks are issued.", show_default="10; add and shapes 4, traffic 9"),
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the draws.")] = 0
    engine: Annotated[
        str, typer.Option(help="Engine: vllm or torch. Default: vllm; torch for shapes and with --traffic.")
    ] = ""
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Learn from simulated users' feedback on a gateway's answers.")
    ] = False


@command
def demo(
    flags: DemoFlags,
    sets: Annotated[list[str], typer.Option("--set", help="Override one setting, as a.b=c.", metavar="A.B=C")] = [],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report.")] = False,
) -> Coroutine[Any, Any, int]:
    """Train a small model through the whole system, and show the result.

    The demo starts an embedded Kafka broker and one process per role, warms the model up on demonstrations, then trains it by
    reinforcement. After Ctrl-C the same command continues from the folder. It ends with a table, report.json and a plot.

    With --traffic the model learns only from simulated users after the warm-up: they send requests, rate late, correct and
    withdraw, and the gate decides which version they get.

    Example: [cyan]headrace demo --traffic --dir runs/traffic[/]
    """
    from infra.cli.demo.demo import run_demo
    from infra.cli.demo.settings import DemoOptions, task_of

    asked = "traffic" if flags.traffic else flags.task
    options = DemoOptions(
        directory=flags.directory,
        task=asked,
        model=Path(flags.model).resolve() if flags.model else None,
        minutes=flags.minutes or task_of(asked).minutes,
        seed=flags.seed,
        engine=flags.engine or task_of(asked).engines[0],
        quiet=as_json,
        sets=tuple(sets),
    )
    return run_demo(options)
