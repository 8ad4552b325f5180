"""Calls and thoughts in the formats of model families: sampled answers, and their contents."""

from pathlib import Path
from typing import Any

import msgspec

from actors.gateway.answering.conversation import Called
from actors.gateway.answering.parsing import Parsed
from infra.model.model import Tokenizer, load_tokenizer
from infra.model.writing import Writing
from tests.infra.chat_models import CHATML, Style, build_chat_model

BERN = Called("weather", '{"city": "Bern"}')
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip


class TemplateFamily(msgspec.Struct, frozen=True):
    """prompt: what its template ends with. controls: its special tokens, words: added ones that are not special. answer: with a
    call. half: with one that breaks off. plain: without any.
    """

    writing: Writing
    answer: str
    parsed: Parsed
    half: str
    plain: str = "Hello."
    prompt: str = "<|im_start|>assistant\n"
    controls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


THOUGHT = "<think>\nLook <b>.\n</think>\n\n"
FAMILIES = {
    "llama 3": TemplateFamily(
        Writing("llama3_json", "none"),
        '{"name": "weather", "parameters": {"city": "Bern"}}',
        Parsed(calls=(BERN,)),
        '{"name": "weather", "parameters": {"city',
        controls=("<|python_tag|>",),
    ),
    "llama 3, by its own mark": TemplateFamily(
        Writing("llama3_json", "none"),
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Bern"}}',
        Parsed(calls=(BERN,)),
        '<|python_tag|>{"name": "weather", "parameters": {"city',
        controls=("<|python_tag|>",),
    ),
    "mistral": TemplateFamily(
        Writing("mistral", "none"),
        'Let me look.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}}]',
        Parsed(said="Let me look.", calls=(BERN,)),
        'Let me look.[TOOL_CALLS] [{"name": "weather", "argum',
        controls=("[TOOL_CALLS]",),
    ),
    "magistral": TemplateFamily(
        Writing("mistral", "mistral"),
        '[THINK]Look.[/THINK]So.[TOOL_CALLS]weather[ARGS]{"city": "Bern"}',
        Parsed("Look.", "So.", (BERN,)),
        '[THINK]Look.[/THINK]So.[TOOL_CALLS]weather[ARGS]{"city',
        controls=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "qwen 3": TemplateFamily(
        Writing("hermes", "think"),
        THOUGHT + 'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        Parsed("\nLook <b>.\n", "Let me look.", (BERN,)),
        THOUGHT + 'Let me look.<tool_call>\n{"name": "weather"',
        words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "qwen 3 that always thinks": TemplateFamily(
        Writing("hermes", "think"),
        THOUGHT.removeprefix("<think>")
        + '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        Parsed("\nLook <b>.\n", "", (BERN,)),
        THOUGHT.removeprefix("<think>") + '<tool_call>\n{"name": "weather"',
        prompt="<|im_start|>assistant\n<think>\n",
        plain="Hm.</think>Hello.",
        words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "qwen 3, by vllm": TemplateFamily(
        Writing("hermes", "qwen3"),
        THOUGHT + 'Let me look.<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
        Parsed("\nLook <b>.\n", "\n\nLet me look.", (BERN,)),
        THOUGHT + 'Let me look.<tool_call>\n{"name": "weather"',
        plain="<think>\n\n</think>Hello.",
        words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "deepseek r1, by vllm": TemplateFamily(
        Writing("deepseek_v3", "deepseek_r1"),
        "Look.</think>So."
        f"{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}weather\n"
        f'```json\n{{"city": "Bern"}}\n```{DEEPSEEK[3]}{DEEPSEEK[1]}',
        Parsed("Look.", "So.", (BERN,)),
        f'Look.</think>So.{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}weather\n```json\n{{"ci',
        prompt="<|im_start|>assistant\n<think>\n",
        plain="Hm.</think>Hello.",
        words=("<think>", "</think>", *DEEPSEEK),
    ),
    "deepseek 3.1": TemplateFamily(
        Writing("deepseek_v31", "think"),
        f'Look.</think>So.{DEEPSEEK[0]}{DEEPSEEK[2]}weather{DEEPSEEK[4]}{{"city": "Bern"}}{DEEPSEEK[3]}{DEEPSEEK[1]}',
        Parsed("Look.", "So.", (BERN,)),
        f'Look.</think>So.{DEEPSEEK[0]}{DEEPSEEK[2]}weather{DEEPSEEK[4]}{{"ci',
        prompt="<|im_start|>assistant\n<think>\n",
        plain="Hm.</think>Hello.",
        words=("<think>", "</think>", *DEEPSEEK),
    ),
    "qwen 3 coder": TemplateFamily(
        Writing("qwen3_coder", "think"),
        THOUGHT
        + "Let me look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>",
        Parsed("\nLook <b>.\n", "Let me look.", (BERN,)),
        THOUGHT + "Let me look.\n<tool_call>\n<function=weather>\n<param",
        words=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "phi 4 mini": TemplateFamily(
        Writing("phi4_mini_json", "none"),
        'functools[{"name": "weather", "arguments": {"city": "Bern"}}]',
        Parsed(calls=(BERN,)),
        'functools[{"name": "weather", "argum',
    ),
    "gemma 4": TemplateFamily(
        Writing("gemma4", "gemma4"),
        '<|channel>thought\nLook.<channel|>So.<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>',
        Parsed("Look.", "So.", (BERN,)),
        '<|channel>thought\nLook.<channel|>So.<|tool_call>call:weather{city:<|"|>Be',
        prompt="<|turn>user\nHi<turn|>\n<|turn>model\n",
        controls=("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "function gemma": TemplateFamily(
        Writing("functiongemma", "none"),
        "<start_function_call>call:weather{city:<escape>Bern<escape>}<end_function_call>",
        Parsed(calls=(BERN,)),
        "<start_function_call>call:weather{city:<escape>Be",
        controls=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
}


def family_tokenizer(folder: Path, family: TemplateFamily) -> Tokenizer:
    """A tokenizer that has the family's control tokens."""
    style = Style(CHATML, ("<|im_end|>", "<|im_start|>", *family.controls), words=family.words)
    parsers = (family.writing.tools, family.writing.reasoning)
    return load_tokenizer(build_chat_model(folder, style), {"enable_thinking": True}, parsers)
