"""The commands that begin something: demo, up, check.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from infra.cli.options import DEFAULT, ConfigOption, SetOption, exit_with, with_flags


class DemoFlags(msgspec.Struct, frozen=True):
    """Run of the demo."""

    directory: Annotated[Path, typer.Option("--dir", help="Where the run lives; the same folder resumes.")] = Path(
        "runs/demo"
    )
    task: Annotated[
        str,
        typer.Option(
            help="instructions, or a toy: add, guess (several turns with an environment) or shapes (pictures)."
        ),
    ] = "instructions"
    model: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="A chat model for the task instructions.", show_default="SmolLM2-135M-Instruct"
        ),
    ] = ""
    minutes: Annotated[
        float,
        typer.Option(help="Time after which no more tasks are issued.", show_default="10; add and shapes 4, traffic 9"),
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed of the model, the tasks and the draws.")] = 0
    engine: Annotated[
        str, typer.Option(help="vllm or torch; torch for shapes, and with --traffic, where two fit on two cores.")
    ] = ""
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Learn from simulated users' feedback on a gateway's answers.")
    ] = False
    control: Annotated[
        str,
        typer.Option(
            help="none, shuffled (advantages permuted), sft (supervised share alone) or rl (no demonstrations)."
        ),
    ] = "none"
    agent: Annotated[
        str, typer.Option(metavar="URL", help="A service that plays guess instead of the built-in workflow.")
    ] = ""


@with_flags
def demo(
    *,
    flags: DemoFlags,
    sets: SetOption = [],  # noqa: B006 (typer copies it)
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report.")] = False,
) -> None:
    """Train a small model through the whole system, and show what happens.

    Starts an embedded Kafka broker and one process per role, warms the model up on demonstrations, then reinforces it.
    The folder keeps everything: after Ctrl-C the same command continues where it stopped.
    Ends with a table, report.json and a plot.

    With --traffic nothing but the warm-up is given: users ask a served gateway, rate late, correct, withdraw, and the gate
    decides which version they get.

    Example: [cyan]headrace demo --traffic --dir runs/traffic[/]
    """
    from infra.cli.demo.demo import run_demo
    from infra.cli.demo.settings import DemoOptions, task_of

    def run() -> Coroutine[Any, Any, int]:
        asked = "traffic" if flags.traffic else flags.task
        options = DemoOptions(
            directory=flags.directory,
            task=asked,
            model=Path(flags.model).resolve() if flags.model else None,
            minutes=flags.minutes or task_of(asked).minutes,
            seed=flags.seed,
            engine=flags.engine or task_of(asked).engines[0],
            control=flags.control,
            quiet=as_json,
            agent=flags.agent,
            sets=tuple(sets),
        )
        return run_demo(options)

    exit_with(run)


def up(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006 (typer copies it)
    """Start the broker (unless one is configured) and one process per role; Ctrl-C stops them.

    A role that dies, or that something else ends by a signal, is started again; its output goes to logs/ next to the
    TOML. So `kill` of one role has it read changed plugins and settings. A role that cannot start for a
    cause that a restart cannot fix ends all; the console may fail alone.

    Example: [cyan]headrace up -c support/headrace.toml --set trainer.learning_rate=1e-6[/]
    """
    from infra.cli.run.up import run_up

    exit_with(lambda: run_up(config, sets))


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    model: Annotated[str, typer.Option(help="Model folder, or a name in the local Hugging Face cache.")] = "model",
    engine: Annotated[str, typer.Option(help="vllm or torch.")] = "vllm",
    example: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="EXAMPLE",
            help="agent (learns from traffic), sorting (tasks with answers), guess (turns with an environment), program (an "
            "agent that knows a base URL), openai_agents (one of that SDK), verifiers (environments of that package) or "
            "machines (one trainer on several).",
        ),
    ] = "agent",
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Write a model too: 0.9 M parameters with random weights, to try things with."),
    ] = False,
) -> None:
    """Write a folder to begin with: a commented headrace.toml, a plugin folder and a README.

    Example: [cyan]headrace init support --model Qwen/Qwen3-0.6B[/], [cyan]headrace init mine --from program --tiny[/]
    """
    from infra.cli.commands.init import run_init

    exit_with(lambda: run_init(directory, model, engine, example, tiny=tiny))


def check(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    *,
    create: Annotated[bool, typer.Option("--create", help="Create missing topics in the broker.")] = False,
    connect: Annotated[
        bool, typer.Option("--connect", help="Try broker, topics, groups and store instead, and say what is missing.")
    ] = False,
    role: Annotated[
        str,
        typer.Option("--role", help="Whose rights --connect tries: master, train, process, explore, serve, operator."),
    ] = "operator",
) -> None:
    """Check the settings, plugins, log and store, and show the resolved chain of each stage.

    Whatever a role would refuse at its start is refused here: unknown keys, plugins that do not load, wrong options,
    a model or a secret that is not there, a log and a store that do not belong together. No weights are read.

    With --connect everything that the roles use is tried from this machine, as the user of these settings: the broker, reading
    and writing each topic, each group, and put, list, get and delete in the store. Nothing is left behind. With --role only
    the rights that this role needs are tried. Exit code 1: one is missing.

    Example: [cyan]headrace check --create[/] also creates the topics that are missing.
    """
    from infra.cli.check.check import run_check

    async def tried() -> int:
        from infra.cli.check.connect import run_connect

        return await run_connect(config, sets, role)

    exit_with(tried if connect else lambda: run_check(config, sets, create))
