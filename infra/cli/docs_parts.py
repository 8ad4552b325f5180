"""The page of what ships: every part that settings may name, with its options, for `infra.cli.docs`."""

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from infra.cli.docs_text import cell, labelled, toml
from infra.settings.plugin import RESERVED_PARAMETERS, find
from infra.settings.words import words_of
from trainer.config import BUILT_IN

OWN = {
    "model",
    "seed",
    "config",
    "transport",
    *RESERVED_PARAMETERS,
}  # what a role or a test gives, and the settings cannot
PARTS = {
    "Scores": (
        "streams.scores.exact:exact", "streams.scores.format:Format", "streams.scores.math:Math", "streams.scores.code:Code",
        "streams.scores.k12:k12", "streams.scores.vision:vision", "streams.scores.judge:Judge",
        "streams.scores.rubric:Rubric", "streams.scores.model:Model", "streams.scores.overlong:Overlong",
    ),
    "Processors to insert": (
        "streams.processors.length:length", "streams.processors.prioritize_novelty:novelty",
        "streams.processors.prioritize_progress:progress", "streams.processors.prioritize_recency:recency",
        "streams.processors.control:shuffle_advantages", "trainer.processors.drop_weak:drop_weak",
        "trainer.processors.equal_sequences:equal_sequences",
        "trainer.processors.normalize_advantages:normalize_advantages",
    ),
    "Feedback sources": (
        "streams.sources.received:rating", "streams.sources.langfuse:langfuse_score",
        "streams.sources.otel:evaluation_result",
    ),
    "Workflows": (
        "actors.rollout.workflows.converse:converse", "actors.rollout.workflows.interact:Interact",
        "actors.rollout.workflows.tools:Tools", "actors.program.workflow:Program",
    ),
    "Agents": ("actors.rollout.agents.chat:Chat", "actors.rollout.agents.react:React"),
    "Environments": (
        "actors.rollout.environments.guess:Guess", "actors.rollout.environments.grid:Grid",
        "actors.rollout.environments.reasoning_gym:ReasoningGym", "actors.rollout.environments.http:HttpEnvironment",
        "actors.rollout.environments.gymnasium:Gymnasium", "actors.rollout.environments.openenv:OpenEnv",
    ),
    "Tools": ("actors.rollout.tools.python:Python",),
    "Servers of tools": ("actors.rollout.tools.mcp:McpServer",),
    "Tasksets": ("actors.tasksets.files:tasks", "actors.tasksets.reasoning_gym:reasoning_gym"),
    "Losses": tuple(f"trainer.losses.{name}:{name}" for name in BUILT_IN),
    "Engines": ("actors.engines.torch:TorchEngine", "actors.engines.scripted:ScriptedEngine"),
    "Learners": ("trainer.learners.torch:TorchLearner", "trainer.learners.deepspeed:DeepSpeedLearner"),
}  # fmt: skip
# Options of a class that takes them as a struct of another name.
TAKEN_FROM = {
    "actors.rollout.workflows.tools:Tools": "actors.rollout.workflows.tools:ToolsOptions",
    "actors.program.workflow:Program": "actors.program.workflow:ProgramOptions",
}


def parts() -> Iterator[str]:
    """The sections of all parts."""
    for kind, uses in PARTS.items():
        yield f"\n## {kind}\n"
        for use in uses:
            yield from part(use, find(TAKEN_FROM.get(use, use)), find(use))


def part(use: str, taken: Any, thing: Any) -> Iterator[str]:
    """One part. taken: what has its options."""
    options = options_of(taken)
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


def options_of(taken: Any) -> dict[str, tuple[str, str]]:
    """The type in words and the default of every option."""
    if inspect.isclass(taken) and issubclass(taken, msgspec.Struct):
        fields = msgspec.structs.fields(taken)
        return {one.encode_name: (words_of(one.type), shown(_default(one))) for one in fields if one.name not in OWN}
    found = inspect.signature(taken).parameters.values()
    hints = typing.get_type_hints(taken.__init__ if inspect.isclass(taken) else taken, include_extras=True)
    return {
        one.name: (words_of(hints.get(one.name, Any)), shown(one.default))
        for one in found
        if one.kind is one.KEYWORD_ONLY and one.name not in OWN
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
