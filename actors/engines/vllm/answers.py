"""vLLM's own parsers of tool calls and reasoning, for every engine. Importing vLLM takes half a minute and a GB.

A name alone selects a parser, among the parsers that vLLM ships: no user module and nothing from a model's folder runs.
"""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from infra.model.writing import NONE, Writing
from schemas.errors import ConfigError

# Parsers with patterns from the model's folder: foreign regular expressions, which may never end.
_BY_FOLDER = ("hf",)
_HARMONY = ("openai", "openai_gptoss")
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
Answer = tuple[str, str, list[tuple[str, str]]]  # thought, words, and calls: name and arguments


class VllmAnswers:
    """Reads answers as vLLM's server does. tokenizer: transformers' tokenizer of the model's folder. template: variables of
    the chat template besides the conversation.
    """

    def __init__(self, tokenizer: Any, writing: Writing, template: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._writing = writing
        self._told = {"chat_template_kwargs": dict(template)}
        self._lock = Lock()
        self._classes: dict[bool, Any] = {}
        self._request: Any = None
        self.spells = False  # whether the names of control tokens are part of the text it reads

    def prepare(self) -> None:
        """Import vLLM. Raises ConfigError for a parser that it does not have, or that does not fit the tokenizer."""
        with self._lock:
            if self._classes:
                return
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.reasoning import ReasoningParserManager
            from vllm.tokenizers.hf import get_cached_tokenizer
            from vllm.tool_parsers import ToolParserManager

            tools, reasoning = self._writing.tools, self._writing.reasoning
            _known("tool_parser", tools, ToolParserManager.list_registered())
            _known("reasoning_parser", reasoning, ReasoningParserManager.list_registered())
            self._tokenizer = get_cached_tokenizer(self._tokenizer)
            self._request = ChatCompletionRequest
            classes = {with_tools: self._class(with_tools) for with_tools in (False, True)}
            self.spells = self._spells(classes[True])
            self._classes = classes

    def parse(
        self, text: str, tokens: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Answer:
        """Parse a whole answer. Raises the parser's errors."""
        made = self._made(tools)
        if made is None:
            return "", text, []
        parser, request = made
        parser.set_prompt_token_ids(list(prompt))
        thought, said, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=list(tokens))
        return thought or "", said or "", [(call.name, call.arguments) for call in calls or ()]

    def pieces(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> "VllmPieces":
        """An answer that is about to be sampled."""
        parser, request = self._made(tools) or (None, None)
        return VllmPieces(parser, request, list(prompt))

    def _class(self, with_tools: bool) -> Any:
        from vllm.parser import ParserManager

        tools = self._writing.tools if with_tools and self._writing.tools != NONE else None
        reasoning = self._writing.reasoning if self._writing.reasoning != NONE else None
        try:
            return ParserManager.get_parser(
                tool_parser_name=tools,
                reasoning_parser_name=reasoning,
                enable_auto_tools=True,
                is_harmony=bool({tools, reasoning} & set(_HARMONY)),
                tokenizer=self._tokenizer,
            )
        except Exception as error:  # each parser raises its own errors
            raise ConfigError(
                f"policy: {self._writing.shown}: vLLM's parsers do not fit the tokenizer: {error}"
            ) from error

    def _made(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Any] | None:
        kind = self._classes[bool(tools)]
        if kind is None:
            return None
        request = self._asked(tools)
        return kind(self._tokenizer, request.tools, **self._told), request

    def _asked(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        more = {"tools": [dict(tool) for tool in tools], "tool_choice": "auto"} if tools else {}
        return self._request(model="", messages=[], **more)

    def _spells(self, kind: Any) -> bool:
        """True if a parser wants the names of control tokens, as it says of a request."""
        if kind is None:
            return False
        request = self._asked([_TOOL])
        return not kind(self._tokenizer, request.tools, **self._told).adjust_request(request).skip_special_tokens


class VllmPieces:
    """One answer that is streamed. Its calls are read once it is whole."""

    def __init__(self, parser: Any, request: Any, prompt: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt = prompt

    def add(self, text: str, tokens: Sequence[int]) -> tuple[str, str]:
        """The new thought and the new words. Raises the parser's errors."""
        if self._parser is None:
            return "", text
        delta = self._parser.parse_delta(text, list(tokens), self._request, self._prompt, finished=False)
        return (delta.reasoning or "", delta.content or "") if delta is not None else ("", "")


def _known(setting: str, name: str, registered: Sequence[str]) -> None:
    names = sorted({*registered, NONE} - {*_BY_FOLDER})
    if name not in names:
        raise ConfigError(f'policy.{setting}: got "{name}", expected one of {", ".join(names)}')
