"""OpenAI's Responses API: request, response, events and the conversation that its clients expect. Pure.

Guarantee: an unknown kind of item and a value out of bounds each raise one ApiError that names the place. If a client sends an
answer back, the prompt has the exact text that the model wrote.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.gateway.answering.conversation import (
    Called,
    ChatMessage,
    ContentPart,
    Conversation,
    Function,
    ImageUrl,
    Name,
    RequestTool,
    Short,
    ToolCall,
    assistant_message,
)
from actors.gateway.answering.parsing import Parsed
from actors.gateway.answering.requests import (
    ChatRequest,
    JsonSchema,
    ParsedRequest,
    ResponseFormat,
    Temperature,
    Text,
    TopP,
    decoded,
    parsed_chat,
)
from actors.gateway.apis.api import Api, Recall, Reply, named_event
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError, bad

Object = dict[str, Any]


class _Part(msgspec.Struct, frozen=True):
    type: Literal["input_text", "output_text", "reasoning_text", "refusal", "input_image"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[_Part] | None = None
    call_id: Short | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


_REQUIRED = {
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"), "reasoning": (),
}  # fmt: skip


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. Tools that a server runs have another type than "function", and the gateway leaves them out."""

    type: Text
    name: Name | None = None
    parameters: dict[str, Any] | None = None
    description: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """text.format, as response_format of a chat completion."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] = ""
    schema: dict[str, Any] | None = None


class TextSettings(msgspec.Struct, frozen=True):
    """text of the Responses API."""

    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/responses.

    instructions: not kept for the next request. store: false keeps and records nothing. parallel_tool_calls, metadata,
    reasoning: are repeated in the response, and change nothing.
    """

    model: Short
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Short | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: dict[str, Any] | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    metadata: Annotated[dict[Text, Short], Meta(max_length=16)] | None = None


def read_responses(body: bytes, limits: GatewayLimits, recall: Recall) -> ParsedRequest:
    """The request in a body of /v1/responses. Raises ApiError."""
    ignored: list[str] = []
    request = decoded(body, _responses, ignored)
    before: Conversation | None = None
    if request.previous_response_id is not None:
        before = recall(request.previous_response_id)
        if before is None:
            where = "previous_response_id"
            message = f"{where}: not known here: send the whole conversation as input"
            raise ApiError(404, message, param=where, code="previous_response_not_found")
    chat = _chat_request(request, before.messages if before is not None else (), ignored)
    parsed = parsed_chat(chat, limits, ignored)
    said = tuple(chat.messages[1:] if request.instructions else chat.messages)
    return msgspec.structs.replace(
        parsed,
        said=said if parsed.store else (),
        goes_on=before.session if before is not None else "",
        echo=_echo(request),
    )


def after(reply: Reply) -> tuple[ChatMessage, ...]:
    """The conversation with the answer, for a request that continues it."""
    parsed = reply.parsed(0)
    calls = [ToolCall(call, reply.call_id(0, at)) for at, call in enumerate(parsed.calls)]
    return (*reply.request.said, assistant_message(parsed.thought, [parsed.said], calls))


def whole(reply: Reply) -> bytes:
    parsed = reply.parsed(0)
    thought, said, calls = parsed.thought, parsed.said, parsed.calls
    output = [_reasoning(reply, thought)] if thought else []
    output += [_message(reply, said)] if said or not (calls or thought) else []
    return msgspec.json.encode(_ended(reply, [*output, *(_call(reply, at, call) for at, call in enumerate(calls))]))


