"""Putting tasks and demonstrations into the log.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with

MapOption = Annotated[list[str], typer.Option("--map", help="Column of a field, as field=column; meta.name too.")]
SplitOption = Annotated[str, typer.Option(help="Split of rows that name none.")]


def load_tasks(
    file: Annotated[Path | None, typer.Argument(help="JSONL, CSV, Parquet, or a folder saved by datasets.")] = None,
    use: Annotated[str, typer.Option("--use", help="A taskset instead of a file, as module:name.")] = "",
    options: Annotated[list[str], typer.Option("--option", help="Option of the taskset, as name=value.")] = [],  # noqa: B006
    fields: MapOption = [],  # noqa: B006
    split: SplitOption = "",
    rates_from: Annotated[
        str, typer.Option(metavar="APP", help="Give tasks the success rates that this app's log has recorded.")
    ] = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Load tasks of a file, {"id": …, "messages": […] or "prompt": …, "answer": …} a row, or of a taskset.

    Broken rows are named and passed over. The same command, run again after an interruption, continues there.
    With --rates-from the tasks stage makes a difficulty of what an earlier run recorded, and \\[tasks.difficulty] may drop
    what was too easy or too hard there.

    Example: [cyan]headrace load tasks gsm8k.parquet --map prompt=question[/], or
    [cyan]headrace load tasks --use actors.tasksets.reasoning_gym:reasoning_gym --option generator=chain_sum[/]
    """
    from infra.cli.data.load import run_load_tasks

    exit_with(
        lambda: run_load_tasks(file, use, options, config, sets, fields=fields, split=split, rates_from=rates_from)
    )


def load_experts(
    file: Annotated[Path, typer.Argument(help="JSONL, CSV, Parquet, or a folder saved by datasets.")],
    fields: MapOption = [],  # noqa: B006
    split: SplitOption = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Load demonstrations: {"id": …, "messages": […] or "prompt": …, "response": …}, tokenized as the model does.

    Example: [cyan]headrace load experts worked.jsonl[/]
    """
    from infra.cli.data.load import run_load_answers

    exit_with(lambda: run_load_answers("experts", file, config, sets, fields=fields, split=split))


def load_pairs(
    file: Annotated[Path, typer.Argument(help="JSONL, CSV, Parquet, or a folder saved by datasets.")],
    fields: MapOption = [],  # noqa: B006
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Load preference pairs: {"id": …, "messages": […] or "prompt": …, "chosen": …, "rejected": …}, for a lane with dpo.

    Example: [cyan]headrace load pairs preferences.jsonl[/]
    """
    from infra.cli.data.load import run_load_answers

    exit_with(lambda: run_load_answers("pairs", file, config, sets, fields=fields))


def forget(
    user: Annotated[str, typer.Option("--user", help="As requests named them: user, or safety_identifier.")],
    tenant: Annotated[str, typer.Option(help="Tenant of the API key of those requests.")] = "default",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    wait: Annotated[str, typer.Option(help='For a checkpoint that holds nothing of it; "" does not wait.')] = "10m",
) -> None:
    """Destroy a user's keys, so that nothing sealed for them can be opened again, and say what had been learned from it.

    Pending and buffered data, all that was made from it, and what was written about it, is dropped by the roles that hold it;
    while a trainer runs, the command ends with its first checkpoint after that.
    Names the versions that have learned from it, and the steps that replay can no longer reproduce.
    The event is in the log, without the user's name. It cannot be undone.

    Example: [cyan]headrace forget --user ann@example.org --tenant acme --json[/]
    """
    from infra.cli.data.forget import run_forget

    exit_with(lambda: run_forget(user, tenant, config, sets, as_json=as_json, wait=wait))


def load_prompts(
    count: Annotated[int, typer.Argument(min=1, help="Newest records to delete at most.")] = 200,
    suite: Annotated[str, typer.Option(help="Eval suite they become; [master.gate.replies] names it.")] = "production",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Load recorded production prompts as an eval suite: the gate compares a candidate's answers to them with the stable
    version's. What named users asked is left out: it is sealed, so that it can be forgotten.

    Example: [cyan]headrace load prompts 200[/]
    """
    from infra.cli.data.load import run_load_prompts

    exit_with(lambda: run_load_prompts(count, suite, config, sets))


def skip(
    group: Annotated[
        Literal["tasks", "explore", "verify", "collect"],
        typer.Argument(help="Who is stuck: a stage of the stream workers, or the explorers."),
    ],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Go on behind records that retention deleted before they were read, and say which are lost.

    A stage that was away for longer than [bold]\\[keep] replay[/] stops instead of skipping anything by itself. Stop all
    processes of the group first. Each loss is in dead-letters.

    Example: [cyan]headrace skip verify[/]
    """
    from infra.cli.data.skip import run_skip

    exit_with(lambda: run_skip(group, config, sets))


def create_topic(
    name: Annotated[str, typer.Argument(help="Its full name, as in from = { topic = NAME }.")],
    partitions: Annotated[int, typer.Option(min=1, help="How many workers may read it at once.")] = 1,
    keep: Annotated[str, typer.Option(help="How long events stay, such as 7d.", show_default="[keep] replay")] = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Make a topic that a feedback source names and the broker does not have. An existing topic stays unchanged.

    Stream workers that wait for it begin to read it by themselves. The embedded broker is started where it does not run.

    Example: [cyan]headrace topic create zendesk.closed[/]
    """
    from infra.cli.data.topic import run_create_topic

    exit_with(lambda: run_create_topic(name, config, sets, partitions=partitions, keep=keep))


def create_key(
    tenant: Annotated[str, typer.Option(help="Whose answers and feedback these are.")] = "default",
    scope: Annotated[
        str,
        typer.Option(
            help="Any of serve, feedback, admin (the gateway's), look, operate, unseal (the console's), with commas."
        ),
    ] = "serve,feedback",
    train: Annotated[
        str, typer.Option(help="yes, no or unset: may what this key serves be trained on? See gateway.train_on.")
    ] = "unset",
    rpm: Annotated[int, typer.Option(min=0, help="Requests a minute at each gateway, 0 for no limit.")] = 0,
    tpm: Annotated[int, typer.Option(min=0, help="Tokens a minute at each gateway, 0 for no limit.")] = 0,
    expires: Annotated[str, typer.Option(help='How long it lives, such as "30d".')] = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Make a key and print it, once: the store keeps a hash. Gateways know it within gateway.keys_reload_s.

    Example: [cyan]headrace keys create --tenant acme --train yes --rpm 600[/]
    """
    from infra.cli.data.keys import run_create

    exit_with(lambda: run_create(config, sets, tenant, scope, train, rpm, tpm, expires))


def list_keys(config: ConfigOption = DEFAULT, sets: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """List the keys, without their secrets."""
    from infra.cli.data.keys import run_list

    exit_with(lambda: run_list(config, sets, as_json))


def revoke_key(
    key: Annotated[str, typer.Argument(help="Id of the key, as listed, or the key itself.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """End a key. Gateways refuse it within gateway.keys_reload_s."""
    from infra.cli.data.keys import run_revoke

    exit_with(lambda: run_revoke(config, sets, key))
