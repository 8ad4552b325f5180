"""Which parser reads the answers of a model; and those whose calls, or thoughts, vLLM's parsers read."""

import importlib.util
import logging
from collections.abc import Callable, Sequence

from actors.engines.vllm.answers import VllmAnswers, VllmPieces
from actors.gateway.answering.parsing import (
    AnswerParser,
    ChatTokenizer,
    OwnParser,
    Parsed,
    ParsedPieces,
    SampledText,
    checked_call,
)
from actors.gateway.answering.text import Detokenizer, StopStrings, ThoughtSplitter
from infra.model.writing import CALL_ENDS, CALL_MARKS, NONE, OWN_REASONING, OWN_TOOLS, Writing
from schemas.errors import ConfigError

_log = logging.getLogger(__name__)


def answer_parser(tokenizer: ChatTokenizer, *, has_vllm: bool | None = None) -> AnswerParser:
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


class ForeignParser:
    """An AnswerParser that reads thoughts between headrace's own marks itself, and all else with vLLM's parsers."""

    refusal = ""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.writing = tokenizer.writing
        self._tokenizer = tokenizer
        self._own = OwnParser(tokenizer)
        by_vllm = Writing(self.writing.tools, NONE) if self._own_thoughts else self.writing
        self._answers = VllmAnswers(tokenizer.wrapped, by_vllm, tokenizer.template)

    def prepare(self) -> None:
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
        except Exception as error:  # foreign code on what a model sampled: whatever it raises, the text is still there
            _log.warning("answer_not_parsed %s error=%r", self.writing.shown, error)
            return Parsed(thought, said, unread=True)
        return Parsed(thought, self._with_call(said, text), unread=True) if written.tools else Parsed(thought, said)

    def pieces(self, written: SampledText) -> ParsedPieces:
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


class ForeignPieces:
    """ParsedPieces that hand tokens to vLLM one by one, since its parsers look for some of them.

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


def _missing(writing: Writing) -> str:
    return (
        f"this model writes {writing.shown}, which vLLM's parsers read, and vLLM is not installed: "
        'pip install \'headrace[cuda]\', or set tool_parser and reasoning_parser to "hermes", "think" or "none"'
    )
