"""Conversations of clients: the input of the chat template, and the plain text for comparison and recording.

A model writes tool calls as text in its own format (`infra.model.writing`). Compared and recorded texts use Hermes' format: a
JSON object between `<tool_call>` and `</tool_call>`.

Guarantees of pictures: nothing is fetched. The number of pixels is known, and compared with the request's limit, before
decompression. An invalid picture is one ApiError that names it.
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.gateway.answering.text import THINK, THOUGHT
from actors.gateway.errors import bad
from infra.newest import Newest
from infra.store.images import FORMATS, MAX_IMAGE_BYTES, Pixels, decode_image, image_named
from schemas import Image, Message
from schemas.errors import BadImage

MAX_DEPTH = 64  # of JSON that a client sends within its messages and tools
MAX_SHOWN = 64  # images of one message, as in its record
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_PROMPT = """You may call these functions:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments between tags, and nothing after it:
<tool_call>
{{"name": "function name", "arguments": {{}}}}
</tool_call>"""
_DATA = re.compile(r"data:([a-z0-9.+-]{1,32}/[a-z0-9.+-]{1,32});base64,", re.IGNORECASE)
_OBJECTS_BYTES = 512  # about, of the objects that hold a message
Short = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class ImageUrl(msgspec.Struct, frozen=True):
    """A picture. url: with the picture in it, `data:image/png;base64,…`; nothing is fetched."""

    url: str


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content. type: text or image_url, which names the field that is set."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    image_url: ImageUrl | None = None


class Called(msgspec.Struct, frozen=True):
    """The function of a tool call. name: of a tool of the request. arguments: JSON, as text."""

    name: Name
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an assistant's message."""

    function: Called
    id: Short = ""
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a request; a client may send a message of the gateway back unchanged.

    reasoning, reasoning_content: thoughts of an assistant; the second is an older name. refusal: text instead of content.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] | None = None
    tool_call_id: Short | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


def assistant_message(thought: str, texts: Sequence[str], calls: Sequence[ToolCall]) -> ChatMessage:
    """An assistant's message with thoughts, text and calls in a row."""
    said = "\n".join(texts)
    return ChatMessage(role="assistant", content=said, reasoning=thought or None, tool_calls=list(calls) or None)


class Function(msgspec.Struct, frozen=True):
    """A function the model may call. parameters: JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class RequestTool(msgspec.Struct, frozen=True):
    """A tool of a request. function: its function, None for a tool of another type. type: "function" is served."""

    function: Function | None = None
    type: Annotated[str, Meta(max_length=64)] = "function"


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that a request can continue by the id of its last answer.

    tenant: of the key. subject: user whose key seals it, "" for none. session: name that the client or the gateway gave it.
    messages: all messages, the answer last.
    """

    tenant: str = ""
    subject: str = ""
    session: str = ""
    messages: tuple[ChatMessage, ...]

    @property
    def num_bytes(self) -> int:
        """Approximate memory. Answers of one conversation share their messages; each counts all messages."""
        return sum(_OBJECTS_BYTES + len(msgspec.json.encode(message)) for message in self.messages)


class ConversationCache(Newest[str, Conversation]):
    """The newest conversations by the id of their last answer, in the memory of one gateway."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        super().__init__(limit, max_size=max_bytes, size=lambda conversation: conversation.num_bytes)

    def find(self, answer: str, tenant: str) -> Conversation | None:
        """The conversation that ends with an answer of that tenant."""
        found = self.get(answer)
        return found if found is not None and found.tenant == tenant else None


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt. chat: messages for the template. plain: the same as text, to compare and to record. pictures: bytes of all
    images, in their order. tools: functions, for the template; none where the answer may call none. tools_digest: of the
    functions in the request.
    """

    plain: tuple[Message, ...]
    chat: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    pictures: tuple[bytes, ...] = ()
    tools_digest: bytes = b""


