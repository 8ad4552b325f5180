"""Writes the reference pages of infra/docs from the code: `python -m infra.cli.docs`.

A setting is documented by a string below its field, or in the docstring of its struct as `name: what it means.`; a command
in its own help; a name of `headrace` in its docstring. A test fails where the pages are not what this writes.
"""

import ast
import inspect
import itertools
import json
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from infra.cli.docs.parts import parts
from infra.cli.docs.text import cell, labelled, toml
from infra.observe.alarms import anchor, rules
from infra.observe.measures import MEASURES
from infra.roles import rights
from infra.settings.config import Section
from infra.settings.words import words_of

FOLDER = Path(__file__).resolve().parents[2] / "docs"
RUNS = Path(__file__).resolve().parents[3] / "tests" / "bench" / "measured.json"
BY = "*Written by `python -m infra.cli.docs` from the code; change the docstrings there.*\n\n"
SETTINGS = f"""\
# Every setting

Each table of a `headrace.toml`, with the type and the default of each key.

{BY}A key that is not here is refused by every command, with the nearest name. `headrace check` shows what a file
resolves to. `--set a.b=c` overrides one key of any table on the command line. A role reads the file when it starts: a change
holds for a role once that is started again. Under `headrace up`, `kill` of a role's process starts it again.
"""
COMMANDS = f"""\
# Every command

Each command with its arguments and options.

{BY}`headrace COMMAND --help` prints the same.

| exit code | cause | a role with it, under `headrace up` |
|---|---|---|
| 0 | done | is not started again |
| 1 | failed: a broker or store that is away, a library's error \
| is started again after growing waits, at most 30 s; alarm after three failed starts |
| 2 | a mistake in settings or on the command line, missing rights, a model that does not fit \
| ends `up` at its first start; later it is started again each 30 s |
| 3 | another process has taken over the role | is not started again |
| 130 | stopped with Ctrl-C | |

A command that reads the settings also takes `--config FILE` (`-c`, default `headrace.toml`) and, as often as wanted,
`--set A.B=C`, which overrides one key.
"""
NAMES = f"""\
# Every name of `headrace`

What `from headrace import …` offers to plugins, grouped by the kind of plugin.

{BY}A tool needs none of them: it is a function with annotated parameters and a docstring. Importing one name loads what
that name needs and nothing else. A record shows the names and defaults of its fields.
"""


OPTIONS = f"""\
# Every option of what ships

The options of each part that `use` can name; they go into the `options` table.

{BY}`headrace check` refuses an option that a part does not have. The vLLM engine,
`actors.engines.vllm.engine:VllmEngine`, takes vLLM's own engine arguments. With `[trainer.lora]` versions are adapters, and
`max_loras` says how many of them live at once, 4 by default: the serving adapter, the adapter under proof, and adapters with
running requests. Where all are taken, requests of the oldest continue under the serving adapter.
"""
METRICS = f"""\
# Every metric

What every role serves at `/metrics`, with labels.

{BY}Every role also has `headrace_build_info` (role, release) and the metrics of its process (`process_*`). Every sample bears
the label `app`, as in the settings. What a report in the log carries has the same values under shorter names: `tokens_per_s`
for `headrace_tokens_per_second`, `usual/ess` for `headrace_step_ess{{lane="usual"}}`. A metric is there from the first time
that it is counted or set on.

| metric | kind | labels | role | meaning |
|---|---|---|---|---|
"""
AREAS = RUNS.parent / "areas"
MEASURED = """*Written by `python -m infra.cli.docs` from `tests/bench/areas` and `tests/bench/measured.json`, which `make
bench NAME=… ARGS=--save` writes.* Load: processes that ran or waited for a core before the run; above the number of cores,
trust ratios and processor time. A comparison's value is the peer's figure over headrace's: above 1 headrace is cheaper.

"""
RIGHTS = f"""# Rights of the roles

What the Kafka user and the bucket user of each role may do with topics, objects and consumer groups.

{BY}Each role has a Kafka user and a bucket user with the role's name; `operator` is the user of the commands. `delete` at a
topic deletes records. Every role may also describe the app's topics and list the names in the bucket. `process` also reads the
topics that your `[[feedback]]` names. [The compose file](../howto/deploy.md#rights) grants exactly this, by
`infra/deploy/compose/rights.sh` and `infra/deploy/compose/bucket`.
"""
# Keys that mean the same in every table.
COMMON = {
    "on": "whether it is part of the chain.",
    "options": "keyword-only parameters of the function, or fields of the struct.",
    "report_s": "seconds from one report to the log to the next.",
}


