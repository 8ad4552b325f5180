"""Writes the reference pages of infra/docs from the code: `python -m infra.cli.docs`.

A page is text that people wrote, up to the line MARK, and generated text after it: the string below each setting, the help of
each command, the first paragraph of a docstring. The headings of the page of options name its parts. A test fails where a page
is stale.
"""

import ast
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from infra.observe.alarms import anchor, rules
from infra.observe.measures import HELP, MEASURES, exposed
from infra.roles import rights
from infra.settings.config import Section, words_of
from infra.settings.plugin import RESERVED_PARAMETERS, find
from schemas import topics

FOLDER = Path(__file__).resolve().parents[1] / "docs"
MARK = "*The rest of this page is written by `python -m infra.cli.docs` from the code; change the docstrings there.*\n"
# Keys that mean the same in every table.
COMMON = {
    "on": "Whether the step is part of the chain.",
    "options": "Options of the plugin: keyword-only parameters of a function, or fields of a struct.",
}
# Parameters of a part that a role or a test gives, and the settings cannot.
GIVEN = {"model", "seed", "config", "transport", *RESERVED_PARAMETERS}
# Options of a class that takes them as a struct of another name.
TAKEN_FROM = {
    "actors.rollout.workflows.tools:Tools": "actors.rollout.workflows.tools:ToolsOptions",
    "actors.program.workflow:Program": "actors.program.workflow:ProgramOptions",
}


def main() -> None:
    for path, text in pages().items():
        (FOLDER / path).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The text of every generated page, by its path below infra/docs."""
    from infra.cli.settings import Settings

    written = {
        "settings": tables(Settings, ""),
        "commands": commands(),
        "headrace": names(),
        "options": parts((FOLDER / "reference" / "options.md").read_text(encoding="utf-8")),
        "metrics": metrics(),
        "rights": rights_tables(),
    }
    return {
        **{f"reference/{name}.md": head(name) + "".join(text) for name, text in written.items()},
        "../deploy/alerts.yml": rules(),
        **{f"../deploy/{path}": text for path, text in deploy_files().items()},
    }


def deploy_files() -> dict[str, str]:
    """The files of the compose file that grant rights, by their path below infra/deploy."""
    policies = {
        f"{rights.COMPOSE}/bucket/{role}.json": json.dumps(
            rights.bucket_policy(role, rights.BUCKET, rights.STORE), indent=2
        )
        + "\n"
        for role in rights.RIGHTS
    }
    return {f"{rights.COMPOSE}/rights.sh": rights.acl_script(rights.APP), **policies}


def rights_tables() -> Iterator[str]:
    """Markdown tables of the rights: at topics, at objects, at consumer groups."""
    head = f"| {' | '.join(rights.RIGHTS)} |\n|---|{'---|' * len(rights.RIGHTS)}\n"
    yield f"\n## Topics\n\n| topic {head}"
    for topic in topics.ALL:
        yield f"| `{topic.name}` | {' | '.join(', '.join(its.at_topic(topic)) for its in rights.RIGHTS.values())} |\n"
    yield f"\n## Objects\n\n| prefix {head}"
    for prefix in rights.PREFIXES:
        yield f"| `{prefix}` | {' | '.join(', '.join(its.at_prefix(prefix)) for its in rights.RIGHTS.values())} |\n"
    groups = (", ".join(f"`{name}`" if name else "all" for name in its.groups) for its in rights.RIGHTS.values())
    yield f"\n## Consumer groups\n\n| {head}| read | {' | '.join(groups)} |\n"


def head(name: str) -> str:
    text, mark, _ = (FOLDER / "reference" / f"{name}.md").read_text(encoding="utf-8").partition(MARK)
    assert mark, f"reference/{name}.md: expected the line {MARK!r}"
    return text + mark


def metrics() -> Iterator[str]:
    yield "\n| metric | kind | labels | role | meaning |\n|---|---|---|---|---|\n"
    for measure in sorted(MEASURES, key=lambda measure: measure.shown):
        labels = ", ".join(f"`{label}`" for label in measure.shown_labels)
        yield f"| `{measure.shown}` | {measure.kind} | {labels} | {measure.roles} | {HELP[exposed(measure.name).name]}. |\n"


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
        if found is None or field.encode_name in ("engine", "learner", "environment"):
            rows.append((name, words_of(field.type), default_text(field), meaning))
            continue
        section, form = found
        below = f"{path}.{name}" if path else name
        heading = form.format(below)
        inner.append((section, below.removesuffix(".<name>"), heading))
        link = f"[`{heading}`](#{anchor(heading)})"
        rows.append((name, link, default_text(field), meaning or described(section)[0]))
    yield from rows_of_table("key", rows)
    for section, below, heading in inner:
        yield from tables(section, f"{below}.<name>" if "<name>" in heading else below, heading)


def rows_of_table(title: str, rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    if rows:
        yield f"\n| {title} | type | default | meaning |\n|---|---|---|---|\n"
    for name, kind, default, meaning in rows:
        yield f"| `{name}` | {cell(kind)} | {default} | {cell(meaning)} |\n"


def nested_section(kind: Any) -> tuple[type[Section], str] | None:
    """The struct that a field holds, and how the TOML writes its table; None for a plain value."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return nested_section(inner[0])
    if origin in (Union, types.UnionType):
        return next((found for each in inner if (found := nested_section(each)) is not None), None)
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind, "[{}]"
    if origin is tuple and (found := nested_section(inner[0])):
        return found[0], "[[{}]]"
    if origin is dict and (found := nested_section(inner[1])):
        return found[0], "[{}.<name>]"
    return None


