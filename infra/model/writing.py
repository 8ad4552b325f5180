"""Formats of a model's tool calls and of its reasoning.

A parser's name says it. `hermes` and `think` are headrace's own and need nothing; the other names are vLLM's, for its parsers
of tool calls and of reasoning. `none` leaves the model's output as text.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

HERMES, THINK, NONE = "hermes", "think", "none"
OWN_TOOLS, OWN_REASONING = (HERMES, NONE), (THINK, NONE)
# Words of a chat template, and the parser that they imply; the first match counts. All of the words must be there.
TOOLS_BY_TEMPLATE = (
    (("<|channel|>", "<|call|>"), "openai"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), HERMES),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
    (("<|tool|>",), "phi4_mini_json"),
)
REASONING_BY_TEMPLATE = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("<|channel>",), "gemma4"),
    (("[THINK]",), "mistral"),
)
# Beginnings of a call, by parser: text without any of them holds no call.
CALL_MARKS: Mapping[str, tuple[str, ...]] = {
    HERMES: ("<tool_call>",),
    "openai": ("to=functions.",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
    "functiongemma": ("<start_function_call>",),
    "gemma4": ("<|tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "qwen3_xml": ("<tool_call>", "<function="),
    "llama3_json": ("<|python_tag|>", '{"name"', '{"type"'),
    "phi4_mini_json": ("functools",),
}
# End of a call, for parsers that take a truncated call for a whole call.
CALL_ENDS: Mapping[str, str] = {
    "functiongemma": "<end_function_call>",
    "gemma4": "<tool_call|>",
    "qwen3_coder": "</function>",
    "qwen3_xml": "</function>",
}
# Beginnings of an answer that must call a tool: any tool, or the tool {name}. Other parsers have no known beginning.
FORCED: Mapping[str, tuple[str, str]] = {
    HERMES: ('<tool_call>\n{{"name": "', '<tool_call>\n{{"name": "{name}", "arguments": '),
    "llama3_json": ('{{"name": "', '{{"name": "{name}", "parameters": '),
    "qwen3_coder": ("<tool_call>\n<function=", "<tool_call>\n<function={name}>\n"),
    "qwen3_xml": ("<tool_call>\n<function=", "<tool_call>\n<function={name}>\n"),
    "phi4_mini_json": ('functools[{{"name": "', 'functools[{{"name": "{name}", "arguments": '),
}


class Writing(msgspec.Struct, frozen=True):
    """Names of parsers. chosen: by the settings, as against read off the chat template.

    tools: of calls of tools. reasoning: of thoughts.
    """

    tools: str = HERMES
    reasoning: str = THINK
    chosen: bool = False

    @property
    def is_own(self) -> bool:
        """True if headrace parses all of it by itself."""
        return self.tools in OWN_TOOLS and self.reasoning in OWN_REASONING

    @property
    def shown(self) -> str:
        return f"tool calls as {self.tools}, thoughts as {self.reasoning}"


def detect_writing(template: str, tool_parser: str = "", reasoning_parser: str = "") -> Writing:
    """Formats of a model. template: its chat template. tool_parser, reasoning_parser: from the settings, "" where unset.

    >>> detect_writing("… <tool_call> … <function= …").tools
    'qwen3_coder'
    """
    tools = tool_parser or _first(TOOLS_BY_TEMPLATE, template, HERMES)
    reasoning = reasoning_parser or _first(REASONING_BY_TEMPLATE, template, THINK)
    return Writing(tools, reasoning, bool(tool_parser or reasoning_parser))


def as_template_takes(message: Mapping[str, Any], writing: Writing) -> dict[str, Any]:
    """A message of a client, for the chat template. An assistant's thoughts are in its content, between marks, and again as
    `reasoning`: a template that writes thoughts in another way gets them as a field, under the names that such templates read.
    """
    found = dict(message)
    thought = found.pop("reasoning", "")
    if thought and writing.reasoning not in OWN_REASONING:
        said = found["content"].partition("</think>")[2]
        found |= {"content": said, "reasoning": thought, "reasoning_content": thought, "thinking": thought}
    found["content"] = content_of(found["content"], found.pop("images", 0))
    if writing.tools == "mistral":
        found |= {"tool_call_id": _nine(found["tool_call_id"])} if "tool_call_id" in found else {}
        if "tool_calls" in found:
            calls = found["tool_calls"]
            found["tool_calls"] = [{**call, "id": _nine(call["id"])} if "id" in call else call for call in calls]
    return found


def content_of(text: str, num_images: int) -> object:
    """A message's content as chat templates take it: text alone, or parts, the images first."""
    return [*({"type": "image"} for _ in range(num_images)), {"type": "text", "text": text}] if num_images else text


def _first(rules: tuple[tuple[tuple[str, ...], str], ...], template: str, otherwise: str) -> str:
    return next((name for words, name in rules if all(word in template for word in words)), otherwise)


def _nine(call_id: str) -> str:
    """An id as Mistral's templates want them: nine letters and digits."""
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
