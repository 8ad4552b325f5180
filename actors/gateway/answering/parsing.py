"""What an answer says: what was thought before it, its words, and its calls of tools.

Guarantees: what was sampled is recorded unchanged; a call that cannot be read stays text, and is counted; the pieces of a
stream, joined, begin the answer that is read at its end.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from actors.gateway.answering.conversation import Called, Prompt, is_deep, read_calls, with_tool_prompt
from actors.gateway.answering.requests import Ignored, ParsedRequest
from actors.gateway.answering.text import THINK, StopStrings, ThoughtSplitter, split_thought
from actors.gateway.errors import bad
from infra.model.writing import CALL_MARKS, FORCED, HERMES, NONE, Writing

_TAIL = 16  # tokens of a prompt that are looked at


class SampledText(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as it was sampled. prompt: what the template wrote. tokens: without the stop token. text: of the
    tokens, up to a stop string, with what the answer was made to begin with. tools: it may call. stops: strings that
    end it. force: text that it was made to begin with.
    """

    prompt: Sequence[int]
    tokens: Sequence[int] = ()
    text: str = ""
    stops: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    force: str = ""


class Parsed(msgspec.Struct, frozen=True):
    """An answer as its client sees it. thought: text before the words. said: the words. calls: of tools, in their order.
    unread: True if the beginning of a call could not be read and stayed text.
    """

    thought: str = ""
    said: str = ""
    calls: tuple[Called, ...] = ()
    unread: bool = False


class ParsedPieces(Protocol):
    """One answer that is streamed."""

    def add(self, piece: str, tokens: Sequence[int]) -> tuple[str, str]:
        """The new thought and the new words, as far as they can be separated; calls are neither."""


class AnswerParser(Protocol):
    """Reads answers. Safe in several threads once it is prepared."""

    writing: Writing
    refusal: str  # why no tools can be called, "" where they can

    def prepare(self) -> None:
        """Load what it needs; blocks, for a minute where vLLM is to be imported. Again is fine. Raises ConfigError."""

    def parse(self, written: SampledText) -> Parsed:
        """A whole answer. Never raises."""

    def pieces(self, written: SampledText) -> ParsedPieces:
        """An answer that is about to be sampled."""


class ChatTokenizer(Protocol):
    """The part of a tokenizer that requests and parsers need. Only vLLM's parsers ask for template, wrapped and spell."""

    @property
    def writing(self) -> Writing:
        """The format of the model's calls and thoughts."""

    @property
    def template(self) -> Mapping[str, Any]:
        """Variables of the chat template besides the conversation."""

    @property
    def wrapped(self) -> Any:
        """The tokenizer of transformers."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    @property
    def takes_images(self) -> bool:
        """True if the model sees."""

    @property
    def takes_tools(self) -> bool:
        """True if the chat template takes tools."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone."""

    def encode_request(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a conversation as the template writes it, ready for the next answer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""

    def spell(self, ids: Sequence[int]) -> str:
        """Text of the ids, control tokens by their names."""


def render(prompt: Prompt, tokenizer: ChatTokenizer) -> list[int]:
    """Tokens of a prompt. Raises ApiError for one that the template refuses."""
    try:
        if prompt.tokens:
            return list(prompt.tokens)
        if prompt.chat is None:
            return tokenizer.encode(prompt.plain[0].content)
        chat = [dict(message) for message in prompt.chat]
        return tokenizer.encode_request(chat, [dict(tool) for tool in prompt.tools])
    except (ValueError, RecursionError) as error:
        raise bad(f"messages: {error}", "messages") from error


class OwnParser:
    """An AnswerParser for Hermes' calls, and for thoughts between THINK and THOUGHT, also if the template opens them."""

    def __init__(self, tokenizer: ChatTokenizer, writing: Writing | None = None, refusal: str = "") -> None:
        self.writing = writing or tokenizer.writing
        self.refusal = refusal
        self._decode = tokenizer.decode

    def prepare(self) -> None:
        return

    def parse(self, written: SampledText) -> Parsed:
        thought, said = self.thought(written)
        if not written.tools or self.writing.tools == NONE:
            return Parsed(thought, said)
        words, calls = read_calls(said)
        return Parsed(thought, words, tuple(calls), unread=CALL_MARKS[HERMES][0] in words)

    def pieces(self, written: SampledText) -> ParsedPieces:
        marks = CALL_MARKS[self.writing.tools] if written.tools and self.writing.tools != NONE else ()
        return OwnPieces(self.splitter(written), marks)

    def thought(self, written: SampledText) -> tuple[str, str]:
        """Split an answer into its thought and the rest."""
        splitter = self.splitter(written)
        return split_thought(written.text, splitter) if splitter is not None else ("", written.text)

    def splitter(self, written: SampledText) -> ThoughtSplitter | None:
        """A splitter of thoughts from words, None if the model writes no thoughts."""
        if self.writing.reasoning == NONE or written.force:
            return None
        opened = self._decode(list(written.prompt[-_TAIL:])).rstrip().endswith(THINK)
        return ThoughtSplitter(thinks=True if opened else None)


class OwnPieces:
    """ParsedPieces whose words end where a mark may begin a call."""

    def __init__(self, splitter: ThoughtSplitter | None, marks: Sequence[str]) -> None:
        self._splitter = splitter
        self._guard = StopStrings(marks)

    def add(self, piece: str, tokens: Sequence[int]) -> tuple[str, str]:
        thought, said = self._splitter.add(piece) if self._splitter is not None else ("", piece)
        return thought, self._guard.add(said)


def ready(request: ParsedRequest, parser: AnswerParser, *, takes_tools: bool, strict: bool = False) -> ParsedRequest:
    """The request as this model can be asked: with the text its answer must begin with, where it must call a tool.

    takes_tools: the chat template does; for another, tools are put into a system message. Raises ApiError where calls of this
    model cannot be read, and for what is ignored where the gateway is strict.
    """
    writing = parser.writing.tools
    if request.prompt.tools and (parser.refusal or writing == NONE):
        raise bad(f"tools: {parser.refusal or 'the policy is served with tool_parser = none'}", "tools")
    if request.prompt.tools and not takes_tools:
        if strict or writing != HERMES:
            raise bad("tools: this model's chat template knows no tools", "tools")
        request = msgspec.structs.replace(request, prompt=with_tool_prompt(request.prompt))
    if request.must_call is None:
        return request
    if writing not in FORCED:
        ignored = Ignored(strict=strict)
        ignored.add("tool_choice", f"how a call as {writing} begins is not known here", None)
        return msgspec.structs.replace(request, must_call=None, ignored=(*request.ignored, *ignored.names))
    opening = FORCED[writing][bool(request.must_call)]
    return msgspec.structs.replace(request, force=opening.format(name=request.must_call))


def checked_call(name: str, arguments: str) -> Called | None:
    """A call as a parser read it, None for one that cannot be sent to a client."""
    try:
        call = msgspec.convert({"name": name, "arguments": arguments}, Called)
        value = json.loads(call.arguments)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return call if isinstance(value, dict) and not is_deep(value) else None
