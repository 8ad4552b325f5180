"""Thoughts, words and calls in the format of each model family, whole and in pieces."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.answering.parsing import AnswerParser, OwnParser, Parsed, SampledText, answer_parser, ready
from actors.gateway.answering.requests import read_chat
from actors.gateway.answering.text import Detokenizer
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from infra.model.model import Tokenizer
from infra.model.writing import Writing, as_template_takes, detect_writing
from schemas.errors import ConfigError
from tests.actors.gateway.families import FAMILIES, WEATHER, TemplateFamily, family_tokenizer
from tests.actors.gateway.gateway_rig import ByteTokenizer
from tests.infra.chat_models import STYLES

OWN = [name for name, family in FAMILIES.items() if family.writing.is_own]
FOREIGN = [name for name in FAMILIES if name not in OWN]


def told(parser: AnswerParser, tokenizer: Any, written: SampledText, chunk: int) -> Parsed:
    """The parts of an answer that a stream sends before the answer is whole."""
    pieces, words = parser.pieces(written), Detokenizer(tokenizer.decode)
    thought = said = ""
    for at in range(0, len(written.tokens), chunk):
        tokens = written.tokens[at : at + chunk]
        more = pieces.add(words.add(tokens), tokens)
        thought, said = thought + more[0], said + more[1]
    return Parsed(thought, said)


def written(tokenizer: Tokenizer, family: TemplateFamily, text: str, tools: Sequence[Any]) -> SampledText:
    backend = tokenizer.wrapped.backend_tokenizer
    prompt, tokens = (backend.encode(one, add_special_tokens=False).ids for one in (family.prompt, text))
    return SampledText(prompt=prompt, tokens=tokens, text=tokenizer.decode(tokens), tools=tools)


def check_family(family: TemplateFamily, folder: Path) -> None:
    tokenizer = family_tokenizer(folder, family)
    parser = answer_parser(tokenizer)
    answers = [(family.answer, [WEATHER]), (family.answer, []), (family.half, [WEATHER]), (family.plain, [WEATHER])]
    for text, tools in answers:
        asked = written(tokenizer, family, text, tools)
        whole = parser.parse(asked)
        for chunk in (1, 5):
            begun = told(parser, tokenizer, asked, chunk)
            assert whole.thought.startswith(begun.thought), "no mark of a thought is ever told"
            assert whole.said.lstrip().startswith(begun.said.strip()), "no mark of a call is ever told as a word"
        if text == family.answer and tools:
            assert whole == family.parsed
        elif text == family.half:
            assert (whole.calls, whole.unread, whole.thought) == ((), True, family.parsed.thought)
            assert whole.said.endswith(text[-5:]), "it stays text"
        elif text == family.plain:
            assert (whole.said, whole.calls, whole.unread) == ("Hello.", (), False)
        else:
            assert not whole.calls and len(whole.said) > 10, "without tools there are no calls"


@pytest.mark.parametrize("name", OWN)
def test_what_is_thought_said_and_called_is_told_apart_whole_and_in_pieces(name: str, tmp_path: Path) -> None:
    check_family(FAMILIES[name], tmp_path / "model")


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize("name", FOREIGN)
def test_vllms_parsers_read_what_each_family_writes_whole_and_in_pieces(name: str, tmp_path: Path) -> None:
    check_family(FAMILIES[name], tmp_path / "model")


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize("name", ["qwen 3 coder", "gemma 4"])
def test_a_call_that_is_thought_of_is_not_made(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = family_tokenizer(tmp_path / "model", family)
    begin, end = ("<|channel>thought\n", "<channel|>") if name == "gemma 4" else ("<think>", "</think>")
    mark = "<tool_call>" if name == "qwen 3 coder" else "call:weather"
    asked = written(tokenizer, family, f"{begin}Shall I {mark}? No.{end}Hello.", [WEATHER])
    assert answer_parser(tokenizer).parse(asked) == Parsed(f"Shall I {mark}? No.", "Hello.")


@given(st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "{", "é", "<", "a b", "\n"])))
def test_pieces_of_any_text_are_the_beginning_of_the_whole(parts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    parser = OwnParser(tokenizer)
    text = "".join(parts)
    asked = SampledText(prompt=(), tokens=tokenizer.encode(text), text=text, tools=[WEATHER])
    whole, begun = parser.parse(asked), told(parser, tokenizer, asked, 3)
    assert whole.thought.startswith(begun.thought) and whole.said.startswith(begun.said)
    assert whole.unread == ("<tool_call>" in whole.said) and not whole.calls


@pytest.mark.slow  # imports vLLM
def test_gpt_oss_is_read_by_its_own_tokens(tmp_path: Path) -> None:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding  # type: ignore[import-untyped]

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    marks = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>")
    family = TemplateFamily(Writing("openai", "openai_gptoss"), "", Parsed(), "", controls=marks)
    made = family_tokenizer(tmp_path / "model", family)

    class Harmony:
        """GPT-OSS' vocabulary; vLLM asks the other tokenizer for its marks alone."""

        writing, wrapped, template = made.writing, made.wrapped, made.template

        def decode(self, ids: Sequence[int]) -> str:
            return str(encoding.decode([one for one in ids if one < 199_998]))

        def spell(self, ids: Sequence[int]) -> str:
            return str(encoding.decode(list(ids)))

    parser = answer_parser(Harmony())
    parser.prepare()
    thought = "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'
    for text, expected in (
        (thought + call, Parsed("Look.", "", (FAMILIES["mistral"].parsed.calls[0],))),
        (f"{thought}<|channel|>final<|message|>Hello.", Parsed("Look.", "Hello.")),
        (thought + call[:-6], Parsed("Look.", 'to=functions.weather json{"city": ', unread=True)),
    ):
        tokens = encoding.encode(text, allowed_special="all")
        asked = SampledText(prompt=(), tokens=tokens, text=Harmony().decode(tokens), tools=[WEATHER])
        whole = parser.parse(asked)
        assert (whole.thought, whole.calls, whole.unread) == (expected.thought, expected.calls, expected.unread)
        assert whole.said.startswith(expected.said)
        assert told(parser, Harmony(), asked, 1).thought == "Look."


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (STYLES["chatml"].template, "hermes", "think"),
        (STYLES["llama3"].template, "llama3_json", "think"),
        (STYLES["mistral"].template, "mistral", "think"),
        (STYLES["gemma"].template, "hermes", "think"),
        ("<tool_call>\n<function=example> <think>", "qwen3_coder", "think"),
        ("<|channel|>analysis <|channel|>commentary <|call|>", "openai", "openai_gptoss"),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v31", "think"),
        ("<|tool_call>call:", "gemma4", "think"),
        ("<|system|>…<|tool|>…<|/tool|>", "phi4_mini_json", "think"),
    ],
)
def test_the_template_says_how_a_model_writes_unless_the_settings_do(template: str, tools: str, reasoning: str) -> None:
    assert detect_writing(template) == Writing(tools, reasoning, chosen=False)
    assert detect_writing(template, "pythonic", "none") == Writing("pythonic", "none", chosen=True)


