"""Anthropic's Messages API: request, message, events and errors that its clients expect. Pure.

Guarantee: an unknown kind of block and a value out of bounds each raise one ApiError that names the place. If a client sends an
answer back, the prompt has the exact text that the model wrote.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.gateway.answering.conversation import (
    Called,
    ChatMessage,
    ContentPart,
    Function,
    ImageUrl,
    Name,
    RequestTool,
    Short,
    ToolCall,
    assistant_message,
)
from actors.gateway.answering.parsing import Parsed
from actors.gateway.answering.requests import ChatRequest, ParsedRequest, Temperature, Text, TopP, decoded, parsed_chat
from actors.gateway.apis.api import Api, Reply, named_event
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError, bad

Object = dict[str, Any]
_KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Source(msgspec.Struct, frozen=True):
    type: Literal["base64"]
    media_type: Short
    data: str


class _Block(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "image", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    source: _Source | None = None
    id: Short = ""
    name: Name | None = None
    input: dict[str, Any] = {}
    tool_use_id: Short | None = None
    content: "str | list[_Block]" = ""
    thinking: str | None = None


# Kinds of blocks that each role may send, and the field that each kind needs.
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "tool_result"), "assistant": ("text", "tool_use", "thinking"), "system": ("text",),
}  # fmt: skip
_REQUIRED = {
    "text": "text", "image": "source", "tool_use": "name", "tool_result": "tool_use_id", "thinking": "thinking",
}  # fmt: skip


class MessageParam(msgspec.Struct, frozen=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class ToolChoice(msgspec.Struct, frozen=True):
    """tool_choice of the Messages API. name: of the tool to call, for type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. Tools that a server runs have another type than "custom", and the gateway leaves them out."""

    name: Short
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: Text | None = None


class ThinkingChoice(msgspec.Struct, frozen=True):
    """thinking of the Messages API. The model decides whether it thinks; max_tokens bounds it. type: "disabled" leaves the
    block with its thoughts out.
    """

    type: Text


class Metadata(msgspec.Struct, frozen=True):
    """metadata of the Messages API."""

    user_id: Short | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/messages, and without max_tokens of /v1/messages/count_tokens."""

    model: Short
    messages: list[MessageParam]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: str | list[_Block] = ""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    metadata: Metadata | None = None


def read_messages(body: bytes, limits: GatewayLimits) -> ParsedRequest:
    """The request in a body of /v1/messages or, where it may lack max_tokens, of /v1/messages/count_tokens. Raises ApiError."""
    ignored: list[str] = []
    request: MessagesRequest = decoded(body, _messages, ignored)
    shows_thoughts = request.thinking is None or request.thinking.type != "disabled"
    return parsed_chat(_chat_request(request, ignored), limits, ignored, shows_thoughts=shows_thoughts)


def whole(reply: Reply) -> bytes:
    parsed = reply.parsed(0)
    blocks: list[Object] = []
    if parsed.thought:
        blocks.append({"type": "thinking", "thinking": parsed.thought, "signature": ""})
    blocks += [{"type": "text", "text": parsed.said}] if parsed.said else []
    blocks += [_use(reply, at, call) | {"input": _input(call)} for at, call in enumerate(parsed.calls)]
    ended = _ended(reply, parsed.calls)
    return msgspec.json.encode({**_message(reply), "content": blocks, **ended, "usage": _usage(reply)})


