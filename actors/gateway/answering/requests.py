"""What a client asks for: request bodies, checked, as one shape that the rest of the gateway knows. Pure.

Guarantee: an unknown field, a wrong type and a value out of bounds are each one ApiError that names the field; what
reaches into the engine (templates, embeddings, media, grammars of other servers) is refused by name. Every field that is
kept has a bound of its own: names 64 to 512 characters, JSON within it MAX_DEPTH levels, the rest as in `Limits`.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.gateway.answering.conversation import ChatMessage, Prompt, RequestTool, chat_prompt, text_prompt
from actors.gateway.answering.json_schema import ANY_OBJECT, rewritten
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import bad

SESSION_HEADER = "x-session-id"  # ties the turns of a conversation together
SESSION_END_HEADER = "x-session-end"  # "true": no turn follows this one
# Names of other servers' extensions: they change what runs in the engine, so each is refused by name.
REACHING = frozenset(
    re.findall(
        r"\w+",
        "chat_template chat_template_kwargs add_generation_prompt continue_final_message add_special_tokens documents "
        "prompt_embeds input_embeds mm_processor_kwargs media_io_kwargs images audio modalities guided_json guided_regex "
        "guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structured_outputs grammar "
        "allowed_token_ids bad_words logits_processors vllm_xargs kv_transfer_params cache_salt prompt_logprobs priority "
        "min_tokens ignore_eos stop_token_ids skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens "
        "include_stop_str_in_output use_beam_search length_penalty repetition_penalty best_of top_k min_p lora adapter",
    )
)
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=64)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """stream_options of the OpenAI API.

    include_usage: whether the last piece counts tokens. include_obfuscation: changes nothing.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds of request share.

    model: a served one. n: choices, 1 by default. stream: whether the answer comes piece by piece. stream_options: what
    a stream says beside it. stop: texts that end it. seed: of the sampling. temperature, top_p: of the sampling, 1 by
    default. max_tokens: of the answer. frequency_penalty, presence_penalty, logit_bias: refused unless 0 or empty.
    user, safety_identifier: who is behind it; the second counts where both are there. store: false is taken at its
    word: nothing of the answer is written. metadata, service_tier, prompt_cache_key: change nothing.
    """

    model: Annotated[str, Meta(max_length=512)]
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[Text, float], Meta(max_length=1024)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    store: bool | None = None
    metadata: Annotated[dict[Text, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    service_tier: Text | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """json_schema of a response_format. name: of the schema, for people. schema: what the answer is held to.
    description: for people. strict: changes nothing, every schema that is taken is kept.
    """

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """response_format of the OpenAI API. type: text, any JSON object, or JSON of a schema. json_schema: that schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions.

    messages: the conversation so far. max_completion_tokens: a newer name of max_tokens, which it goes before.
    logprobs: whether the answer has them. top_logprobs: how many other tokens it shows at each place. response_format:
    what the answer is held to. tools: that may be called. tool_choice: whether one must be. parallel_tool_calls:
    changes nothing.
    """

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[RequestTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TextRequest(Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions. prompt: a text is spelled without control tokens, as any; ids are taken as they are.
    logprobs: of how many tokens at each place. echo, suffix: refused unless false or empty.
    """

    prompt: str | list[int]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the gateway serves it.

    prompt: what is answered. model: as the client called it. stream: whether the answer goes out piece by piece. usage:
    whether the last piece counts tokens. choices: how many. stops: texts that end one. seed, temperature, top_p: of the
    sampling. max_tokens: None where the client named none. logprobs: wanted in the answer. top_logprobs: so many others
    at each place. store: whether it may be recorded. user: who is behind it, as the client calls them. num_chars: of
    the prompt, tools included.

    must_call: the tool that the answer must call, "" for any, None for no must. force: the text it then begins with.
    json_schema: what the answer is held to, "" for nothing. shows_thoughts: what the model thinks is sent, apart from
    what it says. said: the conversation, to go on from by the answer's id; () where it is not kept. goes_on: the
    session of the answer that it continues. ends_session: no turn of its session follows. echo: what the response says again.
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


def ends_session(header: str) -> bool:
    """Whether a request ends its session, as SESSION_END_HEADER says. Raises ApiError."""
    if header not in ("", "true", "false"):
        raise bad(f'{SESSION_END_HEADER}: got {header[:20]!r}, expected "true" or "false"', SESSION_END_HEADER)
    return header == "true"


def read_chat(body: bytes, limits: GatewayLimits) -> ParsedRequest:
    """The request in a body of /v1/chat/completions. Raises ApiError."""
    return parsed_chat(decoded(body, _chat), limits)