def main() -> None:
    """Write every page."""
    for path, text in pages().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The text of every generated page, by its path below infra/docs."""
    from actors.gateway.http.openapi import document
    from infra.cli.settings import Settings

    return {
        "reference/openapi.json": json.dumps(document(), indent=1, ensure_ascii=False) + "\n",
        "reference/settings.md": SETTINGS + "".join(tables(Settings, "")),
        "reference/commands.md": COMMANDS + "".join(commands()),
        "reference/headrace.md": NAMES + "".join(names()),
        "reference/options.md": OPTIONS + "".join(parts()),
        "reference/metrics.md": METRICS + "".join(metrics()),
        **measured(),
        "reference/rights.md": RIGHTS + "".join(rights.tables()),
        "../deploy/alerts.yml": rules(),
        **{f"../deploy/{path}": text for path, text in rights.deploy_files().items()},
    }


def measured() -> dict[str, str]:
    """A page of figures for each area: its text with the newest runs that it names."""
    runs = json.loads(RUNS.read_text(encoding="utf-8"))
    found = {}
    for path in sorted(AREAS.glob("*.md")):
        text = re.sub(r"<!-- run ([\w-]+) -->", lambda name: benchmark(runs[name[1]]), path.read_text(encoding="utf-8"))
        title, about, rest = text.split("\n\n", 2)
        found[f"measured/{path.name}"] = f"{title}\n\n{about}\n\n{MEASURED}{rest}"
    return found


def benchmark(run: dict[str, Any]) -> str:
    """One run of a benchmark: its command, and its figures by case where several figures share their cases."""
    where = f"{run['at']} UTC, commit {run['commit']}, {run['machine']}, load {run['load']:g}"
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in run["rows"]:
        case, _, name = row["what"].rpartition(": ")
        cases.setdefault(case, {})[name] = row
    names = list(dict.fromkeys(name for rows in cases.values() if len(rows) > 1 for name in rows))
    shared = {case: rows for case, rows in cases.items() if case and rows.keys() <= set(names)}
    if len(shared) < 2:
        shared = {}
    tables = []
    if shared:
        tables.append(
            [["case", *names], *([case, *(bounded(rows.get(name)) for name in names)] for case, rows in shared.items())]
        )
    rest = [row for row in run["rows"] if row["what"].rpartition(": ")[0] not in shared]
    compares = any("peer" in row for row in rest)
    if rest:
        lines = [["figure", *(["headrace", "peer"] if compares else []), "value"]]
        for row in rest:
            unit = row.get("unit", "")
            sides = [f"{figure(row[side])} {unit}" if side in row else "" for side in ("ours", "peer")]
            lines.append([row["what"], *(sides if compares else []), bounded(row)])
        tables.append(lines)
    text = [f"`{run['command']}`, {where}.\n"]
    for head, *rows in tables:
        text += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        text += [f"| {' | '.join(map(cell, row))} |" for row in rows] + [""]
    return "\n".join(text).rstrip()


def bounded(row: dict[str, Any] | None) -> str:
    """The value of a figure with its target, as in "26.8 ms (at most 60: met)"; "" for none."""
    if row is None or (value := row.get("value")) is None:
        return ""
    low, high = row.get("low"), row.get("high")
    is_met = (low is None or value >= low) and (high is None or value <= high)
    bounds = ", ".join(
        f"{words} {figure(at)}" for words, at in (("at least", low), ("at most", high)) if at is not None
    )
    shown = f"{figure(value)} {'times' if 'peer' in row else row.get('unit', '')}".strip()
    return shown + (f" ({bounds}: {'met' if is_met else 'missed'})" if bounds else "")


def figure(value: float) -> str:
    """Whole from 100 on, else three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def metrics() -> Iterator[str]:
    """The rows of the table of metrics, by name."""
    for measure in sorted(MEASURES, key=lambda measure: measure.shown):
        labels = ", ".join(f"`{label}`" for label in measure.shown_labels)
        yield f"| `{measure.shown}` | {measure.kind} | {labels} | {measure.roles} | {measure.meaning}. |\n"