def chat_prompt(
    messages: Sequence[ChatMessage], tools: Sequence[RequestTool], choice: str | Mapping[str, Any] | None
) -> tuple[Prompt, str | None]:
    """The prompt, and the tool its answer must call because of `tool_choice`: "" for any, None for no must. Raises ApiError."""
    forced = _forced(tools, choice)
    for index, tool in enumerate(tools):
        if tool.function is not None and is_deep(tool.function.parameters):
            where = f"tools[{index}].function.parameters"
            raise bad(f"{where}: expected at most {MAX_DEPTH} levels of objects and lists", where)
    given = tuple(msgspec.to_builtins(tool) for tool in tools) if choice != "none" else ()
    for tool in given:
        tool["function"] = {name: value for name, value in tool["function"].items() if value is not None}
    chat, plain, files = list[dict[str, Any]](), list[Message](), list[bytes]()
    for index, message in enumerate(messages):
        text, pictures = _read_content(message, index)
        shown = _for_template(message, text, index) | ({"images": len(pictures)} if pictures else {})
        images = tuple(image for image, _ in pictures)
        chat.append(shown)
        plain.append(Message(role=message.role, content=_plain(shown), images=images))
        files += [data for _, data in pictures]
    digest = hashlib.blake2b(msgspec.json.encode(tools), digest_size=16).digest()
    prompt = Prompt(plain=tuple(plain), chat=tuple(chat), tools=given, pictures=tuple(files), tools_digest=digest)
    return prompt, forced


def with_tool_prompt(prompt: Prompt) -> Prompt:
    """The prompt for a chat template that knows no tools: a system message says them, and calls and results are text."""
    chat = [_without_calls(message) for message in prompt.chat]
    if not prompt.tools:
        return msgspec.structs.replace(prompt, chat=tuple(chat))
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in prompt.tools)
    said = TOOL_PROMPT.format(tools=tools)
    if chat and chat[0]["role"] in ("system", "developer"):
        chat[0] = {**chat[0], "content": f"{chat[0]['content']}\n\n{said}"}
    else:
        chat.insert(0, {"role": "system", "content": said})
    return msgspec.structs.replace(prompt, chat=tuple(chat))


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": _plain(message)}


def read_calls(text: str) -> tuple[str, list[Called]]:
    """Text and tool calls of an answer; a malformed call stays text.

    >>> read_calls('Look. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    ('Look.', [Called(name='f', arguments='{"x": 1}')])
    """
    calls: list[Called] = []
    texts: list[str] = []
    rest = text
    while (begin := rest.find(OPEN)) >= 0 and (end := rest.find(CLOSE, begin)) >= 0:
        call = _called(rest[begin + len(OPEN) : end])
        texts.append(rest[:begin] if call else rest[: end + len(CLOSE)])
        calls += [call] if call else []
        rest = rest[end + len(CLOSE) :]
    texts.append(rest)
    return ("".join(texts).strip() if calls else text), calls


