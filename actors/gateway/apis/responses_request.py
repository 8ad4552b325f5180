"""Bodies of OpenAI's Responses API, and the chat request that each means. Pure.

Guarantee: a kind of item that is not known and a value out of bounds are each one ApiError that names the place. What a client
got from us it may send back as it is, and the model then meets the very text that it wrote.
"""

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
from actors.gateway.answering.requests import (
    ChatRequest,
    Ignored,
    JsonSchema,
    ResponseFormat,
    Temperature,
    Text,
    TopP,
)
from actors.gateway.errors import bad


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text of a user, system or developer message. text: as it was written."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """A picture of a message. image_url: with the picture in it; nothing is fetched, and no files are kept."""

    image_url: str


class OutputPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text of the model, as it was given. text: of one answer."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """Text of the model that refuses. text: `refusal` in the body."""

    text: str = msgspec.field(name="refusal")


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """A thought of the model, as it was given. text: of one thought."""

    text: str


Part = TextPart | ImagePart | OutputPart | RefusalPart


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message. role: who speaks. content: text, or parts with pictures."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of the assistant. arguments: JSON, as text. call_id: that its result names. name: of the tool."""

    call_id: Short
    name: Name
    arguments: str


class ResultItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call_output"):
    """A tool's result. call_id: of the call. output: what the model reads of it."""

    call_id: Short
    output: str | list[TextPart]


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Thoughts of the assistant. content: their text."""

    content: list[ReasoningText] | None = None


Items = MessageItem | CallItem | ResultItem | ReasoningItem


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. Those that a server runs have another type than "function" and are left out.

    type: of the tool. name: by which it is called. parameters: JSON schema of its arguments. description: what the model
    reads of it.
    """

    type: Text
    name: Name | None = None
    parameters: dict[str, Any] | None = None
    description: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """text.format: as response_format of a chat completion.

    type: text, any JSON object, or JSON of a schema. name: of the schema. schema: JSON schema of the answer.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=256)] = ""
    schema: dict[str, Any] | None = None


class TextSettings(msgspec.Struct, frozen=True):
    """text of the Responses API. format: of the answer."""

    format: TextFormat | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/responses.

    model: a served model. input: a text of the user, or items. instructions: text before the input; not kept for the
    next request. previous_response_id: the answer whose conversation continues. max_output_tokens: of the answer.
    temperature, top_p: of the sampling. stream: whether it comes piece by piece. store: false keeps and records nothing.
    tools: that may be called. tool_choice: whether one must be. parallel_tool_calls, metadata, reasoning: are repeated in the
    response, and change nothing. text: the format of the answer. include: logprobs where it names them. user,
    safety_identifier: the person behind the request.
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
    include: list[Text] | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    metadata: Annotated[dict[Text, Short], Meta(max_length=16)] | None = None


def chat_request(request: ResponsesRequest, earlier: Sequence[ChatMessage], ignored: Ignored) -> ChatRequest:
    """Convert a request to one of the chat API. earlier: the conversation before it, without instructions. Raises ApiError."""
    given = [{"type": "message", "role": "user", "content": request.input}]
    items = _items(given if isinstance(request.input, str) else request.input)
    system = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    tools = []
    for tool in request.tools or ():
        if tool.type != "function" or tool.name is None:
            ignored.add(f"tools.{tool.type}", "only functions are served")
            continue
        tools.append(RequestTool(Function(tool.name, tool.description, tool.parameters)))
    return ChatRequest(
        model=request.model,
        messages=[*system, *earlier, *_messages(items)],
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        store=request.store,
        logprobs="message.output_text.logprobs" in (request.include or ()),
        tools=tools or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request.text.format if request.text else None),
        user=request.user,
        safety_identifier=request.safety_identifier,
    )


def _items(given: Sequence[Mapping[str, Any]]) -> list[Items]:
    if not given:
        raise bad("input: got no item, expected at least one", "input")
    items: list[Items] = []
    for index, item in enumerate(given):
        try:
            # A message may leave out what it is.
            items.append(msgspec.convert({"type": "message", **item}, Items))  # type: ignore[arg-type]
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$")
            where = f"input[{index}]{place.rstrip('`')}"
            raise bad(f"{where}: {message[:300]}", where) from error
    return items


def _messages(items: Sequence[Items]) -> list[ChatMessage]:
    """Items as the chat API has them: what an assistant thought, said and called in a row is one message."""
    messages: list[ChatMessage] = []
    thought, texts, calls = "", list[str](), list[ToolCall]()
    for item in (*items, None):
        match item:
            case ReasoningItem(content=content):
                thought += "".join(part.text for part in content or ())
            case MessageItem(role="assistant", content=content):
                texts.append(_joined(content))
            case CallItem(name=name, arguments=arguments, call_id=call_id):
                calls.append(ToolCall(Called(name, arguments), call_id))
            case _:
                messages += [assistant_message(thought, texts, calls)] if thought or texts or calls else []
                messages += [_other(item)] if item is not None else []
                thought, texts, calls = "", [], []
    return messages


def _other(item: MessageItem | ResultItem) -> ChatMessage:
    if isinstance(item, ResultItem):
        return ChatMessage(role="tool", content=_joined(item.output), tool_call_id=item.call_id)
    if isinstance(item.content, str):
        return ChatMessage(role=item.role, content=item.content)
    parts = [
        ContentPart("image_url", image_url=ImageUrl(part.image_url))
        if isinstance(part, ImagePart)
        else ContentPart("text", part.text)
        for part in item.content
    ]
    return ChatMessage(role=item.role, content=parts)


def _joined(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(part, ImagePart) for part in content):
        raise bad("input: got an input_image in what an assistant said, expected it in a message of the user", "input")
    return "\n".join(part.text for part in content if not isinstance(part, ImagePart))


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    return ResponseFormat(wanted.type, JsonSchema(wanted.name, wanted.schema) if wanted.schema is not None else None)