def tables(struct: type[msgspec.Struct], path: str, header: str = "") -> Iterator[str]:
    """The table of a struct in Markdown, then the tables of the structs in it. header: as the TOML writes it, "" for the
    root.
    """
    about, meanings = described(struct)
    yield f"\n## {f'`{header}`' if header else 'The top of the file'}\n\n{about}\n"
    inner, rows = [], []
    for field in msgspec.structs.fields(struct):
        if field.type is Path:
            continue
        name, meaning = field.encode_name, meanings.get(field.encode_name, "")
        found = nested_section(field.type)
        if found is None or field.encode_name in ("engine", "learner", "agent", "environment"):
            rows.append(f"| `{name}` | {cell(words_of(field.type))} | {default_text(field)} | {cell(meaning)} |\n")
            continue
        section, form = found
        below = f"{path}.{name}" if path else name
        heading = form.format(below)
        inner.append((section, below.removesuffix(".<name>"), heading))
        link = f"[`{heading}`](#{anchor(heading)})"
        rows.append(f"| `{name}` | {link} | {default_text(field)} | {cell(meaning or described(section)[0])} |\n")
    yield "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
    for section, below, heading in inner:
        yield from tables(section, f"{below}.<name>" if "<name>" in heading else below, heading)


def nested_section(kind: Any) -> tuple[type[Section], str] | None:
    """The struct that a field holds, and how the TOML writes its table; None for a plain value."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        found = [nested_section(each_kind) for each_kind in get_args(kind)]
        return next((item for item in found if item is not None), None)
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind, "[{}]"
    if get_origin(kind) is tuple and (found_one := nested_section(get_args(kind)[0])):
        return found_one[0], "[[{}]]"
    if get_origin(kind) is dict and (found_one := nested_section(get_args(kind)[1])):
        return found_one[0], "[{}.<name>]"
    return None


def described(struct: type) -> tuple[str, dict[str, str]]:
    """Descriptions of a record and of each field in its docstring.

    >>> from infra.settings.config import Keep
    >>> described(Keep)[1]["replay"]
    'how far back replay and audit reach; sets every retention and every pruning.'
    """
    shown, meanings = "", dict(COMMON)
    for item in reversed([item for item in struct.__mro__ if issubclass(item, Section) and item is not Section]):
        fields = {field.name: field.encode_name for field in msgspec.structs.fields(item)}
        shown, found = labelled(inspect.getdoc(item) or "", fields)
        meanings |= found | {fields[name]: text for name, text in below_fields(item).items() if name in fields}
    return shown, meanings


def below_fields(struct: type) -> dict[str, str]:
    """The descriptions that stand as strings below the fields of a record."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(struct))).body
    assert isinstance(node, ast.ClassDef)
    return strings_below(node)