def test_without_vllm_its_parsers_are_refused_by_one_line_that_names_the_extra() -> None:
    class Llama(ByteTokenizer):
        writing = Writing("llama3_json", "think")

    parser = answer_parser(Llama(), has_vllm=False)
    parser.prepare()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    asked = read_chat(json.dumps(body).encode(), GatewayLimits())
    assert ready(asked, parser, takes_tools=True) == asked, "without tools it serves"
    asked = read_chat(json.dumps({**body, "tools": [WEATHER]}).encode(), GatewayLimits())
    with pytest.raises(ApiError, match=r"tools: .*llama3_json.*headrace\[cuda\].*tool_parser"):
        ready(asked, parser, takes_tools=True)
    Llama.writing = msgspec.structs.replace(Llama.writing, chosen=True)
    with pytest.raises(ConfigError, match=r"policy: .*llama3_json.*headrace\[cuda\]"):
        answer_parser(Llama(), has_vllm=False)


@pytest.mark.parametrize(
    ("tools", "choice", "force"),
    [
        ("hermes", "required", '<tool_call>\n{"name": "'),
        ("hermes", "weather", '<tool_call>\n{"name": "weather", "arguments": '),
        ("llama3_json", "weather", '{"name": "weather", "parameters": '),
        ("qwen3_coder", "weather", "<tool_call>\n<function=weather>\n"),
        ("mistral", "weather", None),
    ],
)
def test_a_call_that_must_be_made_begins_as_the_model_writes_it(tools: str, choice: str, force: str | None) -> None:
    class Model(ByteTokenizer):
        writing = Writing(tools)

    named = {"type": "function", "function": {"name": choice}}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
    asked = read_chat(
        json.dumps({**body, "tool_choice": choice if choice == "required" else named}).encode(), GatewayLimits()
    )
    parser = answer_parser(Model(), has_vllm=True)
    if force is None:
        assert ready(asked, parser, takes_tools=True).ignored == ("tool_choice",)
    else:
        assert ready(asked, parser, takes_tools=True).force == force


def test_templates_get_thoughts_and_ids_as_they_read_them() -> None:
    said = {"role": "assistant", "content": "<think>Hm.</think>Yes.", "reasoning": "Hm."}
    assert as_template_takes(said, Writing("hermes", "think")) == {"role": "assistant", "content": said["content"]}
    found = as_template_takes(said, Writing("openai", "openai_gptoss"))
    assert (found["content"], found["thinking"], found["reasoning_content"]) == ("Yes.", "Hm.", "Hm.")
    call = {"id": "call_1234567890_0", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked = as_template_takes({"role": "assistant", "content": "", "tool_calls": [call]}, Writing("mistral", "none"))
    answered = as_template_takes(
        {"role": "tool", "content": "", "tool_call_id": call["id"]}, Writing("mistral", "none")
    )
    assert asked["tool_calls"][0]["id"] == answered["tool_call_id"] and len(answered["tool_call_id"]) == 9
