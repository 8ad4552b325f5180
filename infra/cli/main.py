"""The `headrace` command: what there is to type, and how mistakes are told.

Bodies import what they need when they run, so that `--help` stays fast and `master` never loads torch.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", help="The TOML file.", show_default=True, metavar="FILE", rich_help_panel="Settings"
    ),
]
SetOption = Annotated[
    list[str],
    typer.Option("--set", help="Override one setting, as a.b=c.", metavar="A.B=C", rich_help_panel="Settings"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
DEFAULT = Path("headrace.toml")

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Train LLM agents continually from their own rollouts and from production traffic, over a durable log.\n\n"
    "Actors observe, streams judge, the trainer learns; the log is the only thing between them. Start with "
    "[bold]headrace demo[/]: it trains a small model through Kafka, Faust and vLLM on this machine. For an agent of your "
    "own write a headrace.toml, see what it resolves to with [bold]headrace check[/], load tasks, and start everything "
    "with [bold]headrace up[/] or one role per machine. Then [bold]status[/], [bold]peek[/] and [bold]audit[/] tell what "
    "happens.",
    epilog="Exit codes: 0 done, 1 failed, 2 a mistake in settings or on the command line, 130 stopped with Ctrl-C.",
)
load_app = typer.Typer(
    no_args_is_help=True,
    help="Put tasks or demonstrations into the log, from JSONL files. Rows whose id is there already are left out, so a "
    "load can be repeated.",
)
bench_app = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine: figures beside what was aimed at. Ratios are of things timed side by side.",
)
app.add_typer(load_app, name="load", rich_help_panel="Data")
app.add_typer(bench_app, name="bench", rich_help_panel="Look")


@app.command(rich_help_panel="Start")
def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where the run lives; the same folder resumes.")] = Path(
        "runs/demo"
    ),
    minutes: Annotated[float, typer.Option(help="Stop issuing tasks after so long.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the model, the tasks and the draws.")] = 0,
    engine: Annotated[str, typer.Option(help="vllm or torch.")] = "vllm",
    control: Annotated[
        str,
        typer.Option(
            help="none, shuffled (advantages permuted), sft (supervised share alone) or rl (no demonstrations)."
        ),
    ] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print only the report.")] = False,
) -> None:
    """Train a small model on arithmetic through the whole system, and show what happens.

    Starts an embedded Kafka broker and one process per role, warms the model up on demonstrations, then reinforces it.
    The folder keeps everything: after Ctrl-C the same command goes on where it was.
    Ends with a table, report.json and a plot.

    Example: [cyan]headrace demo --engine torch --dir runs/quick --minutes 2[/]
    """
    from infra.demo.demo import run_demo
    from infra.demo.settings import DemoOptions

    options = DemoOptions(
        directory=directory, minutes=minutes, seed=seed, engine=engine, control=control, quiet=as_json
    )
    _exit_with(lambda: run_demo(options))


@app.command(rich_help_panel="Start")
def up(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006 (typer copies it)
    """Start the broker (unless one is configured) and one process per role; Ctrl-C stops them.

    A role that dies is started again; what each says goes to logs/ beside the TOML.

    Example: [cyan]headrace up -c support/headrace.toml --set trainer.learning_rate=1e-6[/]
    """
    from infra.cli.up import run_up

    _exit_with(lambda: run_up(config, sets))


@app.command(rich_help_panel="Start")
def check(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    create: Annotated[bool, typer.Option("--create", help="Create missing topics in the broker.")] = False,
) -> None:
    """Check the settings and plugins, and show the resolved chain of each stage.

    Whatever a role would refuse at its start is refused here: unknown keys, plugins that do not load, wrong options.

    Example: [cyan]headrace check --create[/] also creates the topics that are missing.
    """
    from infra.cli.check import run_check

    _exit_with(lambda: run_check(config, sets, create))


@app.command(rich_help_panel="Roles")
def master(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Issue tasks as the staleness budget allows, re-issue what nobody finished, request evals.

    One is enough. It keeps no state of its own: everything is counted again from the log when it starts.
    """
    _role("master", config, sets)