def strings_below(node: ast.ClassDef) -> dict[str, str]:
    """The same of a class's source."""
    return {
        ast.unparse(field.target): re.sub(r"\s+", " ", str(text.value.value))
        for field, text in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """A field's default as the TOML writes it."""
    if field.required:
        return "required"
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if isinstance(default, Section) and type(default).__name__ != "Use":
        return ""
    return "left out" if default is None else f"`{cell(toml(default))}`"


def commands() -> Iterator[str]:
    """The sections of all commands, in the order of `headrace --help`."""
    import typer.main

    from infra.cli.main import app

    def below(group: Any, path: str) -> Iterator[str]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield f"\n## `{path} {name}`\n\n{plain(command.help)}\n"
                yield from below(command, f"{path} {name}")
            else:
                yield from command_section(f"{path} {name}", command)

    yield from below(typer.main.get_command(app), "headrace")


def command_section(name: str, command: Any) -> Iterator[str]:
    """One command: what it does, and its arguments and options."""
    yield f"\n## `{name}`\n\n{plain(command.help)}\n"
    shared = [option for option in command.params if getattr(option, "rich_help_panel", None) == "Settings"]
    if len(command.params) > len(shared):
        yield "\n| argument or option | default | meaning |\n|---|---|---|\n"
    for option in (option for option in command.params if option not in shared):
        is_flag = bool(getattr(option, "is_flag", False))
        shown = (
            option.metavar or option.name.upper() if option.param_type_name == "argument" else ", ".join(option.opts)
        )
        value = "" if is_flag or option.param_type_name == "argument" else f" {option.metavar or option.name.upper()}"
        written = option.show_default if isinstance(option.show_default, str) else ""
        default = written or (
            "" if option.default in (None, "", [], ()) or option.default is False else str(option.default)
        )
        default = "required" if option.required else f"`{default}`" if default and not written else default
        yield f"| `{shown}{value}` | {default} | {cell(plain(option.help))} |\n"
    if shared:
        yield "\nReads the settings: `--config`, `--set`.\n"


def plain(text: str | None) -> str:
    """Help with rich's marks as Markdown.

    >>> plain("as in [cyan]headrace up[/], see [bold]\\\\[keep][/]")
    'as in `headrace up`, see `[keep]`'
    """
    marked = re.sub(r"\[(?:cyan|bold)\](.*?)\[/\]", r"`\1`", inspect.cleandoc(text or ""), flags=re.DOTALL)
    return marked.replace("\\[", "[").replace("\f", "").strip()


def names() -> Iterator[str]:
    """Exports of `headrace` by kind, with signature and docstring."""
    import headrace

    for kind, found in headrace.HOMES.items():
        yield f"\n## {kind.capitalize()}\n"
        for name in sorted(found, key=str.lower):
            thing = getattr(headrace, name)
            is_alias = getattr(thing, "__name__", "") != name
            shown = f"{name} = {short(thing)}" if is_alias else "\n".join((f"{name}{called(thing)}", *methods(thing)))
            text = "" if is_alias else f"\n{inspect.getdoc(thing)}\n"
            yield f"\n### `{name}`\n\n```text\n{shown}\n```\n{text}"


def methods(thing: Any) -> list[str]:
    """The public methods of a class that is neither a record nor an error: what they are called with, and their first line."""
    if not inspect.isclass(thing) or issubclass(thing, msgspec.Struct | Exception):
        return []
    shown = ("__call__",) if getattr(thing, "_is_protocol", False) else ()
    found = [
        (name, item) for name, item in vars(thing).items() if inspect.isfunction(item) or isinstance(item, property)
    ]
    found = [(name, item) for name, item in found if name in shown or not name.startswith("_")]
    return [
        f"    {name}{'' if isinstance(item, property) else called(item)}\n"
        f"        {(inspect.getdoc(item) or '').splitlines()[0]}"
        for name, item in found
    ]


def called(thing: Any) -> str:
    """Signature of a function or a class; empty for a protocol or an error."""
    if not inspect.isclass(thing):
        return short(inspect.signature(thing)).replace("(self, ", "(").replace("(self)", "()")
    if issubclass(thing, Exception) or getattr(thing, "_is_protocol", False):
        return ""
    found = inspect.signature(thing)
    bare = [value.replace(annotation=value.empty) for value in found.parameters.values() if value.name != "self"]
    return short(found.replace(parameters=bare, return_annotation=found.empty))


def short(thing: Any) -> str:
    """A type without the modules of its names."""
    if get_origin(thing) is Annotated:
        return short(get_args(thing)[0])
    text = thing.__name__ if isinstance(thing, type) and not get_args(thing) else str(thing)
    text = re.sub(r"\*?<class '([\w.]+)'>", r"\1", text)
    return re.sub(r"(?<!\w)(?:[A-Za-z_]\w*\.)+(?=\w)", "", text.replace("NoneType", "None")).replace("~", "")
