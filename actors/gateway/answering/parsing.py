"""Parts of an answer: thoughts, text and tool calls.

Guarantees: sampled tokens are recorded unchanged. An unreadable call stays text and is counted. The joined pieces of a stream
are a prefix of the answer that is parsed at its end.
"""

import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from actors.engines.vllm.answers import VllmAnswers, VllmPieces
from actors.gateway.answering.conversation import Called, Prompt, is_deep, read_calls, with_tool_prompt
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.answering.text import THINK, Detokenizer, StopStrings, ThoughtSplitter, split_thought
from actors.gateway.errors import bad
from infra.model.model import Tokenizer
from infra.model.writing import CALL_ENDS, CALL_MARKS, FORCED, HERMES, NONE, OWN_REASONING, OWN_TOOLS, Writing
from schemas.errors import ConfigError

_log = logging.getLogger(__name__)

_TAIL = 16  # tokens of a prompt that are looked at


class SampledText(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as sampled. prompt: tokens as the template writes them. tokens: without the stop token. text: of the tokens, up
    to a stop string, after `force`, the text with which the answer had to begin.
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


def render(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a prompt. Raises ApiError for one that the template refuses."""
    try:
        chat = [dict(message) for message in prompt.chat]
        return tokenizer.encode_request(chat, [dict(tool) for tool in prompt.tools])
    except (ValueError, RecursionError) as error:
        raise bad(f"messages: {error}", "messages") from error


class OwnPieces:
    """An answer that is streamed; its words end where a mark may begin a call."""

    def __init__(self, splitter: ThoughtSplitter | None, marks: Sequence[str]) -> None:
        self._splitter = splitter
        self._guard = StopStrings(marks)

    def add(self, piece: str, tokens: Sequence[int]) -> tuple[str, str]:
        """The new thought and the new words, as far as they can be separated; calls are neither."""
        thought, said = self._splitter.add(piece) if self._splitter is not None else ("", piece)
        return thought, self._guard.add(said)


class OwnParser:
    """Reads Hermes' calls, and thoughts between THINK and THOUGHT, also if the template opens them. Safe in several threads.

    refusal: why no tools can be called, "" where they can.
    """

    def __init__(self, tokenizer: Tokenizer, writing: Writing | None = None, refusal: str = "") -> None:
        self.writing = writing or tokenizer.writing
        self.refusal = refusal
        self._decode = tokenizer.decode

    def prepare(self) -> None:
        """Do nothing: this parser needs no preparation."""

    def parse(self, written: SampledText) -> Parsed:
        """A whole answer. Never raises."""
        thought, said = self.thought(written)
        if not written.tools or self.writing.tools == NONE:
            return Parsed(thought, said)
        words, calls = read_calls(said)
        return Parsed(thought, words, tuple(calls), unread=CALL_MARKS[HERMES][0] in words)

    def pieces(self, written: SampledText) -> OwnPieces:
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


class ForeignPieces:
    """An answer that is streamed: hands tokens to vLLM one by one, since its parsers look for some of them.

    decode: makes their text, which ends at a stop string.
    """

    def __init__(
        self,
        pieces: VllmPieces,
        splitter: ThoughtSplitter | None,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
    ) -> None:
        self._pieces = pieces
        self._splitter = splitter
        self._words = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._broken = False

    def add(self, piece: str, tokens: Sequence[int]) -> tuple[str, str]:
        """Read a piece. After a failure of the parser no piece follows: the rest comes with the whole answer."""
        thought = said = ""
        for token in tokens:
            more = self._add(token) if not self._broken else ("", "")
            thought, said = thought + more[0], said + more[1]
        return thought, said

    def _add(self, token: int) -> tuple[str, str]:
        thought, text, tokens = "", self._stops.add(self._words.add((token,))), [token]
        if self._splitter is not None:
            thinks = self._splitter.thinks is not False
            thought, text = self._splitter.add(text)
            tokens = [] if thinks else tokens
        if not (text or tokens):
            return thought, ""
        try:
            more, said = self._pieces.add(text, tokens)
        except Exception as error:
            _log.warning("stream_not_parsed error=%r", error)
            self._broken = True
            return thought, ""
        return thought + more, said


class ForeignParser:
    """Reads thoughts between headrace's own marks itself, and all else with vLLM's parsers. Safe in several threads once it is
    prepared.
    """

    refusal = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.writing = tokenizer.writing
        self._tokenizer = tokenizer
        self._own = OwnParser(tokenizer)
        by_vllm = Writing(self.writing.tools, NONE) if self._own_thoughts else self.writing
        self._answers = VllmAnswers(tokenizer.wrapped, by_vllm, tokenizer.template)

    def prepare(self) -> None:
        """Import vLLM; blocks for a minute. Again is fine. Raises ConfigError."""
        self._answers.prepare()

    def parse(self, written: SampledText) -> Parsed:
        self.prepare()
        text = self._spelled(written)
        thought, said = "", written.text
        try:
            thought, said, _ = self._read(written, text, tools=False)
            half = self._half(said) if written.tools else ""
            if written.tools and text.endswith(half):
                _, words, calls = self._read(written, text.removesuffix(half), tools=True)
                checked = tuple(call for found in calls if (call := checked_call(*found)) is not None)
                begun = any(mark in said for mark in self._marks)
                if len(checked) == len(calls) and (checked or not begun):
                    return Parsed(thought, words + half, checked, unread=bool(half))
        except Exception as error:  # foreign code on sampled text may raise any error; the text is still there
            _log.warning("answer_not_parsed %s error=%r", self.writing.shown, error)
            return Parsed(thought, said, unread=True)
        return Parsed(thought, self._with_call(said, text), unread=True) if written.tools else Parsed(thought, said)

    def pieces(self, written: SampledText) -> ForeignPieces:
        self.prepare()
        pieces = self._answers.pieces(written.prompt, written.tools)
        splitter = self._own.splitter(written) if self._own_thoughts else None
        decode = self._tokenizer.spell if self._answers.spells else self._tokenizer.decode
        return ForeignPieces(pieces, splitter, decode, written.stops)

    @property
    def _own_thoughts(self) -> bool:
        return self.writing.reasoning in OWN_REASONING

    def _read(self, written: SampledText, text: str, *, tools: bool) -> tuple[str, str, list[tuple[str, str]]]:
        thought, tokens = "", written.tokens
        if self._own_thoughts:
            thought, text = self._own.thought(SampledText(prompt=written.prompt, text=text, force=written.force))
            tokens = () if thought else tokens
        more, said, calls = self._answers.parse(text, tokens, written.prompt, written.tools if tools else ())
        return thought + more, said, calls

    def _half(self, said: str) -> str:
        """A call that breaks off at the end of the answer and so must not be made, "" for none."""
        end = CALL_ENDS.get(self.writing.tools, "")
        behind = said.rfind(end) + 1 if end else len(said)
        begins = [at for mark in self._marks if (at := said.find(mark, behind)) >= 0]
        return said[min(begins) :] if begins else ""

    def _with_call(self, said: str, text: str) -> str:
        """The words with the call that could not be read, which some parsers remove."""
        if any(mark in said for mark in self._marks):
            return said
        begins = [at for mark in self._marks if (at := text.find(mark)) >= 0]
        return said + text[min(begins) :] if begins else said

    @property
    def _marks(self) -> Sequence[str]:
        return CALL_MARKS.get(self.writing.tools, ())

    def _spelled(self, written: SampledText) -> str:
        """The answer for vLLM: with the names of control tokens if its parser wants them."""
        if not self._answers.spells:
            return written.text
        text = written.force + self._tokenizer.spell(written.tokens)
        stops = StopStrings(written.stops)
        return stops.add(text) + stops.flush()


AnswerParser = OwnParser | ForeignParser


def ready(request: ParsedRequest, parser: AnswerParser, *, takes_tools: bool) -> ParsedRequest:
    """The request as this model can be asked: with the text its answer must begin with, where it must call a tool.

    takes_tools: the chat template does; for another, tools are put into a system message, and earlier calls are text. Raises
    ApiError where calls of this model cannot be read.
    """
    writing = parser.writing.tools
    if request.prompt.tools and (parser.refusal or writing == NONE):
        raise bad(f"tools: {parser.refusal or 'the policy is served with tool_parser = none'}", "tools")
    if request.prompt.tools and not takes_tools and writing != HERMES:
        raise bad("tools: this model's chat template does not support tools", "tools")
    if not takes_tools:
        request = msgspec.structs.replace(request, prompt=with_tool_prompt(request.prompt))
    if request.must_call is None:
        return request
    if writing not in FORCED:
        return msgspec.structs.replace(request, must_call=None, ignored=(*request.ignored, "tool_choice"))
    opening = FORCED[writing][bool(request.must_call)]
    return msgspec.structs.replace(request, force=opening.format(name=request.must_call))


def checked_call(name: str, arguments: str) -> Called | None:
    """A call as a parser read it, None for one that cannot be sent to a client."""
    try:
        call = msgspec.convert({"name": name, "arguments": arguments}, Called)
        value = json.loads(call.arguments)
        msgspec.json.encode(value)  # half a character raises: no response can hold it
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    return call if isinstance(value, dict) and not is_deep(value) else None


def answer_parser(tokenizer: Tokenizer, *, has_vllm: bool | None = None) -> AnswerParser:
    """Choose the parser of a tokenizer's model. has_vllm: True if vLLM is installed, None to look. Raises ConfigError
    if the settings name a parser of vLLM's, and vLLM is not installed.
    """
    writing = tokenizer.writing
    if writing.is_own:
        return OwnParser(tokenizer)
    if not (importlib.util.find_spec("vllm") is not None if has_vllm is None else has_vllm):
        if writing.chosen:
            raise ConfigError(f"policy: {_missing(writing)}")
        own = Writing(NONE, NONE if writing.reasoning not in OWN_REASONING else writing.reasoning)
        return OwnParser(tokenizer, own, refusal=_missing(writing) if writing.tools not in OWN_TOOLS else "")
    return ForeignParser(tokenizer)


def _missing(writing: Writing) -> str:
    return (
        f"this model writes {writing.shown}, which vLLM's parsers read, and vLLM is not installed: "
        'pip install \'headrace[cuda]\', or set tool_parser and reasoning_parser to "hermes", "think" or "none"'
    )