def described(struct: type[msgspec.Struct]) -> tuple[str, dict[str, str]]:
    """Descriptions of a record and of each of its fields.

    >>> from infra.settings.config import Keep
    >>> described(Keep)[1]["replay"][:32]
    'Time that replay and audit reach'
    """
    shown, meanings = "", dict(COMMON)
    for item in reversed([item for item in struct.__mro__ if issubclass(item, msgspec.Struct)]):
        if item in (msgspec.Struct, Section):
            continue
        fields = {field.name: field.encode_name for field in msgspec.structs.fields(item)}
        shown, found = labelled(inspect.getdoc(item) or "", fields)
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(item))).body
        assert isinstance(node, ast.ClassDef)
        meanings |= found | {fields[name]: text for name, text in strings_below(node).items() if name in fields}
    return shown, meanings


def strings_below(node: ast.ClassDef) -> dict[str, str]:
    """The descriptions that stand as strings below the fields of a class."""
    return {
        ast.unparse(field.target): re.sub(r"\s+", " ", str(text.value.value))
        for field, text in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def labelled(docstring: str, fields: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and the text behind each label `name:` or `first, second:` of `fields`, as
    {name: name to show}.

    >>> labelled("Count. low, high: the range.", {"low": "low", "high": "high"})
    ('Count.', {'low': 'the range.', 'high': 'the range.'})
    """
    about, meanings = list[str](), dict[str, str]()
    named = "|".join(map(re.escape, sorted({*fields, *fields.values()}, key=len, reverse=True))) or "(?!)"
    label = rf"(?:{named})(?: \([^)]*\))?"
    for paragraph in re.split(r"\nExamples?:", docstring)[0].split("\n\n"):
        text = re.sub(r"^\[+[\w.<>]+\]+[.:]?\s*", "", re.sub(r"\s+", " ", paragraph)).strip()
        begin, *parts = re.split(rf"(?:^|(?<=[.;:] ))((?:{label}, )*{label}): ", text)
        about.append(begin.strip())
        for labels, meaning in zip(parts[::2], parts[1::2], strict=True):
            for name in labels.split(", "):
                bare, _, note = name.partition(" (")
                meanings[fields.get(bare, bare)] = (f"{note.rstrip(')')}; " if note else "") + meaning.strip(" ;")
    shown = " ".join(filter(None, about))
    return f"{shown[:1].upper()}{shown[1:]}", meanings


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """A field's default as the TOML writes it."""
    default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if isinstance(default, Section) and type(default).__name__ != "Use":
        return ""
    if default in (inspect.Parameter.empty, msgspec.NODEFAULT):
        return "required"
    if isinstance(default, str) and "\n" in default:
        return "a text, in the file"
    return "left out" if default is None else f"`{cell(toml(default))}`"


def toml(value: Any) -> str:
    """A value in TOML.

    >>> toml({"on": True, "of": ("a", 1)})
    '{ on = true, of = ["a", 1] }'
    """
    if isinstance(value, msgspec.Struct):
        fields = {
            field.encode_name: (getattr(value, field.name), field.default) for field in msgspec.structs.fields(value)
        }
        return toml({name: item for name, (item, default) in fields.items() if item and item != default})
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return f"'{value}'" if re.search(r'[\\"]', value) else f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else str(value)


def cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text.replace("\n", " ")).strip()


def parts(page: str) -> Iterator[str]:
    """The section of every part that the page has a heading for."""
    for level, title in re.findall(r"^(##|###) (.*)$", page.partition(MARK)[2], re.MULTILINE):
        yield f"\n{level} {title}\n" if level == "##" else "".join(part(title.strip("`")))


def part(use: str) -> Iterator[str]:
    """One part, as `module:name`, with its options."""
    thing, taken = find(use), find(TAKEN_FROM.get(use, use))
    options = part_options(taken)
    named = {name: name for name in (*options, *GIVEN)}
    about, meanings = labelled(inspect.getdoc(thing) or "", named)
    about = about or (inspect.getdoc(inspect.getmodule(thing)) or "").splitlines()[0].partition(": ")[2]
    for document in filter(None, (inspect.getdoc(taken), inspect.getdoc(getattr(taken, "__init__", None)))):
        meanings = labelled(document, named)[1] | meanings
    yield f"\n### `{use}`\n\n{about[:1].upper()}{about[1:].replace('<', chr(92) + '<')}\n"
    yield from rows_of_table("option", [(name, *option, meanings.get(name, "")) for name, option in options.items()])


def part_options(taken: Any) -> dict[str, tuple[str, str]]:
    if not (inspect.isclass(taken) and issubclass(taken, msgspec.Struct)):
        hints = typing.get_type_hints(taken.__init__ if inspect.isclass(taken) else taken, include_extras=True)
        fields = [
            msgspec.structs.FieldInfo(option.name, option.name, hints.get(option.name, Any), option.default)
            for option in inspect.signature(taken).parameters.values()
            if option.kind is option.KEYWORD_ONLY
        ]
    else:
        fields = [*msgspec.structs.fields(taken)]
    return {
        field.encode_name: (words_of(field.type), default_text(field)) for field in fields if field.name not in GIVEN
    }


def commands() -> Iterator[str]:
    def below(group: Any, path: str) -> Iterator[str]:
        for name, command in group.commands.items():
            yield f"\n## `{path} {name}`\n\n{plain(command.help)}\n"
            yield from below(command, f"{path} {name}") if hasattr(command, "commands") else options(command)

    yield from below(command_tree(), "headrace")


def command_tree(group: Any = None) -> Any:
    """The group `headrace`, with every command imported."""
    import typer.main

    from infra.cli.main import LazyCommand, app

    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        group.commands[name] = command.load() if isinstance(command, LazyCommand) else command_tree(command)
    return group


def options(command: Any) -> Iterator[str]:
    own = [option for option in command.params if getattr(option, "rich_help_panel", None) != "Settings"]
    if own:
        yield "\n| argument or option | default | meaning |\n|---|---|---|\n"
    for option in own:
        metavar, is_argument = option.metavar or option.name.upper(), option.param_type_name == "argument"
        shown = metavar if is_argument else ", ".join(option.opts)
        if not (is_argument or getattr(option, "is_flag", False)):
            shown += f" {metavar}"
        default = option.show_default if isinstance(option.show_default, str) else ""
        if not default and option.default is not False and (option.default or option.default == 0):
            default = f"`{option.default}`"
        default = "required" if option.required else default
        yield f"| `{shown}` | {default} | {cell(plain(option.help))} |\n"
    if len(own) < len(command.params):
        yield "\nReads the settings: `--config`, `--set`.\n"


def plain(text: str | None) -> str:
    """Help with rich's marks as Markdown.

    >>> plain("as in [cyan]headrace up[/], see [bold]\\\\[keep][/]")
    'as in `headrace up`, see `[keep]`'
    """
    marked = re.sub(r"\[(?:cyan|bold)\](.*?)\[/\]", r"`\1`", inspect.cleandoc(text or ""), flags=re.DOTALL)
    return marked.replace("\\[", "[").replace("\f", "").strip()


def names() -> Iterator[str]:
    import headrace

    for kind, found in headrace.HOMES.items():
        yield f"\n## {kind.capitalize()}\n\n| name | module | meaning |\n|---|---|---|\n"
        for name in sorted(found, key=str.lower):
            about = (inspect.getdoc(getattr(headrace, name)) or "").partition("\n\n")[0]
            yield f"| `{name}` | `{found[name]}` | {cell(about)} |\n"


if __name__ == "__main__":
    main()
