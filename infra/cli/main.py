"""The `headrace` command: what there is to type. Each command is a function in `infra/cli/commands/`.

Bodies import what they need when they run, so that `--help` stays fast and `master` never loads torch.
"""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.commands import capacity, data, govern, look, repeat, roles, start
from infra.cli.options import file_umask
from infra.local.process import SAFE_PATH
from infra.observe.release import full_release

DOCS = Path(__file__).resolve().parents[1] / "docs" / "README.md"
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
    epilog="Exit codes: 0 done, 1 failed, 2 a mistake in settings or on the command line, 3 another"
    " process has taken this role over, 130 stopped with Ctrl-C.\n\n"
    f"Documentation: {DOCS}",
)


def show_version(wanted: bool) -> None:
    """Print it and end."""
    if wanted:
        print(f"headrace {full_release()}")
        raise typer.Exit


@app.callback()
def every(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print release and commit, and end.")
    ] = False,
) -> None:
    """Options of every command."""


load_app = typer.Typer(
    no_args_is_help=True,
    help="Put tasks or demonstrations into the log, from JSONL files. Rows whose id is there already are left out, so a "
    "load can be repeated.",
)
topic_app = typer.Typer(no_args_is_help=True, help="Topics that feedback sources read.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys of the gateway: create, list, revoke.")
app.add_typer(keys_app, name="keys", rich_help_panel="Data")
app.add_typer(load_app, name="load", rich_help_panel="Data")
app.add_typer(topic_app, name="topic", rich_help_panel="Data")

app.command(rich_help_panel="Start")(start.demo)
app.command(rich_help_panel="Start")(start.init)
app.command(rich_help_panel="Start")(start.up)
app.command(rich_help_panel="Start")(start.check)
app.command(rich_help_panel="Start")(capacity.plan)
app.command(rich_help_panel="Roles")(roles.master)
app.command(rich_help_panel="Roles")(roles.explore)
app.command(rich_help_panel="Roles")(roles.process)
app.command(rich_help_panel="Roles")(roles.train)
app.command(rich_help_panel="Roles")(roles.serve)
app.command(rich_help_panel="Look")(look.status)
app.command(rich_help_panel="Look")(look.console)
app.command(rich_help_panel="Look")(look.peek)
app.command(rich_help_panel="Look")(look.audit)
app.command(rich_help_panel="Look")(look.trace)
app.command("eval", rich_help_panel="Look")(look.evaluate)
app.command(rich_help_panel="Data")(data.forget)
app.command(rich_help_panel="Data")(data.skip)
app.command("export-model", rich_help_panel="Serve")(govern.export_model)
app.command(rich_help_panel="Serve")(govern.channel)
app.command(rich_help_panel="Serve")(govern.promote)
app.command(rich_help_panel="Serve")(govern.pin)
app.command(rich_help_panel="Serve")(govern.unpin)
app.command(rich_help_panel="Serve")(govern.rollback)
app.command(rich_help_panel="Serve")(govern.pause)
app.command(rich_help_panel="Serve")(govern.resume)
app.command(rich_help_panel="Repeat")(repeat.backup)
app.command(rich_help_panel="Repeat")(repeat.restore)
app.command(rich_help_panel="Repeat")(repeat.recover)
app.command(rich_help_panel="Repeat")(repeat.replay)
app.command(rich_help_panel="Repeat")(repeat.export)
app.command(rich_help_panel="Repeat")(repeat.reprocess)
keys_app.command("create")(data.create_key)
keys_app.command("list")(data.list_keys)
keys_app.command("revoke")(data.revoke_key)
topic_app.command("create")(data.create_topic)
load_app.command("tasks")(data.load_tasks)
load_app.command("experts")(data.load_experts)
load_app.command("pairs")(data.load_pairs)
load_app.command("prompts")(data.load_prompts)


def main() -> None:
    """Entry point of the `headrace` command."""
    # A shell without job control makes its background processes ignore Ctrl-C, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(file_umask(os.environ))
    os.environ[SAFE_PATH] = (
        "1"  # of every process that this one or its libraries start; programs and tools do not inherit it
    )
    app()


if __name__ == "__main__":
    main()
