"""The `headrace` command with its subcommands.

A command is a function with annotated options. Its module is imported when the command is called or explained, so that `--help`
stays fast and `master` never loads torch.
"""

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from infra.cli.exit_codes import CONFIG_ERROR
from infra.cli.options import file_umask
from infra.local.process import SAFE_PATH
from infra.observe.release import full_release

DOCS = Path(__file__).resolve().parents[1] / "docs" / "README.md"
# Panel of the help → command → its function and its first sentence.
COMMANDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Start": {
        "demo": ("demo.demo:demo", "Train a small model through the whole system, and show the result."),
        "init": ("commands.init:init", "Write a starting folder: a commented headrace.toml, plugins and a README."),
        "up": ("run.up:up", "Start the broker (unless one is configured) and one process per role; Ctrl-C stops them."),
        "check": ("check.check:check", "Check the settings, plugins, log and store, and show each stage's resolved chain."),
        "plan": ("plan.plan:plan", "Plan capacity: needs of the model, and brokers and processes for given rates."),
    },
    "Roles": {
        "master": ("run.roles:master", "Issue tasks as the staleness bound allows, reissue unfinished groups, request evals."),
        "explore": ("run.roles:explore", "Run tasks on an engine, publish experiences, load new versions while generating."),
        "process": ("run.roles:process", "Run the stream processors: tasks, verify, collect and the feedback sources."),
        "train": ("run.roles:train", "Train on the buffer, journal every batch, publish versions."),
        "serve": ("run.roles:serve", "Serve an OpenAI-compatible API on an engine, record answers with consent."),
    },
    "Look": {
        "status": ("look.status:status", "Roles, versions, rates, lags, drops by reason, and alarms."),
        "console": ("console.serve:console", "Show a run in the browser: flow, curves, answers, versions, data."),
        "peek": ("look.peek:peek", "Show the newest records of a topic in readable form."),
        "audit": ("look.audit:audit_log", "Account for every published experience: trained, dropped for a reason, pending."),
        "trace": ("look.trace:trace", "Follow an answer to the steps that trained on it, or a policy back to its answers."),
    },
    "Data": {
        "forget": ("data.forget:forget", "Destroy a user's keys, so that the user's texts cannot be decrypted again."),
        "skip": ("data.skip:skip", "Skip records that retention deleted before they were read."),
        "keys create": ("data.keys:create", "Create a key and print it once: the store keeps a hash."),
        "keys list": ("data.keys:show_keys", "List the keys, without their secrets."),
        "keys revoke": ("data.keys:revoke", "Revoke a key."),
        "load tasks": ("data.load:tasks", "Load tasks of a file or of a taskset."),
        "load experts": ("data.load:experts", "Load demonstrations, tokenized as the model does."),
        "load pairs": ("data.load:pairs", "Load preference pairs, for a lane with dpo."),
    },
    "Serve": {
        "export-model": ("govern.export_model:export_model", "Write a version as a model folder."),
        "channel": ("govern.channel:channel", "Show the version customers are served, and the newest decisions about it."),
        "promote": ("govern.channel:promote", "Serve a version to customers from now on."),
        "pin": ("govern.channel:pin", "Keep customers on a version, regardless of the gate, until `headrace unpin`."),
        "unpin": ("govern.channel:unpin", "End a pin: customers go to the newest promoted version."),
        "rollback": ("govern.channel:rollback", "Return customers to an older version."),
        "pause": ("govern.channel:pause", "Stop learning while serving continues."),
        "resume": ("govern.channel:resume", "Continue learning after a pause or a drain."),
    },
    "Repeat": {
        "backup": ("repeat.backup:backup", "Copy an app, its topics and its store, while it runs."),
        "restore": ("repeat.backup:restore", "Restore a backup into a broker and a store without data of the app."),
        "recover": ("repeat.recover:recover", "Continue after the loss of the log's data, or show what you can do."),
        "replay": ("repeat.replay:replay", "Train a run again from a checkpoint and the log, and compare the weights."),
        "export": ("repeat.export:export", "Write everything that a replay needs into a file."),
        "reprocess": ("repeat.reprocess:reprocess", "Run a stage over any part of the log again, exactly as the workers do."),
    },
}  # fmt: skip


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called or explained."""

    def __init__(self, path: str, where: str, about: str, panel: str) -> None:
        super().__init__(path.rpartition(" ")[2], help=about, rich_help_panel=panel)
        self._path, self._where, self._panel = path, where, panel

    def load(self) -> TyperCommand:
        """The command itself. Ends with a line where a library is missing."""
        module, _, name = self._where.partition(":")
        try:
            function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        except ModuleNotFoundError as error:
            extra = "console" if self._path == "console" else "streams,gateway,trainer,local"
            print(
                f"headrace: {self._path}: {error.name} is not installed: pip install 'headrace[{extra}]'",
                file=sys.stderr,
            )
            raise typer.Exit(CONFIG_ERROR) from error
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(self.name, rich_help_panel=self._panel)(function)
        command = typer.main.get_command(alone)
        assert isinstance(command, TyperCommand)
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """The commands of COMMANDS that begin with the group's name; for `headrace` itself, commands of a single word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        own = {command.name: command for command in commands_below(self.name or "")}
        self.commands = {str(name): command for name, command in own.items()} | dict(self.commands)


def commands_below(group: str) -> Iterator[LazyCommand]:
    for panel, entries in COMMANDS.items():
        for path, (where, about) in entries.items():
            if path.rpartition(" ")[0] == group.removeprefix("headrace"):
                yield LazyCommand(path, where, about, panel)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {full_release()}")
        raise typer.Exit


app = typer.Typer(
    name="headrace",
    cls=LazyGroup,
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
    " process has taken this role over, 130 stopped with Ctrl-C before its end. [bold]up[/], [bold]console[/] and roles run"
    " until Ctrl-C; once started they exit with 0.\n\n"
    f"Documentation: {DOCS}",
)
for group, about in {
    "keys": "API keys of the gateway: create, list, revoke.",
    "load": "Put tasks or demonstrations into the log, from JSONL files. Rows whose id is there already are left out, so a "
    "load can be repeated.",
}.items():
    app.add_typer(typer.Typer(cls=LazyGroup, no_args_is_help=True, help=about), name=group, rich_help_panel="Data")


@app.callback()
def every(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print release and commit, and end.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    # A shell without job control makes its background processes ignore Ctrl-C, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(file_umask(os.environ))
    os.environ[SAFE_PATH] = (
        "1"  # of every process that this one or its libraries start; programs and tools do not inherit it
    )
    app()


if __name__ == "__main__":
    main()
