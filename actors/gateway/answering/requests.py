"""Requests for answers: bodies, checked, as one shape that the rest of the gateway knows. Pure.

Guarantees: any request is answered: a field that nothing reads, or that cannot be kept, is left out and named in
`ParsedRequest.ignored`. A wrong type, a value out of bounds and audio are each one ApiError that names the field. Every field
that is kept has a bound of its own: names 64 to 512 characters, JSON MAX_DEPTH levels, the rest as in `GatewayLimits`.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.engines.engine import Shaping
from actors.gateway.answering.conversation import MAX_DEPTH, ChatMessage, Prompt, RequestTool, chat_prompt, is_deep
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import bad

SESSION_HEADER = "x-session-id"  # ties the turns of a conversation together
SESSION_END_HEADER = "x-session-end"  # "true": no turn follows this one
ANY_OBJECT = {"type": "object", "additionalProperties": True}
MAX_SCHEMA_BYTES = 65_536
# Keywords of JSON Schema that no engine holds an answer to.
UNKEPT = {
    "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "uniqueItems", "contains", "minContains",
    "maxContains", "multipleOf", "propertyNames", "unevaluatedProperties", "unevaluatedItems",
}  # fmt: skip
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=64)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True):
    """stream_options of the OpenAI API."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    """json_schema of a response_format."""

    name: Annotated[str, Meta(max_length=256)] = ""
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """response_format of the OpenAI API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/chat/completions, as OpenAI's API and vLLM's define it.

    Penalties, logit_bias, top_k and min_p change the distribution, so losses that form a ratio do not train such an answer.
    max_completion_tokens goes before max_tokens, safety_identifier before user. store: false records nothing of the answer.
    """

    messages: list[ChatMessage]
    model: Annotated[str, Meta(max_length=512)]
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[Text, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    store: bool | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[RequestTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[Text] | None = None
    audio: Any = None


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the gateway serves it.

    usage: whether the last piece of a stream counts tokens. store: whether it may be recorded. user: the person behind it, as
    the client calls them. num_chars: of the prompt, tools included. must_call: the tool that the answer must call, "" for any,
    None for no must. force: the text it then begins with. json_schema: of the answer, "" for none. shows_thoughts: thoughts
    are sent, apart from the words. said: the conversation, to go on from by the answer's id; () where it is not kept. goes_on:
    the session of the answer that it continues. ends_session: no turn of its session follows. echo: fields that the response
    repeats. ignored: fields of the request that change nothing here.
    """

    prompt: Prompt
    model: str
    stream: bool
    usage: bool
    choices: int
    stops: tuple[str, ...]
    seed: int | None
    temperature: float
    top_p: float
    shaping: Shaping | None
    max_tokens: int | None
    logprobs: bool
    top_logprobs: int
    store: bool
    user: str
    num_chars: int
    must_call: str | None = None
    force: str = ""
    json_schema: str = ""
    shows_thoughts: bool = True
    said: tuple[ChatMessage, ...] = ()
    goes_on: str = ""
    ends_session: bool = False
    echo: Mapping[str, Any] = {}
    ignored: tuple[str, ...] = ()

    @property
    def untrained(self) -> str:
        """The field by which tokens leave the policy's own distribution, so that no ratio can be formed; "" for none."""
        if self.shaping is not None:
            return "shaping"
        if self.json_schema:
            return "response_format"
        return "top_p" if self.top_p < 1.0 else "temperature" if not self.temperature else ""


def ends_session(header: str) -> bool:
    """Read SESSION_END_HEADER: True if the request ends its session. Raises ApiError."""
    if header not in ("", "true", "false"):
        raise bad(f'{SESSION_END_HEADER}: got {header[:20]!r}, expected "true" or "false"', SESSION_END_HEADER)
    return header == "true"


def read_chat(body: bytes, limits: GatewayLimits) -> ParsedRequest:
    """The request in a body of /v1/chat/completions. Raises ApiError."""
    ignored: list[str] = []
    return parsed_chat(decoded(body, _chat, ignored), limits, ignored)


def parsed_chat(
    request: ChatRequest, limits: GatewayLimits, ignored: list[str], *, shows_thoughts: bool = True
) -> ParsedRequest:
    """The request as the gateway serves it. shows_thoughts: thoughts are sent, apart from the words. Raises ApiError."""
    prompt, must_call = _read_prompt(request, limits, ignored)
    json_schema = _json_schema(request, bool(prompt.tools), ignored)
    stops = _stops(request, limits)
    if stops and json_schema:
        ignored.append("stop")
        stops = ()
    if (request.n or 1) > (at_most := min(limits.choices, limits.concurrency - limits.reserved)):
        raise bad(f"n: got {request.n}, expected at most {at_most}", "n")
    max_tokens = request.max_completion_tokens or request.max_tokens
    if max_tokens is not None and max_tokens > limits.max_tokens:
        ignored.append("max_tokens")
        max_tokens = limits.max_tokens
    if request.stream_options is not None and not request.stream:
        ignored.append("stream_options")
    return ParsedRequest(
        prompt=prompt,
        model=request.model,
        stream=bool(request.stream),
        usage=bool(request.stream_options and request.stream_options.include_usage),
        choices=request.n or 1,
        stops=stops,
        seed=None if request.seed is None else request.seed & (2**63 - 1),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        shaping=_shaping(request),
        max_tokens=max_tokens,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        must_call=must_call,
        json_schema=json_schema,
        shows_thoughts=shows_thoughts,
        store=request.store is not False,
        user=request.safety_identifier or request.user or "",
        num_chars=sum(len(message.content) for message in prompt.plain)
        + (len(msgspec.json.encode(prompt.tools)) if prompt.tools else 0),
        ignored=tuple(ignored),
    )


