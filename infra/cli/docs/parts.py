"""The page of what ships: every part that settings may name, with its options, for `infra.cli.docs`."""

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from infra.cli.docs.text import cell, labelled, toml
from infra.settings.plugin import RESERVED_PARAMETERS, find
from infra.settings.words import words_of
from streams.config import StreamsConfig
from streams.stages.chain_builder import collect_chain, tasks_chain, verify_chain

OWN = {
    "model",
    "seed",
    "config",
    "transport",
    *RESERVED_PARAMETERS,
}  # what a role or a test gives, and the settings cannot
HERE = Path(__file__).resolve().parents[3]
# Options of a class that takes them as a struct of another name.
TAKEN_FROM = {
    "actors.rollout.workflows.tools:Tools": "actors.rollout.workflows.tools:ToolsOptions",
    "actors.program.workflow:Program": "actors.program.workflow:ProgramOptions",
}


class Sign(NamedTuple):
    """Marks of a part in its source. mark: its decorator. methods: of its class. takes: its first parameters.
    returns: its annotation.
    """

    mark: str = ""
    methods: frozenset[str] = frozenset()
    takes: tuple[str, ...] = ()
    returns: str = ""


EPISODE = Sign(takes=("task", "session"))
# The folders in which parts of a kind are looked for: a new file is found by itself.
KINDS: dict[str, tuple[tuple[str, Sign], ...]] = {
    "Scores": (("streams/scores", Sign(mark="score")),),
    "Processors to insert": (
        ("streams/processors", Sign(mark="processor")),
        ("trainer", Sign(mark="processor")),
    ),
    "Feedback sources": (("streams/sources", Sign(mark="feedback")),),
    "Workflows": (("actors/rollout", EPISODE), ("actors/rollout/workflows", EPISODE), ("actors/program", EPISODE)),
    "Agents": (("actors/rollout", Sign(methods=frozenset({"opening", "act"}))),),
    "Environments": (("actors/rollout/environments", Sign(methods=frozenset({"reset", "step"}))),),
    "Tools": (("actors/rollout/tools", Sign(methods=frozenset({"__call__"}))),),
    "Servers of tools": (("actors/rollout/tools", Sign(methods=frozenset({"tools"}))),),
    "Tasksets": (("actors/tasksets", Sign(returns="Iterator[Task]")),),
    "Losses": (("trainer/losses", Sign(takes=("inputs",), returns="LossOutput")),),
    "Engines": (("actors/engines", Sign(methods=frozenset({"generate", "load"}))),),
    "Learners": (("trainer/learners", Sign(methods=frozenset({"step", "numerics", "restore"}))),),
}


def parts() -> Iterator[str]:
    """The sections of all parts."""
    for kind, uses in shipped().items():
        yield f"\n## {kind}\n"
        for use in uses:
            yield from part(use, find(TAKEN_FROM.get(use, use)), find(use))


def shipped() -> dict[str, list[str]]:
    """Parts that settings may name, by kind, as `module:name`; without the processors that the built-in chain has anyway."""
    chain = _built_in()
    return {
        kind: [use for folder, sign in places for use in found(folder, sign) if use not in chain]
        for kind, places in KINDS.items()
    }


def found(folder: str, sign: Sign) -> list[str]:
    """The public parts of a folder's files, read without importing one."""
    uses = []
    for path in sorted((HERE / folder).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_") and _has(node, sign):
                uses.append(f"{folder.replace('/', '.')}.{path.stem}:{node.name}")
    return uses


def _has(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, sign: Sign) -> bool:
    if sign.mark:
        return sign.mark in {ast.unparse(mark).partition("(")[0] for mark in node.decorator_list}
    called: ast.AST = node
    if isinstance(node, ast.ClassDef):
        if "Protocol" in map(ast.unparse, node.bases):
            return False
        methods = {
            method.name: method for method in node.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if sign.methods:
            return sign.methods <= methods.keys()
        called = methods.get("__call__", node)
    if sign.methods or not isinstance(called, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    names = tuple(argument.arg for argument in called.args.args if argument.arg != "self")
    returns = ast.unparse(called.returns) if called.returns else ""
    return names == sign.takes and returns == (sign.returns or returns)


def _built_in() -> set[str]:
    usual = StreamsConfig()
    on = msgspec.structs.replace
    tasks = on(usual.tasks, vary=on(usual.tasks.vary, on=True))
    collect = on(usual.collect, correct=on(usual.collect.correct, on=True))
    every = on(usual, tasks=tasks, collect=collect)
    chains = (tasks_chain(every), verify_chain(every), collect_chain(every))
    return {item.table.use for chain in chains for item in chain} | {"streams.processors.task_filter:Verifiable"}


def part(use: str, taken: Any, thing: Any) -> Iterator[str]:
    """One part. taken: what has its options."""
    options = part_options(taken)
    named = {name: name for name in (*options, *OWN)}
    about, meanings = labelled(inspect.getdoc(thing) or "", named)
    about = about or (inspect.getdoc(inspect.getmodule(thing)) or "").splitlines()[0].partition(": ")[2]
    about = about[:1].upper() + about[1:]
    for document in filter(None, (inspect.getdoc(taken), inspect.getdoc(getattr(taken, "__init__", None)))):
        meanings = labelled(document, named)[1] | meanings
    yield f"\n### `{use}`\n\n{about.replace('<', chr(92) + '<')}\n"
    if options:
        yield "\n| option | type | default | meaning |\n|---|---|---|---|\n"
    for name, (kind, default) in options.items():
        yield f"| `{name}` | {cell(kind)} | {default} | {cell(meanings.get(name, ''))} |\n"


def part_options(taken: Any) -> dict[str, tuple[str, str]]:
    """The type in words and the default of every option."""
    if inspect.isclass(taken) and issubclass(taken, msgspec.Struct):
        fields = msgspec.structs.fields(taken)
        return {
            field.encode_name: (words_of(field.type), shown(_default(field)))
            for field in fields
            if field.name not in OWN
        }
    found = inspect.signature(taken).parameters.values()
    hints = typing.get_type_hints(taken.__init__ if inspect.isclass(taken) else taken, include_extras=True)
    return {
        option.name: (words_of(hints.get(option.name, Any)), shown(option.default))
        for option in found
        if option.kind is option.KEYWORD_ONLY and option.name not in OWN
    }


def shown(default: Any) -> str:
    """A default in TOML, "required" where there is none."""
    if default in (inspect.Parameter.empty, msgspec.NODEFAULT):
        return "required"
    if isinstance(default, str) and "\n" in default:
        return "a text, in the file"
    return "left out" if default is None else f"`{cell(toml(default))}`"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
