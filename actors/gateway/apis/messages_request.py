"""Bodies of Anthropic's Messages API, and the chat request that each means. Pure.

Guarantee: a kind of block that is not known and a value out of bounds are each one ApiError that names the place. What a client
got from us it may send back as it is, and the model then meets the very text that it wrote.
"""

import json
from collections.abc import Mapping
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
from actors.gateway.answering.requests import ChatRequest, Ignored, Temperature, Text, TopP
from actors.gateway.errors import bad


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text. text: as it was written."""

    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of the assistant. id: that its result names. name: of the tool. input: its arguments."""

    id: Short
    name: Name
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """A tool's result. tool_use_id: of the call. content: what the model reads of it."""

    tool_use_id: Short
    content: str | list[TextBlock] = ""


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A thought of the model. thinking: its text."""

    thinking: str


class Base64Source(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    """A picture within the request; those at an address have another type and are refused: nothing is fetched.

    media_type: of the file, as image/png. data: the file in base64.
    """

    media_type: Short
    data: str


class ImageBlock(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """A picture of the user's. source: the picture itself."""

    source: Base64Source


class MessageParam(msgspec.Struct, frozen=True):
    """A message of the conversation. role: who speaks. content: text, or blocks of it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock]


class ToolChoice(msgspec.Struct, frozen=True):
    """tool_choice of the Messages API.

    type: whether tools may be called (auto), must be (any), one must be (tool), or none may. name: of that one.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool. Those that a server runs have another type than "custom" and are left out.

    name: by which it is called. input_schema: JSON schema of its arguments. description: what the model reads of it. type: of
    the tool.
    """

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
    """metadata of the Messages API. user_id: whose data this is."""

    user_id: Short | None = None


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of /v1/messages, and without max_tokens of /v1/messages/count_tokens.

    model: a served model. messages: the conversation so far. max_tokens: of the answer. system: text before the
    conversation. stop_sequences: texts that end the answer. stream: whether it comes piece by piece. temperature, top_p, top_k:
    of the sampling. tools: that may be called. tool_choice: whether one must be. thinking: whether thoughts are sent.
    metadata: who the user is.
    """

    model: Short
    messages: list[MessageParam]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    system: str | list[TextBlock] = ""
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None
    metadata: Metadata | None = None


def chat_request(request: MessagesRequest, ignored: Ignored) -> ChatRequest:
    """Convert a request to one of the chat API. Raises ApiError."""
    if not request.messages:
        raise bad("messages: got none, expected at least one", "messages")
    messages = [ChatMessage(role="system", content=_joined(request.system))] if request.system else []
    for index, message in enumerate(request.messages):
        messages += _chat_messages(message, f"messages[{index}].content")
    tools = []
    for tool in request.tools or ():
        if tool.type not in (None, "custom"):
            ignored.add(f"tools.{tool.type}", "only tools of the type custom are served")
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


_BLOCKS: Mapping[str, tuple[type, ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}


def _chat_messages(message: MessageParam, where: str) -> list[ChatMessage]:
    """A message as the chat API has it: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if not message.content:
        raise bad(f"{where}: got no block, expected at least one", where)
    found, parts, calls, thought = list[ChatMessage](), list[ContentPart](), list[ToolCall](), ""
    for at, block in enumerate(message.content):
        if not isinstance(block, _BLOCKS[message.role]) or (isinstance(block, ThinkingBlock) and (parts or calls)):
            raise bad(f"{where}[{at}]: got a block that a {message.role} does not send there", f"{where}[{at}]")
        match block:
            case TextBlock():
                parts.append(ContentPart("text", block.text))
            case ImageBlock(source=source):
                url = f"data:{source.media_type};base64,{source.data}"
                parts.append(ContentPart("image_url", image_url=ImageUrl(url)))
            case ToolResultBlock():
                found += [ChatMessage(role="user", content=parts)] if parts else []
                parts = []
                found.append(ChatMessage(role="tool", content=_joined(block.content), tool_call_id=block.tool_use_id))
            case ToolUseBlock():
                calls.append(ToolCall(Called(block.name, json.dumps(block.input)), block.id))
            case ThinkingBlock():
                thought += block.thinking
    if message.role == "assistant":
        return [assistant_message(thought, [part.text or "" for part in parts], calls)]
    return [*found, ChatMessage(role=message.role, content=parts)] if parts else found


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise bad("tool_choice.name: missing, expected it beside type 'tool'", "tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
