"""`headrace reprocess`: the order, a progress bar, and the results as tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from infra.cli.connect import connected, reading
from infra.cli.look.audit import operator
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.settings import Settings, load_settings
from infra.cli.terminal import Screen, bar, print_json, two_columns
from infra.settings.config import Table as Tables
from infra.settings.config import decode, read_toml
from infra.settings.plugin import add_plugin_folders
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from streams.reprocess.letters import LettersReport
    from streams.reprocess.report import ReprocessReport
    from streams.reprocess.run import ReprocessOrder


class ReprocessFlags(msgspec.Struct, frozen=True):
    """Input, settings and result of a reprocess."""

    start: Annotated[
        str,
        typer.Option(
            "--from", help='"beginning", an offset, partition:offset[,…], or a time such as 2026-11-21T12:00.'
        ),
    ] = "beginning"
    stop: Annotated[str, typer.Option("--to", help='"end", or a place as in --from; not included itself.')] = "end"
    topic: Annotated[str, typer.Option(help="Input topic of verify: experiences or experts. Default: both.")] = ""
    diff: Annotated[bool, typer.Option("--diff", help="Compare with the recorded decisions.")] = False
    rescore: Annotated[
        bool, typer.Option("--rescore", help="Call external scores again instead of reusing recorded ones.")
    ] = False


@command
async def reprocess(
    chosen: SettingsFile,
    stage: Annotated[str, typer.Argument(help="Stage: verify, collect, or dead-letters.")],
    flags: ReprocessFlags,
    other: Annotated[
        Path | None,
        typer.Option(
            "--with",
            help="TOML with other rules: complete settings, or tables that override the settings of -c.",
            metavar="FILE",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run a stage over any part of the log again, exactly as the workers do, and show what would have changed.

    The command writes nothing to the app. With the settings and processors of the run, nothing differs. Offsets belong to
    the stage's input: experiences (or --topic), verified. dead-letters delivers each decodable dead letter again
    to its topic.

    Example: [cyan]headrace reprocess verify --from 2026-11-20 --with stricter.toml --diff[/]
    """
    from streams.reprocess.letters import redeliver
    from streams.reprocess.run import INPUTS, ReprocessOrder, plan
    from streams.reprocess.run import reprocess as run_stage

    if stage not in INPUTS:
        raise ConfigError(f"reprocess: got {stage!r}, expected one of {', '.join(INPUTS)}")
    order = msgspec.convert({"stage": stage, **msgspec.structs.asdict(flags)}, ReprocessOrder)
    settings = chosen.load()
    add_plugin_folders(settings.folder, settings.plugins)
    judged_by = settings
    if other is not None:
        judged_by = laid_over(chosen, other)
        add_plugin_folders(judged_by.folder, judged_by.plugins)
    console = Screen(stderr=as_json)
    if stage == "dead-letters":
        refused = [name for name in ("diff", "rescore") if getattr(flags, name)]
        if refused or other is not None:
            raise ConfigError(f"reprocess dead-letters: takes no --{refused[0] if refused else 'with'}")
        async with connected(settings) as log:
            ranges = await plan(log, order)
            with bar(console, "delivering again", sum(part_range.size for part_range in ranges)) as moved:
                letters = await redeliver(log, ranges, moved, by=operator())
        print_json(letters) if as_json else show_letters(console, letters)
        return 1 if letters.refused else 0
    async with reading(settings) as log:
        ranges = await plan(log, order)
        with bar(console, f"reprocessing {stage}", sum(part_range.size for part_range in ranges)) as moved:
            report = await run_stage(log, order, ranges, settings, judged_by.streams(), moved)
    if as_json:
        print_json(msgspec.to_builtins(report) | {"same": report.is_same})
    else:
        show(console, report, order)
    return 0


def laid_over(chosen: SettingsFile, other: Path) -> Settings:
    """The settings of `other`, whole where it names an app, else its tables override those in `config`. Raises ConfigError."""
    if not other.is_file():
        raise ConfigError(f"--with {other}: no such file")
    if "app" in read_toml(other):
        return load_settings(other, chosen.sets)
    whole = merged(read_toml(chosen.config, chosen.sets), read_toml(other))
    return msgspec.structs.replace(decode(whole, Settings, f"--with {other}"), folder=chosen.config.resolve().parent)


def merged(under: Tables, over: Tables) -> Tables:
    """Both tables, each key as `over` has it where it has it.

    >>> merged({"filter": {"a": 1, "b": 2}}, {"filter": {"b": 3}})
    {'filter': {'a': 1, 'b': 3}}
    """
    found = dict(under)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


def show(console: Console, report: "ReprocessReport", order: "ReprocessOrder") -> None:
    rows = [(name, f"{count:,}") for name, count in report_totals(report, order)]
    verdict = "run, not compared"
    if order.diff:
        same = "the same as recorded" if report.is_same else "NOT as recorded"
        verdict = same if report.compared else "nothing to compare with"
    console.print(two_columns(f"{report.stage}: {verdict}", rows))
    if report.changes:
        changes = Table(
            "what", "reason", "count", "for example", "recorded", "now", title="not as recorded", title_justify="left"
        )
        for change in report.changes:
            first = (change.kind, change.reason, f"{change.count:,}")
            for example in change.examples:
                changes.add_row(*first, example.key, example.old, example.new)
                first = ("", "", "")
        console.print(changes)


def report_totals(report: "ReprocessReport", order: "ReprocessOrder") -> list[tuple[str, int]]:
    """Rows of the table of totals; the rows that are always there first."""
    inputs = {"verify": "blocks of answers", "collect": "records of verified"}
    kept = "experiences, evals included" if report.stage == "verify" else "experiences"
    rows = [(f"read: {inputs[report.stage]}", report.records), (f"kept: {kept}", report.kept)]
    by_count = sorted(report.dropped.items(), key=lambda item: -item[1])
    rows += [(f"dropped: {reason}", count) for reason, count in by_count]
    if order.diff:
        rows.append(("compared with the record", report.compared))
    rest = [
        ("not recorded (yet)", report.unrecorded),
        ("delivered more than once", report.repeated),
        ("not compared: records that the workers have not committed yet", report.behind),
        ("groups still open at the end", report.open_groups),
        ("scores reused", report.reused_scores),
    ]
    return rows + [row for row in rest if row[1]]


def show_letters(console: Console, report: "LettersReport") -> None:
    rows = [(f"delivered again to {topic}", f"{count:,}") for topic, count in sorted(report.delivered.items())]
    refused = [(f"refused: {reason}", f"{count:,}", "red") for reason, count in sorted(report.refused.items())]
    done = ("delivered by an earlier run", f"{report.done:,}")
    console.print(two_columns(f"{report.letters:,} dead letters", [*rows, *refused, done]))
    for example in report.examples:
        console.print(example, markup=False, style="dim")