@app.command(rich_help_panel="Roles")
def explore(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Run tasks on an engine, publish experiences, follow new policies while generating.

    Any number of them share the tasks. A new policy is loaded between two tokens; no request is dropped for it.

    Example: [cyan]headrace explore --set engine.use=actors.engines.torch:TorchEngine[/]
    """
    _role("explore", config, sets)


@app.command(rich_help_panel="Roles")
def process(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Run the stream processors: tasks, verify, collect and the feedback sources.

    Any number of them share the partitions; killed or rebalanced, they decide as one that was never disturbed.
    """
    _role("process", config, sets)


@app.command(rich_help_panel="Roles")
def train(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Train on the buffer, journal every batch, publish every policy.

    One at a time: a second one takes the lease and the first ends. After a kill it goes on with the same batches.
    """
    _role("train", config, sets)


@load_app.command("tasks")
def load_tasks(
    file: Annotated[Path | None, typer.Argument(help="JSONL, one task a line.")] = None,
    use: Annotated[str, typer.Option("--use", help="A taskset instead of a file, as module:name.")] = "",
    options: Annotated[list[str], typer.Option("--option", help="Option of the taskset, as name=value.")] = [],  # noqa: B006
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Load tasks of a file, {"id": …, "messages": […] or "prompt": …, "answer": …} a line, or of a taskset.

    Example: [cyan]headrace load tasks arithmetic.jsonl[/], or
    [cyan]headrace load tasks --use actors.tasksets.reasoning_gym:reasoning_gym --option generator=chain_sum[/]
    """
    from infra.cli.load import run_load_tasks

    _exit_with(lambda: run_load_tasks(file, use, options, config, sets))


@load_app.command("experts")
def load_experts(
    file: Annotated[Path, typer.Argument(help="JSONL, one demonstration a line.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Load demonstrations: {"id": …, "messages": […] or "prompt": …, "response": …}, tokenized as the model does.

    Example: [cyan]headrace load experts worked.jsonl[/]
    """
    from infra.cli.load import run_load_experts

    _exit_with(lambda: run_load_experts(file, config, sets))


@app.command(rich_help_panel="Look")
def status(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if there is an alarm, for monitoring.")] = False,
    max_lag: Annotated[int, typer.Option(help="Records waiting for a stage above which its lag is an alarm.")] = 10_000,
) -> None:
    """Roles, versions, rates, lags, drops by reason, and alarms.

    Read from the log alone, so it works from any machine that reaches the broker.
    Rates are those of the last minute.
    An alarm is a role that fell silent, a stage that lags, a refused policy, or a diagnostic out of its range.

    Example: [cyan]headrace status --check --json[/]
    """
    from infra.cli.status import run_status

    _exit_with(lambda: run_status(config, sets, as_json=as_json, check=check, max_lag=max_lag))


@app.command(rich_help_panel="Look")
def peek(
    topic: Annotated[str, typer.Argument(help="With or without the app's prefix.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many of the newest records.")] = 5,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what arrives.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the newest records of a topic as a person reads them.

    Topics: taskset.raw, taskset, tasks, experiences, experts, feedback, verified, buffer, evals, batches,
    progress, policies, dead-letters.
    With --json each record is one line.

    Example: [cyan]headrace peek buffer -n 3[/], [cyan]headrace peek dead-letters --follow[/]
    """
    from infra.cli.peek import run_peek

    _exit_with(lambda: run_peek(topic, config, sets, last=last, follow=follow, as_json=as_json))


@app.command(rich_help_panel="Look")
def audit(config: ConfigOption = DEFAULT, sets: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """Account for every published experience: trained, dropped with a reason, or pending.

    Reads the whole kept log and may run at any time; after a drain nothing is pending.
    Exits with 1 if an experience was trained twice, or trained without having been published.

    Example: [cyan]headrace audit --json | jq .dropped[/]
    """
    from infra.cli.audit import run_audit

    _exit_with(lambda: run_audit(config, sets, as_json))


@bench_app.command("codec")
def bench_codec(as_json: JsonOption = False) -> None:
    """The experience block against msgspec lists and zstd-1."""
    from infra.cli.bench import run_bench

    _exit_with(lambda: run_bench("codec", as_json))


@bench_app.command("delta")
def bench_delta(as_json: JsonOption = False) -> None:
    """The weight delta of one reinforcement step in bfloat16, against all weights."""
    from infra.cli.bench import run_bench

    _exit_with(lambda: run_bench("delta", as_json))


@bench_app.command("reload")
def bench_reload(as_json: JsonOption = False) -> None:
    """Hot reloads under load: pause, and memory per version."""
    from infra.cli.bench import run_bench

    _exit_with(lambda: run_bench("reload", as_json))


def _role(role: str, config: Path, sets: list[str]) -> None:
    from infra.cli.roles import run_role

    _exit_with(lambda: run_role(role, config, sets))


def _exit_with(body: Callable[[], Coroutine[Any, Any, int] | int]) -> None:
    """Run a command body; its mistakes become one line and an exit code: 2 for settings, 1 for the rest."""
    try:
        result = body()
        code = result if isinstance(result, int) else asyncio.run(result)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `headrace peek … | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _tell(error)
    raise typer.Exit(code)


def _tell(error: Exception) -> int:
    """Print what we raise on purpose as one line each and return the exit code; any other error deserves its traceback."""
    from schemas.errors import ConfigError, HeadraceError

    told = _leaves(error)
    if not all(isinstance(one, HeadraceError) for one in told):
        raise error
    for line in dict.fromkeys(f"headrace: {one}" for one in told):
        print(line, file=sys.stderr)
    return 2 if all(isinstance(one, ConfigError) for one in told) else 1


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error]


def main() -> None:
    """Entry point of the `headrace` command."""
    app()


if __name__ == "__main__":
    main()