class ResponseEvents:
    """The EventWriter of Responses. Items follow each other; a tool call is one piece, sent once it is whole."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._number = 0
        self._output: list[Object] = []
        self._open = ""  # kind of the item that is open, "" for none
        self._text = ""  # of it

    def begin(self) -> list[bytes]:
        empty = _response(self._reply, "in_progress", [])
        return [self._event("response.created", response=empty), self._event("response.in_progress", response=empty)]

    def text(self, index: int, more: Parsed, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()) -> list[bytes]:
        return [*self._more("reasoning", more.thought), *self._more("message", more.said)]

    def finish(self, index: int, rest: Parsed) -> list[bytes]:
        events = [*self.text(index, rest), *self._close()]
        for at, call in enumerate(rest.calls):
            item, place = _call(self._reply, at, call), {"output_index": len(self._output)}
            arguments = {"item_id": item["id"], **place}
            begun = item | {"arguments": "", "status": "in_progress"}
            events += [
                self._event("response.output_item.added", item=begun, **place),
                self._event("response.function_call_arguments.delta", delta=call.arguments, **arguments),
                self._event(
                    "response.function_call_arguments.done", arguments=call.arguments, name=call.name, **arguments
                ),
                self._event("response.output_item.done", item=item, **place),
            ]
            self._output.append(item)
        return events

    def end(self) -> list[bytes]:
        response = _ended(self._reply, self._output)
        return [self._event(f"response.{response['status']}", response=response)]

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        return named_event(kind, sequence_number=self._number - 1, **fields)

    def _more(self, kind: str, text: str) -> list[bytes]:
        if not text:
            return []
        events = [] if self._open == kind else [*self._close(), *self._begin(kind)]
        self._text += text
        name = "output_text" if kind == "message" else "reasoning_text"
        more: Object = {"logprobs": []} if kind == "message" else {}
        return [*events, self._event(f"response.{name}.delta", delta=text, content_index=0, **self._place(), **more)]

    def _begin(self, kind: str) -> list[bytes]:
        self._open, self._text = kind, ""
        item = self._item() | {"content": [], "status": "in_progress"}
        place = {"output_index": len(self._output)}
        events = [self._event("response.output_item.added", item=item, **place)]
        part = self._item()["content"][0] | {"text": ""}
        return [*events, self._event("response.content_part.added", part=part, content_index=0, **self._place())]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        item, place = self._item(), self._place()
        name = "output_text" if self._open == "message" else "reasoning_text"
        more: Object = {"logprobs": []} if self._open == "message" else {}
        events = [
            self._event(f"response.{name}.done", text=self._text, content_index=0, **place, **more),
            self._event("response.content_part.done", part=item["content"][0], content_index=0, **place),
            self._event("response.output_item.done", item=item, output_index=len(self._output)),
        ]
        self._output.append(item)
        self._open = ""
        return events

    def _item(self) -> Object:
        make = _message if self._open == "message" else _reasoning
        return make(self._reply, self._text)

    def _place(self) -> Object:
        return {"item_id": self._item()["id"], "output_index": len(self._output)}


def error_event(error: ApiError) -> bytes:
    return named_event("error", sequence_number=0, code=error.code or error.kind, message=str(error), param=error.param)


RESPONSES = Api(
    read=read_responses,
    whole=whole,
    events=ResponseEvents,
    error=ApiError.body,
    error_event=error_event,
    openings=lambda choices: 2,
)

_responses = msgspec.json.Decoder(ResponsesRequest)


def _name(reply: Reply, kind: str) -> str:
    return f"{kind}_{reply.answer_ids[0].removeprefix('hr-')}"


def _message(reply: Reply, text: str) -> Object:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {
        "type": "message",
        "id": _name(reply, "msg"),
        "status": "completed",
        "role": "assistant",
        "content": content,
    }


def _reasoning(reply: Reply, text: str) -> Object:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": _name(reply, "rs"), "status": "completed", "summary": [], "content": content}


def _call(reply: Reply, at: int, call: Called) -> Object:
    return {
        "type": "function_call",
        "id": f"{_name(reply, 'fc')}_{at}",
        "call_id": reply.call_id(0, at),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _ended(reply: Reply, output: Sequence[Object]) -> Object:
    """The response at its end; incomplete if the answer was cut off."""
    cut_off = reply.in_flight.answers[0].finish == "length"
    why = {"incomplete_details": {"reason": "max_output_tokens"}} if cut_off else {}
    num_prompt, num_sampled = len(reply.in_flight.tokens), reply.in_flight.num_sampled
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
    return _response(reply, "incomplete" if cut_off else "completed", output) | why | {"usage": usage}


def _response(reply: Reply, status: str, output: Sequence[Object]) -> Object:
    return {
        "id": reply.answer_ids[0],
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": reply.request.model,
        "output": output,
        "usage": None,
        **reply.request.echo,
    }


def _echo(request: ResponsesRequest) -> Object:
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": request.reasoning,
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": msgspec.to_builtins(request.text) if request.text else {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": msgspec.to_builtins(request.tools or []),
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }


def _chat_request(request: ResponsesRequest, earlier: Sequence[ChatMessage], ignored: list[str]) -> ChatRequest:
    """The chat request that it means. earlier: the conversation before it, without instructions. Raises ApiError."""
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    system = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    tools = []
    for tool in request.tools or ():
        if tool.type != "function" or tool.name is None:
            ignored.append(f"tools.{tool.type}")
            continue
        tools.append(RequestTool(Function(tool.name, tool.description, tool.parameters)))
    choice, wanted = request.tool_choice, request.text.format if request.text else None
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    schema = None if wanted is None or wanted.schema is None else JsonSchema(wanted.name, wanted.schema)
    return ChatRequest(
        model=request.model,
        messages=[*system, *earlier, *_messages(_items(given))],
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        store=request.store,
        tools=tools or None,
        tool_choice=choice,
        response_format=None if wanted is None else ResponseFormat(wanted.type, schema),
        user=request.user,
        safety_identifier=request.safety_identifier,
    )


def _items(given: Sequence[Mapping[str, Any]]) -> list[_Item]:
    if not given:
        raise bad("input: got no item, expected at least one", "input")
    items = []
    for index, value in enumerate(given):
        where = f"input[{index}]"
        try:
            item = msgspec.convert(value, _Item)
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$")
            where += place.rstrip("`")
            raise bad(f"{where}: {message[:300]}", where) from error
        for name in _REQUIRED[item.type]:
            if getattr(item, name) is None:
                raise bad(f"{where}.{name}: missing, expected in an item of type {item.type}", where)
        for at, part in enumerate(item.content if isinstance(item.content, list) else ()):
            if part.text is None and part.refusal is None and part.image_url is None:
                raise bad(f"{where}.content[{at}]: got no text, refusal or image_url", f"{where}.content[{at}]")
        items.append(item)
    return items


def _messages(items: Sequence[_Item]) -> list[ChatMessage]:
    """The conversation. Consecutive thoughts, words and calls of an assistant are one message."""
    messages: list[ChatMessage] = []
    thought, texts, calls = "", list[str](), list[ToolCall]()
    for item in (*items, None):
        if item is not None and item.type == "reasoning":
            thought += _joined(item.content or "", "")
        elif item is not None and item.role == "assistant":
            texts.append(_joined(item.content or ""))
        elif item is not None and item.type == "function_call":
            calls.append(ToolCall(Called(item.name or "", item.arguments or "{}"), item.call_id or ""))
        else:
            messages += [assistant_message(thought, texts, calls)] if thought or texts or calls else []
            messages += [_other(item)] if item is not None else []
            thought, texts, calls = "", [], []
    return messages


def _other(item: _Item) -> ChatMessage:
    if item.type == "function_call_output":
        return ChatMessage(role="tool", content=_joined(item.output or ""), tool_call_id=item.call_id)
    assert item.role is not None
    if isinstance(item.content, str) or item.content is None:
        return ChatMessage(role=item.role, content=item.content)
    parts = [
        ContentPart("image_url", image_url=ImageUrl(part.image_url))
        if part.image_url is not None
        else ContentPart("text", part.text or part.refusal or "")
        for part in item.content
    ]
    return ChatMessage(role=item.role, content=parts)


def _joined(content: str | Sequence[_Part], between: str = "\n") -> str:
    if isinstance(content, str):
        return content
    if any(part.image_url is not None for part in content):
        raise bad("input: got an input_image in an assistant message, expected it in a user message", "input")
    return between.join(part.text or part.refusal or "" for part in content)