def parsed_chat(request: ChatRequest, limits: GatewayLimits, *, shows_thoughts: bool = True) -> ParsedRequest:
    """The request as the gateway serves it. shows_thoughts: what the model thinks is sent, apart from what it says. Raises
    ApiError.
    """
    _refuse_unserved(request)
    if not request.messages:
        raise bad("messages: got none, expected at least one", "messages")
    if len(request.messages) > limits.messages:
        raise bad(f"messages: got {len(request.messages)}, expected at most {limits.messages}", "messages")
    if len(request.tools or ()) > limits.tools:
        raise bad(f"tools: got {len(request.tools or ())}, expected at most {limits.tools}", "tools")
    if request.top_logprobs and not request.logprobs:
        raise bad("top_logprobs: needs logprobs = true", "top_logprobs")
    prompt, must_call = chat_prompt(request.messages, request.tools or [], request.tool_choice)
    if len(prompt.pictures) > limits.images:
        raise bad(f"messages: got {len(prompt.pictures)} images, expected at most {limits.images}", "messages")
    limit = request.max_completion_tokens or request.max_tokens
    return _ask(
        request,
        limits,
        prompt,
        max_tokens=limit,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs or 0,
        must_call=must_call,
        json_schema=_json_schema(request, bool(prompt.tools)),
        shows_thoughts=shows_thoughts,
    )


def read_text(body: bytes, limits: GatewayLimits) -> ParsedRequest:
    """The request in a body of /v1/completions. Raises ApiError."""
    request = decoded(body, _text)
    _refuse_unserved(request)
    if request.suffix:
        raise bad("suffix: not supported", "suffix")
    if request.echo:
        raise bad("echo: not supported", "echo")
    if not request.prompt:
        raise bad("prompt: got an empty one, expected text or token ids", "prompt")
    return _ask(
        request,
        limits,
        text_prompt(request.prompt),
        max_tokens=request.max_tokens,
        logprobs=request.logprobs is not None,
        top_logprobs=request.logprobs or 0,
    )


def _ask(
    request: Common, limits: GatewayLimits, prompt: Prompt, *, max_tokens: int | None, **more: Any
) -> ParsedRequest:
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if len(stops) > limits.stops or any(not stop or len(stop) > 256 for stop in stops):
        raise bad(f"stop: expected at most {limits.stops} strings of 1 to 256 characters", "stop")
    if (request.n or 1) > limits.choices:
        raise bad(f"n: got {request.n}, expected at most {limits.choices}", "n")
    if max_tokens is not None and max_tokens > limits.max_tokens:
        raise bad(f"max_tokens: got {max_tokens}, expected at most {limits.max_tokens}", "max_tokens")
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
        max_tokens=max_tokens,
        store=request.store is not False,
        user=request.safety_identifier or request.user or "",
        num_chars=sum(len(one.content) for one in prompt.plain)
        + (len(msgspec.json.encode(prompt.tools)) if prompt.tools else 0),
        **more,
    )


def _json_schema(request: ChatRequest, tools: bool) -> str:
    """The schema an answer is held to, "" for none. tools: some may be called."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return ""
    if tools:
        raise bad("response_format: got tools too, expected one of both: a tool call is no JSON", "response_format")
    if request.stop:
        raise bad("stop: expected none beside response_format: a stop string would cut the JSON", "stop")
    if wanted.type == "json_object":
        return json.dumps(ANY_OBJECT)
    if wanted.json_schema is None:
        where = "response_format.json_schema"
        raise bad(f"{where}: missing, expected it beside type 'json_schema'", where)
    return rewritten(wanted.json_schema.schema)


def _refuse_unserved(request: Common) -> None:
    for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
        if getattr(request, name):
            raise bad(f"{name}: not supported: what it draws is not the policy's own", name)
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options: only allowed with stream = true", "stream_options")


_chat = msgspec.json.Decoder(ChatRequest)
_text = msgspec.json.Decoder(TextRequest)


def decoded(body: bytes, decoder: "msgspec.json.Decoder[Any]") -> Any:
    """The body of a request. Raises ApiError that names the field at fault."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error), body) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not valid JSON: {error}") from error


def _named(message: str, body: bytes) -> Exception:
    """The refusal with the name of the field. msgspec stops at the first fault, so a reaching field is looked up."""
    try:
        fields: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return bad(f"the body is not valid JSON: {error}")
    if isinstance(fields, Mapping) and (reaching := sorted(REACHING & fields.keys())):
        name = reaching[0]
        return bad(f"{name}: not accepted: it reaches into the engine", name, "field_not_accepted")
    unknown = re.search(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?", message)
    if unknown:
        name = f"{unknown[2]}.{unknown[1]}" if unknown[2] else unknown[1]
        return bad(f"{name[:200]}: unknown field", name[:200], "unknown_parameter")
    where = re.search(r"`\$\.([^`]+)`", message) or re.search(r"missing required field `([^`]+)`", message)
    return bad(message[:500], where[1] if where else None)
