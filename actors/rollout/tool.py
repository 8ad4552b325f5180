"""Tools: functions that a policy can call by name with JSON arguments, and the guards of a call.

`use` names a tool: a function with annotated parameters (a synchronous function runs in a thread), whose docstring the policy
reads. Its JSON schema comes from the annotations, or from the object's attribute `parameters`.

Guarantee: for any text of the policy and any behavior of a tool, a call ends as text for the policy within its timeout.
"""

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jsonschema
import msgspec

from infra.chain.calls import Failure, Trouble, as_tasks, in_thread
from infra.settings.plugin import load
from schemas.errors import ConfigError

Schema = Mapping[str, Any]

MAX_OUTPUT_CHARS = 8_000
MAX_ARGUMENT_CHARS = 100_000
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tool. parameters: JSON schema of the arguments, an object. trouble: faults of its function. name: by which the
    policy calls it. description: text for the policy. function: runs a call.

    Example: ToolSpec(name="lookup", description="Find an order.", parameters={"type": "object"}, function=lookup)
    """

    name: str
    description: str
    parameters: Schema
    function: Callable[..., Any]
    trouble: Trouble = msgspec.field(default_factory=Trouble)


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call by the policy. fault: why it cannot be read, "" where it can. name: of the tool. arguments: as its schema has
    them.
    """

    name: str = ""
    arguments: Mapping[str, Any] = {}
    fault: str = ""


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a call. text: for the policy. failed: the text describes an error. broken: why the tool
    cannot be used any more. The policy does not see it: its episode fails, with the cause `tool`.
    """

    text: str
    failed: bool = False
    broken: str = ""


class ToolServer(Protocol):
    """Offers several tools. It is asked before every episode."""

    async def tools(self) -> tuple[ToolSpec, ...]:
        """Tools that may be called. Raises EpisodeFailed."""


def load_tool(use: str, options: Mapping[str, object]) -> ToolSpec:
    """The tool `use` names; raises ConfigError for a function whose arguments cannot be described."""
    function = load(use, options, "tool")
    if not callable(function):
        raise ConfigError(f"tool: {use} is of type {type(function).__name__}, expected a function")
    bare = getattr(function, "func", function)
    name = str(getattr(function, "name", getattr(bare, "__name__", type(bare).__name__)))
    parameters = getattr(function, "parameters", None)
    if parameters is None:
        parameters = argument_schema(function, use)
    description = inspect.getdoc(bare if inspect.isroutine(bare) else type(bare)) or ""
    return sound_tool(use, ToolSpec(name=name, description=description, parameters=parameters, function=function))


def sound_tool(use: str, tool: ToolSpec) -> ToolSpec:
    """The tool itself. Raises ConfigError for a name that cannot be called, or parameters that are no schema."""
    if not _NAME.match(tool.name):
        raise ConfigError(f"tool: {use}: got the name {tool.name!r}, expected letters, digits, - and _")
    try:
        jsonschema.Draft202012Validator.check_schema(dict(tool.parameters))
    except jsonschema.SchemaError as error:
        raise ConfigError(f"tool: {use}: its parameters are no JSON schema: {error.message}") from error
    return tool


def load_server(use: str, options: Mapping[str, object]) -> ToolServer:
    """The server `use` names; raises ConfigError."""
    server = load(use, options, "server")
    if not inspect.iscoroutinefunction(getattr(server, "tools", None)):
        raise ConfigError(f"server: {use} has no async tools; expected a ToolServer")
    return typing.cast(ToolServer, server)


def argument_schema(function: Callable[..., Any], use: str) -> dict[str, Any]:
    """JSON schema of a function's arguments, from its annotations. Options that are bound already are left out."""
    bare = getattr(function, "func", function)
    bound = getattr(function, "keywords", {})
    called = bare if inspect.isroutine(bare) else type(bare).__call__
    hints = typing.get_type_hints(called, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(bare).parameters.items():
        if name in bound:
            continue
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool: {use}: parameter {name}: expected an annotation, since the policy needs its type")
        try:
            properties[name] = msgspec.json.schema(hints[name])
        except TypeError as error:
            raise ConfigError(f"tool: {use}: parameter {name}: {error}") from error
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def read_call(text: str) -> ParsedCall:
    """A call as the policy wrote it, {"name": …, "arguments": {…}}; one that cannot be read says why."""
    if len(text) > MAX_ARGUMENT_CHARS:
        return ParsedCall(fault=f"got {len(text)} characters, expected at most {MAX_ARGUMENT_CHARS}")
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ParsedCall(fault=f"not JSON: {error}")
    if not isinstance(decoded, dict) or not isinstance(decoded.get("name"), str):
        return ParsedCall(fault='expected {"name": "…", "arguments": {…}}')
    arguments = decoded.get("arguments", {})
    if not isinstance(arguments, dict):
        return ParsedCall(name=decoded["name"], fault="arguments: expected an object")
    return ParsedCall(name=decoded["name"], arguments=arguments)


async def answer(call: ParsedCall, tools: Sequence[ToolSpec], *, timeout_s: float) -> ToolResult:
    """Check the call against the tool's schema and run it."""
    if call.fault:
        return ToolResult(f"error: {call.fault}", failed=True)
    tool = next((known for known in tools if known.name == call.name), None)
    if tool is None:
        names = ", ".join(known.name for known in tools)
        return ToolResult(f"error: there is no tool {call.name!r}; expected one of {names}", failed=True)
    fault = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(dict(tool.parameters)).iter_errors(dict(call.arguments))
    )
    if fault is not None:
        where = "".join(f".{step}" for step in fault.absolute_path)
        return ToolResult(f"error: arguments{where}: {fault.message}", failed=True)

    def run(arguments: object) -> Any:
        return tool.function(**typing.cast(Mapping[str, Any], arguments))

    bare = getattr(tool.function, "func", tool.function)
    if inspect.iscoroutinefunction(bare) or inspect.iscoroutinefunction(type(bare).__call__):
        (result,) = await as_tasks(run, [call.arguments], timeout_s, tool.trouble)
    else:
        (result,) = await in_thread(run, [call.arguments], timeout_s, tool.trouble)
    if isinstance(result, Failure):
        return ToolResult(f"error: {tool.name} {result.kind}: {result.detail}", failed=True)
    if isinstance(result, ToolResult):
        return msgspec.structs.replace(result, text=_text(result.text))
    return ToolResult(_text(result))


def _text(result: object) -> str:
    if not isinstance(result, str):
        try:
            result = msgspec.json.encode(result).decode()
        except (TypeError, msgspec.MsgspecError):
            result = repr(result)
    cut = len(result) - MAX_OUTPUT_CHARS
    return result if cut <= 0 else f"{result[:MAX_OUTPUT_CHARS]}\n… and {cut} more characters"