class MessageEvents:
    """The EventWriter of Messages. Blocks follow each other; a tool call is one piece, sent once it is whole."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._block = 0  # its index
        self._open = ""  # its kind, "" where none is open
        self._ended: Object = {}

    def begin(self) -> list[bytes]:
        used = {"input_tokens": len(self._reply.in_flight.tokens), "output_tokens": 0}
        empty: Object = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
        return [named_event("message_start", message={**_message(self._reply), **empty})]

    def text(self, index: int, more: Parsed, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()) -> list[bytes]:
        events: list[bytes] = []
        if more.thought:
            events += self._within("thinking", thinking="", signature="")
            events.append(self._delta("thinking_delta", thinking=more.thought))
        if more.said:
            events += self._within("text", text="")
            events.append(self._delta("text_delta", text=more.said))
        return events

    def finish(self, index: int, rest: Parsed) -> list[bytes]:
        events = [*self.text(index, rest), *self._close()]
        for at, call in enumerate(rest.calls):
            events.append(self._start({**_use(self._reply, at, call), "input": {}}))
            events += [self._delta("input_json_delta", partial_json=json.dumps(_input(call))), *self._close()]
        self._ended = _ended(self._reply, rest.calls)
        return events

    def end(self) -> list[bytes]:
        return [named_event("message_delta", delta=self._ended, usage=_usage(self._reply)), named_event("message_stop")]

    def _within(self, kind: str, **empty: str) -> list[bytes]:
        return [] if self._open == kind else [*self._close(), self._start({"type": kind, **empty})]

    def _start(self, block: Object) -> bytes:
        self._open = block["type"]
        return named_event("content_block_start", index=self._block, content_block=block)

    def _delta(self, kind: str, **more: str) -> bytes:
        return named_event("content_block_delta", index=self._block, delta={"type": kind, **more})

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open, self._block = "", self._block + 1
        return [named_event("content_block_stop", index=self._block - 1)]


def error_event(error: ApiError) -> bytes:
    return named_event("error", error=_error(error))


MESSAGES = Api(
    read=lambda body, limits, recall: read_messages(body, limits),
    whole=whole,
    events=MessageEvents,
    error=lambda error: msgspec.json.encode({"type": "error", "error": _error(error)}),
    error_event=error_event,
    openings=lambda choices: 1,
)


_messages = msgspec.json.Decoder(MessagesRequest)


def _message(reply: Reply) -> Object:
    return {"id": reply.answer_ids[0], "type": "message", "role": "assistant", "model": reply.request.model}


def _usage(reply: Reply) -> Object:
    return {"input_tokens": len(reply.in_flight.tokens), "output_tokens": reply.in_flight.num_sampled}


def _use(reply: Reply, at: int, call: Called) -> Object:
    return {"type": "tool_use", "id": reply.call_id(0, at), "name": call.name}


def _input(call: Called) -> Object:
    """The arguments of a call; text if they are no object."""
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _ended(reply: Reply, calls: Sequence[Called]) -> Object:
    answer = reply.in_flight.answers[0]
    if calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.cut:
        return {"stop_reason": "stop_sequence", "stop_sequence": _found(reply)}
    return {"stop_reason": "end_turn" if answer.finish == "stop" else "max_tokens", "stop_sequence": None}


def _found(reply: Reply) -> str | None:
    answer = reply.in_flight.answers[0]
    rest = reply.decode(answer.completion.tokens)[len(answer.text) :]
    return next((stop for stop in reply.request.stops if rest.startswith(stop)), None)


def _error(error: ApiError) -> Object:
    return {"type": _KINDS.get(error.status, "api_error"), "message": str(error)}


def _chat_request(request: MessagesRequest, ignored: list[str]) -> ChatRequest:
    if not request.messages:
        raise bad("messages: got none, expected at least one", "messages")
    messages = [ChatMessage(role="system", content=_joined(request.system, "system"))] if request.system else []
    for index, message in enumerate(request.messages):
        messages += _chat_messages(message, f"messages[{index}].content")
    if request.messages[-1].role == "assistant":
        ignored.append("messages.prefill")  # the template begins another answer behind it
    tools = []
    for tool in request.tools or ():
        if tool.type not in (None, "custom"):
            ignored.append(f"tools.{tool.type}")
            continue
        tools.append(RequestTool(Function(tool.name, tool.description, tool.input_schema)))
    return ChatRequest(
        model=request.model,
        messages=messages,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        stream=request.stream,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        tools=tools or None,
        tool_choice=_choice(request.tool_choice),
        user=request.metadata.user_id if request.metadata else None,
    )


def _chat_messages(message: MessageParam, where: str) -> list[ChatMessage]:
    """A message as the chat API has it: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if not message.content:
        raise bad(f"{where}: got no block, expected at least one", where)
    found, parts, calls, thought = list[ChatMessage](), list[ContentPart](), list[ToolCall](), ""
    for at, block in enumerate(message.content):
        place, kind = f"{where}[{at}]", block.type
        if kind not in _BLOCKS[message.role] or (kind == "thinking" and (parts or calls)):
            raise bad(f"{place}: got a block that a {message.role} does not send there", place)
        if getattr(block, _REQUIRED[kind]) is None:
            raise bad(f"{place}.{_REQUIRED[kind]}: missing, expected in a block of type {kind}", place)
        if block.source is not None:
            url = f"data:{block.source.media_type};base64,{block.source.data}"
            parts.append(ContentPart("image_url", image_url=ImageUrl(url)))
        elif kind == "text":
            parts.append(ContentPart("text", block.text))
        elif kind == "tool_result":
            found += [ChatMessage(role="user", content=parts)] if parts else []
            parts = []
            found.append(
                ChatMessage(
                    role="tool", content=_joined(block.content, f"{place}.content"), tool_call_id=block.tool_use_id
                )
            )
        elif block.name is not None:
            calls.append(ToolCall(Called(block.name, json.dumps(block.input)), block.id))
        thought += block.thinking or ""
    if message.role == "assistant":
        return [assistant_message(thought, [part.text or "" for part in parts], calls)]
    return [*found, ChatMessage(role=message.role, content=parts)] if parts else found


def _joined(content: str | list[_Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.text is None:
            raise bad(f"{where}: got a block of type {block.type}, expected text", where)
    return "\n".join(block.text or "" for block in content)


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise bad("tool_choice.name: missing, expected a name with type 'tool'", "tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
