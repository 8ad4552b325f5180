"""Bodies of OpenAI's Responses API, and the chat request that each means. Pure.

Guarantee: an unknown field, an unknown kind of item and a value out of bounds are each one ApiError that names the place.
What a client got from us it may send back as it is, and the model then meets the very text that it wrote.
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
)
from actors.gateway.answering.requests import (
    ChatRequest,
    JsonSchema,
    ResponseFormat,
    StreamOptions,
    Temperature,
    Text,
    TopP,
)
from actors.gateway.errors import bad


class InputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """Text of a user, system or developer message. text: as it was written."""

    text: str


class InputImage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_image"
):
    """A picture of a message. image_url: with the picture in it; nothing is fetched, and no files are kept. detail:
    changes nothing. file_id: null.
    """

    image_url: str
    detail: Text | None = None
    file_id: None = None


class OutputText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """Text of the model, as it was given. text: of one answer. annotations, logprobs: taken and not used."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ReasoningText(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_text"):
    """What the model thought, as it was given. text: of one thought."""

    text: str


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """One item of the input. id, status: as an answer of ours had them; not used."""

    id: Short | None = None
    status: Text | None = None


class MessageItem(Item, frozen=True, kw_only=True, tag="message"):
    """Something said. role: who speaks. content: text, or parts with pictures."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText]


class CallItem(Item, frozen=True, kw_only=True, tag="function_call"):
    """A call of the assistant. arguments: JSON, as text. call_id: that its result names. name: of the tool."""

    call_id: Short
    name: Name
    arguments: str


class ResultItem(Item, frozen=True, kw_only=True, tag="function_call_output"):
    """What a tool gave. call_id: of the call. output: what the model reads of it."""

    call_id: Short
    output: str | list[InputText]


class ReasoningItem(Item, frozen=True, kw_only=True, tag="reasoning"):
    """What the assistant thought. summary: taken and not used. content: the thought itself. encrypted_content: null."""

    summary: list[Any] = []
    content: list[ReasoningText] | None = None
    encrypted_content: None = None


Items = MessageItem | CallItem | ResultItem | ReasoningItem


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the client runs. Tools that a server runs have another type and are refused.

    type: the only one there is. name: by which it is called. parameters: JSON schema of its arguments. description:
    what the model reads of it. strict: changes nothing.
    """

    type: Literal["function"]
    name: Name
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that must be called. type: the only one there is. name: of the tool."""

    type: Literal["function"]
    name: Name


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """text.format: as response_format of a chat completion.

    type: text, any JSON object, or JSON of a schema. name: of the schema. schema: what the answer is held to.
    description, strict: change nothing.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """text of the Responses API. verbosity: changes nothing. format: of the answer."""

    format: TextFormat | None = None
    verbosity: Text | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """reasoning of the Responses API. What the model thinks is an item of its own, whether this is given or not.

    effort: changes nothing, how much it thinks is its own matter. summary, generate_summary: change nothing, there are
    no summaries.
    """

    effort: Text | None = None
    summary: Text | None = None
    generate_summary: Text | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/responses.

    model: a served one. input: a text of the user, or items. instructions: text before the input; not kept for the
    next request. previous_response_id: the answer whose conversation continues. max_output_tokens: of the answer.
    temperature, top_p: of the sampling. stream: whether it comes piece by piece. stream_options: what a stream says
    beside it. store: false keeps and records nothing. tools: that may be called. tool_choice: whether one must be.
    parallel_tool_calls, metadata: are said again in the response, and change nothing. text: the format of the answer.
    reasoning: see `Reasoning`. include: logprobs where it names them. user, safety_identifier: who is behind it.
    prompt_cache_key, service_tier: change nothing. truncation: the only one there is, nothing is cut. background: the
    only one there is.
    """

    model: Short
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Short | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    service_tier: Text | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    metadata: Annotated[dict[Text, Short], Meta(max_length=16)] | None = None


def chat_request(request: ResponsesRequest, earlier: Sequence[ChatMessage]) -> ChatRequest:
    """The same, asked in the other API. earlier: the conversation before it, without instructions. Raises ApiError."""
    given = [{"type": "message", "role": "user", "content": request.input}]
    items = _items(given if isinstance(request.input, str) else request.input)
    system = [ChatMessage(role="system", content=request.instructions)] if request.instructions else []
    return ChatRequest(
        model=request.model,
        messages=[*system, *earlier, *_messages(items)],
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stream=request.stream,
        store=request.store,
        logprobs="message.output_text.logprobs" in (request.include or ()),
        tools=[
            RequestTool(Function(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in request.tools or ()
        ]
        or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_format(request.text.format if request.text else None),
        user=request.user,
        safety_identifier=request.safety_identifier,
    )


def _items(given: Sequence[Mapping[str, Any]]) -> list[Items]:
    if not given:
        raise bad("input: got no item, expected at least one", "input")
    items: list[Items] = []
    for index, one in enumerate(given):
        try:
            # A message may leave out what it is.
            items.append(msgspec.convert({"type": "message", **one}, Items))  # type: ignore[arg-type]
        except msgspec.ValidationError as error:
            message, _, place = str(error).partition(" - at `$")
            where = f"input[{index}]{place.rstrip('`')}"
            raise bad(f"{where}: {message[:300]}", where) from error
    return items


def _messages(items: Sequence[Items]) -> list[ChatMessage]:
    """Items as the chat API has them: what an assistant thought, said and called in a row is one message."""
    messages: list[ChatMessage] = []
    thought, said, calls = "", list[str](), list[ToolCall]()
    for item in items:
        match item:
            case ReasoningItem(content=content):
                thought += "".join(part.text for part in content or ())
            case MessageItem(role="assistant", content=content):
                said.append(_joined(content))
            case CallItem(name=name, arguments=arguments, call_id=call_id):
                calls.append(ToolCall(Called(name, arguments), call_id))
            case _:
                messages += _assistant(thought, said, calls)
                thought, said, calls = "", [], []
                messages.append(_other(item))
    return messages + _assistant(thought, said, calls)


def _assistant(thought: str, said: Sequence[str], calls: Sequence[ToolCall]) -> list[ChatMessage]:
    if not (thought or said or calls):
        return []
    text = "\n".join(said)
    return [ChatMessage(role="assistant", content=text, reasoning=thought or None, tool_calls=list(calls) or None)]


def _other(item: Items) -> ChatMessage:
    if isinstance(item, ResultItem):
        return ChatMessage(role="tool", content=_joined(item.output), tool_call_id=item.call_id)
    assert isinstance(item, MessageItem)
    if isinstance(item.content, str) or not any(isinstance(part, InputImage) for part in item.content):
        return ChatMessage(role=item.role, content=_joined(item.content))
    parts = [
        ContentPart("image_url", image_url=ImageUrl(part.image_url))
        if isinstance(part, InputImage)
        else ContentPart("text", part.text)
        for part in item.content
    ]
    return ChatMessage(role=item.role, content=parts)


def _joined(content: str | Sequence[InputText | InputImage | OutputText]) -> str:
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        raise bad("input: got an input_image in what an assistant said, expected it in a message of the user", "input")
    return "\n".join(part.text for part in content if not isinstance(part, InputImage))


def _choice(
    choice: Literal["none", "auto", "required"] | ToolChoice | None,
) -> Literal["none", "auto", "required"] | dict[str, Any] | None:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ToolChoice) else choice


def _format(wanted: TextFormat | None) -> ResponseFormat | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return ResponseFormat(wanted.type)
    if wanted.schema is None or wanted.name is None:
        raise bad("text.format: expected name and schema beside type 'json_schema'", "text.format")
    return ResponseFormat("json_schema", JsonSchema(wanted.name, wanted.schema, wanted.description, wanted.strict))