def _read_prompt(request: ChatRequest, limits: GatewayLimits, ignored: list[str]) -> tuple[Prompt, str | None]:
    """The prompt, and the tool its answer must call. Raises ApiError."""
    if request.audio is not None or "audio" in (request.modalities or ()):
        raise bad('audio: this model answers in text only; leave it out and send modalities = ["text"]', "audio")
    if not request.messages:
        raise bad("messages: got none, expected at least one", "messages")
    if len(request.messages) > limits.messages:
        raise bad(f"messages: got {len(request.messages)}, expected at most {limits.messages}", "messages")
    tools = [tool for tool in request.tools or () if tool.function is not None]
    for tool in request.tools or ():
        if tool.function is None:
            ignored.append(f"tools.{tool.type}")
    if len(tools) > limits.tools:
        raise bad(f"tools: got {len(tools)}, expected at most {limits.tools}", "tools")
    if request.top_logprobs and not request.logprobs:
        ignored.append("top_logprobs")
    prompt, must_call = chat_prompt(request.messages, tools, _tool_choice(request, tools, ignored))
    if len(prompt.pictures) > limits.images:
        raise bad(f"messages: got {len(prompt.pictures)} images, expected at most {limits.images}", "messages")
    return prompt, must_call


def _stops(request: ChatRequest, limits: GatewayLimits) -> tuple[str, ...]:
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stops) > limits.stops or any(not stop or len(stop) > 256 for stop in stops):
        raise bad(f"stop: expected at most {limits.stops} strings of 1 to 256 characters", "stop")
    return stops


def _shaping(request: ChatRequest) -> Shaping | None:
    """The shaping that a client asks for, None for none. Raises ApiError for a bias of something that is no token id."""
    bias = request.logit_bias or {}
    if wrong := [token for token in bias if not (token.isascii() and token.isdecimal())]:
        raise bad(f"logit_bias: got {wrong[0]!r}, expected token ids", "logit_bias")
    found = Shaping(
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=tuple((int(token), value) for token, value in bias.items() if value),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
    )
    return found if found != Shaping() else None


def _tool_choice(
    request: ChatRequest, tools: Sequence[RequestTool], ignored: list[str]
) -> str | Mapping[str, Any] | None:
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return choice
    if tools and (choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function")):
        return choice
    ignored.append("tool_choice")
    return None


def _json_schema(request: ChatRequest, tools: bool, ignored: list[str]) -> str:
    """The schema of an answer, "" for none. tools: True if functions may be called."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return ""
    if tools:
        ignored.append("response_format")
        return ""
    if wanted.type == "json_object":
        return json.dumps(ANY_OBJECT)
    where = "response_format.json_schema"
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise bad(f"{where}: missing, expected a schema with type 'json_schema'", where)
    schema = wanted.json_schema.schema
    if is_deep(schema):
        raise bad(f"{where}.schema: expected at most {MAX_DEPTH} levels of objects and lists", f"{where}.schema")
    for name in sorted(set(_unkept(schema))):
        ignored.append(f"{where}.schema.{name}")
    text = json.dumps(_told_apart(schema, itertools.count()), ensure_ascii=False)
    if len(text) > MAX_SCHEMA_BYTES:
        message = f"{where}.schema: got {len(text)} characters, expected at most {MAX_SCHEMA_BYTES}"
        raise bad(message, f"{where}.schema", "unsupported_value")
    return text


def _told_apart(schema: Any, numbers: Iterator[int]) -> Any:
    """The schema with a number in each object: xgrammar takes two for one that differ only in properties named like "title"."""
    if isinstance(schema, list):
        return [_told_apart(part, numbers) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        name: value if name in ("enum", "const") else _told_apart(value, numbers) for name, value in schema.items()
    }
    return found | {"x-part": next(numbers)} if isinstance(found.get("properties"), dict) else found


def _unkept(schema: Any, *, are_names: bool = False) -> Iterator[str]:
    """Yield keywords of a schema that no engine keeps. are_names: the keys of this object are names of properties."""
    if isinstance(schema, list):
        for part in schema:
            yield from _unkept(part)
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if not are_names and name in UNKEPT:
            yield name
        if are_names or name not in ("enum", "const", "default", "examples"):
            named = name in ("properties", "$defs", "definitions", "patternProperties")
            yield from _unkept(value, are_names=named and not are_names)


_chat = msgspec.json.Decoder(ChatRequest)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_strictly(request: ParsedRequest) -> None:
    """Raise ApiError for a field that `gateway.strict` refuses: one that is ignored, or that changes the distribution."""
    if request.ignored:
        name = request.ignored[0][:200]
        raise bad(f"{name}: changes nothing here; with gateway.strict = false the gateway ignores it", name)
    if request.shaping is not None:
        raise bad(
            f"{request.untrained}: changes the policy's distribution; with gateway.strict = false the gateway serves it"
        )


def decoded(body: bytes, decoder: "msgspec.json.Decoder[Any]", ignored: list[str]) -> Any:
    """The body of a request; fields that nothing reads are noted in `ignored`. Raises ApiError that names the field."""
    try:
        request = decoder.decode(body)
        given = _fields.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        where = re.search(r"`\$\.([^`]+)`", message) or re.search(r"missing required field `([^`]+)`", message)
        raise bad(message[:500], where[1] if where else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not valid JSON: {error}") from error
    known = request.__struct_fields__
    ignored += [name for name, value in given.items() if name not in known and bytes(value) != b"null"]
    return request