def is_deep(value: Any) -> bool:
    """Return True if a JSON value has more levels of objects and lists than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for part in level
            for inner in (part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
        ]
        if not level:
            return False
    return True


def spelled(thought: str, said: str) -> str:
    """Write thoughts and an answer as one text, in one spelling for all models."""
    return f"{THINK}{thought}{THOUGHT}{said}" if thought else said


def written(content: str, calls: Sequence[Called]) -> str:
    """A message with tool calls as plain text: one spelling of calls that clients can send in several."""
    return _written(content, map(_called_as, calls))


def _written(content: str, calls: Iterable[Mapping[str, Any]]) -> str:
    called = [f"{OPEN}\n{json.dumps(call, sort_keys=True)}\n{CLOSE}" for call in calls]
    return "\n".join([*([content] if content else []), *called])


def _called_as(call: Called) -> dict[str, Any]:
    return {"name": call.name, "arguments": _arguments(call.arguments)}


def _checked(call: Called, where: str) -> dict[str, Any]:
    """A call that a client sends back, for templates. Raises ApiError for lone surrogates."""
    found = _called_as(call)
    try:
        msgspec.json.encode(found)
    except UnicodeEncodeError as error:
        where += ".function.arguments"
        raise bad(f"{where}: got half a character (a lone surrogate), expected text", where) from error
    return found


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if is_deep(value) else value


def _called(text: str) -> Called | None:
    try:
        value = json.loads(text)
        arguments = value.get("arguments", {})
        if is_deep(arguments):
            return None
        call = Called(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
        msgspec.json.encode(_called_as(call))  # half a character raises: no response can hold it
        return msgspec.convert(msgspec.to_builtins(call), Called)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, msgspec.ValidationError):
        return None


def _for_template(message: ChatMessage, text: str, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": text or message.refusal or ""}
    thought = message.reasoning or message.reasoning_content
    if thought:
        if message.role != "assistant":
            raise bad(f"messages[{index}].reasoning: expected in an assistant message", f"messages[{index}].reasoning")
        found |= {"content": spelled(thought, found["content"]), "reasoning": thought}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise bad(
                f"messages[{index}].tool_calls: expected in an assistant message", f"messages[{index}].tool_calls"
            )
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": _checked(call.function, f"messages[{index}].tool_calls[{at}]"),
            }
            for at, call in enumerate(message.tool_calls)
        ]
    elif message.content is None and message.refusal is None and not thought:
        raise bad(f"messages[{index}].content: missing, expected text", f"messages[{index}].content")
    return found


def _read_content(message: ChatMessage, index: int) -> tuple[str, list[tuple[Image, bytes]]]:
    """The text and the pictures of a message. Raises ApiError."""
    if not isinstance(message.content, list):
        return message.content or "", []
    texts, pictures = [], []
    for at, part in enumerate(message.content):
        where = f"messages[{index}].content[{at}]"
        if part.type == "text" and part.text is not None:
            texts.append(part.text)
        elif part.type != "image_url":
            said = f"{where}: got type {part.type[:40]!r}, and only text and image_url are accepted"
            raise bad(said, where, "field_not_accepted")
        elif message.role != "user" or part.image_url is None:
            raise bad(f"{where}: expected image_url with a url, in a user message", where)
        else:
            pictures.append(read_picture(part.image_url.url, f"{where}.image_url.url"))
    if len(pictures) > MAX_SHOWN:
        where = f"messages[{index}].content"
        raise bad(f"{where}: got {len(pictures)} images, expected at most {MAX_SHOWN}", where)
    return "\n".join(texts), pictures


def _plain(message: Mapping[str, Any]) -> str:
    return _written(message["content"], (call["function"] for call in message.get("tool_calls", ())))


def _forced(tools: Sequence[RequestTool], choice: str | Mapping[str, Any] | None) -> str | None:
    """The name of the tool that must be called; the model writes the arguments."""
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        return ""
    assert isinstance(choice, Mapping)
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in [tool.function.name for tool in tools if tool.function is not None]:
        raise bad("tool_choice: expected the name of one of the tools", "tool_choice")
    return str(name)


def read_picture(url: str, where: str) -> tuple[Image, bytes]:
    """The name and the file of the picture in a data URL. Raises ApiError."""
    head = _DATA.match(url[:128])
    if head is None:
        expected = "expected data:image/…;base64,… with the picture in it: nothing is fetched"
        raise bad(f"{where}: got {url[:40]!r}, {expected}", where, "field_not_accepted")
    if head[1].lower() not in FORMATS:
        raise bad(f"{where}: got {head[1]!r}, expected one of {', '.join(FORMATS)}", where, "field_not_accepted")
    if len(url) > MAX_IMAGE_BYTES * 4 // 3 + 128:
        raise bad(f"{where}: got {len(url)} characters, expected a picture of {MAX_IMAGE_BYTES} bytes at most", where)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"{where}: not base64: {error}", where) from error
    return image_named(data, head[1].lower()), data


def decoded_pictures(images: Sequence[Image], pictures: Sequence[bytes], max_pixels: int) -> tuple[Pixels, ...]:
    """Pixels of all pictures of a request. max_pixels: of all together. Blocks. Raises ApiError."""
    found: list[Pixels] = []
    left = max_pixels
    for image, data in zip(images, pictures, strict=True):
        try:
            pixels = decode_image(image, data, left)
        except BadImage as error:
            raise bad(f"messages: image {len(found)}: {error}", "messages", "invalid_image") from error
        left -= pixels.shape[0] * pixels.shape[1]
        found.append(pixels)
    return tuple(found)
