"""Request bodies: what is refused by its place, what is ignored and named, and what each field may hold at most."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.engine import Sampling, Shaping, shaped_logits
from actors.gateway.answering.conversation import MAX_DEPTH, read_calls
from actors.gateway.answering.parsing import checked_call
from actors.gateway.answering.requests import ParsedRequest, read_chat
from actors.gateway.answering.text import THINK, THOUGHT, Detokenizer, StopStrings, ThoughtSplitter
from actors.gateway.apis.messages import read_messages
from actors.gateway.apis.responses import read_responses
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from infra.model.writing import Writing
from tests.actors.gateway.gateway_rig import ASK, CALL, ByteTokenizer, engine, says, serving

Read = Callable[[bytes, GatewayLimits], ParsedRequest]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
SCHEMA = "response_format.json_schema"


def responses(body: bytes, limits: GatewayLimits) -> ParsedRequest:
    return read_responses(body, limits, lambda answer: None)


BASE: dict[Any, dict[str, Any]] = {
    read_chat: {"model": "m", "messages": ASK},
    read_messages: {"model": "m", "messages": ASK, "max_tokens": 9}, responses: {"model": "m", "input": "Hi"},
}  # fmt: skip


def parsed(read: Read, limits: GatewayLimits = GatewayLimits(), **fields: Any) -> ParsedRequest:  # noqa: B008 - frozen
    return read(json.dumps(BASE[read] | fields).encode(), limits)


def deep(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"p": parameters}}}


def calling(arguments: str, count: int = 1) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call] * count}]


def held(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"} | message]}


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (read_chat, {"model": None}, "model"),
    (read_chat, {"messages": []}, "messages"),
    (read_chat, {"messages": ASK * 2000}, "messages"),
    (read_chat, said(content=None), "messages[0].content"),
    (read_chat, said(role="robot"), "messages[0].role"),
    (read_chat, said(content=[IMAGE]), "messages[0].content[0].image_url.url"),
    (read_chat, said(content=[{"type": "input_audio"}]), "messages[0].content[0]"),
    (read_chat, said(content=[{"type": "x" * 65}]), "messages[0].content[0].type"),
    (read_chat, said(reasoning="y"), "messages[0].reasoning"),
    (read_chat, said(role="tool", tool_call_id="x" * 513), "messages[0].tool_call_id"),
    (read_chat, said(name="x" * 513), "messages[0].name"),
    (read_chat, {"messages": calling("{}", 129)}, "messages[0].tool_calls"),
    (read_chat, {"messages": calling('{"a": "\\ud800"}')}, "messages[0].tool_calls[0].function.arguments"),
    (read_chat, {"tools": [tool(deep(MAX_DEPTH + 1))]}, "tools[0].function.parameters"),
    (read_chat, {"tools": [tool({})] * 129}, "tools"),
    (read_chat, {"user": "x" * 513}, "user"),
    (read_chat, {"temperature": 3}, "temperature"),
    (read_chat, {"temperature": "hot"}, "temperature"),
    (read_chat, {"top_p": 0}, "top_p"),
    (read_chat, {"n": 0}, "n"),
    (read_chat, {"n": 99}, "n"),
    (read_chat, {"max_tokens": 0}, "max_tokens"),
    (read_chat, {"stop": ["x"] * 17}, "stop"),
    (read_chat, {"stop": ["x" * 257]}, "stop"),
    (read_chat, {"stop": ""}, "stop"),
    (read_chat, {"frequency_penalty": 3.0}, "frequency_penalty"),
    (read_chat, {"repetition_penalty": 1e-40}, "repetition_penalty"),
    (read_chat, {"logit_bias": {"a": 5}}, "logit_bias"),
    (read_chat, {"logit_bias": {"²": 5}}, "logit_bias"),
    (read_chat, {"logit_bias": {str(index): 0 for index in range(1025)}}, "logit_bias"),
    (read_chat, {"modalities": ["text", "audio"]}, "audio"),
    (read_chat, {"audio": {"voice": "x"}}, "audio"),
    (read_chat, {"response_format": {"type": "grammar"}}, "response_format.type"),
    (read_chat, {"response_format": {"type": "json_schema"}}, SCHEMA),
    (read_chat, {"response_format": held({"enum": ["x" * 70_000]})}, f"{SCHEMA}.schema"),
    (read_chat, {"response_format": held({"items": deep(70)})}, f"{SCHEMA}.schema"),
    (read_messages, {"messages": []}, "messages"),
    (read_messages, said(content=[]), "messages[0].content"),
    (read_messages, said(content=[{"type": "image", "source": {"type": "url"}}]), "messages[0].content[0].source.type"),
    (read_messages, said(content=[{"type": "image"}]), "messages[0].content[0]"),
    (read_messages, said(content=[{"type": "tool_result"}]), "messages[0].content[0]"),
    (read_messages, {"system": [{"type": "image"}]}, "system"),
    (read_messages, said(content=[{"type": "thinking", "thinking": "x"}]), "messages[0].content[0]"),
    (read_messages, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (read_messages, {"stop_sequences": [""]}, "stop"),
    (responses, {"input": []}, "input"),
    (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (responses, {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
    (responses, {"text": {"format": {"type": "json_schema"}}}, SCHEMA),
]


@pytest.mark.parametrize(("read", "fields", "param"), REFUSED, ids=[f"{r.__name__}-{p}" for r, _, p in REFUSED])
def test_a_bad_request_is_a_400_that_names_the_place(read: Read, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(read, **fields)
    error = json.loads(refused.value.body())["error"]
    assert (refused.value.status, error["type"]) == (400, "invalid_request_error")
    assert error["param"].replace("[...]", "[0]") == param


def test_a_request_for_more_choices_than_a_key_may_hold_is_a_400() -> None:
    assert parsed(read_chat, GatewayLimits(concurrency=4), n=3).choices == 3
    with pytest.raises(ApiError, match="n: got 4, expected at most 3"):
        parsed(read_chat, GatewayLimits(concurrency=4), n=4)


ROOT = f"{SCHEMA}.schema"
UNKEPT = {"type": "array", "uniqueItems": True, "items": {"properties": {"not": {"multipleOf": 3}}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
IGNORED: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    (read_chat, {"max_tokens": 10**9}, ("max_tokens",)),
    (read_chat, {"top_logprobs": 3}, ("top_logprobs",)),
    (read_chat, {"tool_choice": "required"}, ("tool_choice",)),
    (read_chat, {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, ("tool_choice",)),
    (read_chat, {"tools": [FUNCTION, {"type": "custom"}]}, ("tools.custom",)),
    (read_chat, {"tools": [FUNCTION], "response_format": {"type": "json_object"}}, ("response_format",)),
    (read_chat, {"stop": ["."], "response_format": {"type": "json_object"}}, ("stop",)),
    (read_chat, {"stream_options": {"include_usage": True}}, ("stream_options",)),
    (read_chat, {"colour": "red", "prediction": {"type": "content"}}, ("colour", "prediction")),
    (read_chat, {"response_format": held(UNKEPT)}, (f"{ROOT}.multipleOf", f"{ROOT}.uniqueItems")),
    (read_chat, {"echo": True, "best_of": 2, "suffix": None}, ("echo", "best_of")),
    (read_messages, {"mcp_servers": [], "tools": [SEARCH, {"name": "f"}]}, ("mcp_servers", f"tools.{SEARCH['type']}")),
    (read_messages, {"messages": [*ASK, {"role": "assistant", "content": "{"}]}, ("messages.prefill",)),
    (responses, {"include": ["message.output_text.logprobs"]}, ("include",)),
    (responses, {"tools": [{"type": "web_search"}], "background": True}, ("background", "tools.web_search")),
]


@pytest.mark.parametrize(("read", "fields", "names"), IGNORED, ids=[names[0] for *_, names in IGNORED])
def test_a_field_that_cannot_be_served_is_ignored_and_named(
    read: Read, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert parsed(read, **fields).ignored == names


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["model", "messages", "role", "content", "tools", "stop", "n", "function", "prompt", "input", "type"]),
        inner, max_size=6,
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_a_request_or_a_400(body: bytes) -> None:
    for read in BASE:
        try:
            read(body, GatewayLimits())
        except ApiError as error:
            assert error.status == 400


def test_half_a_character_is_a_400() -> None:
    for body in (
        rb'{"model": "m", "messages": [{"role": "user", "content": "a\ud800"}]}',
        b'{"model": "\xed\xa0\x80"}',
    ):
        with pytest.raises(ApiError) as refused:
            read_chat(body, GatewayLimits())
        assert refused.value.status == 400


def test_json_as_deep_as_allowed_is_taken_and_an_answers_call_that_no_client_can_send_back_is_text() -> None:
    assert parsed(read_chat, tools=[tool(deep(60))]).prompt.tools
    parsed(read_chat, messages=calling(json.dumps(deep(900))))
    for arguments in (json.dumps(deep(900)), '{"a": "\\ud800"}'):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert read_calls(text) == (text, []) and checked_call("f", arguments) is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
def test_pieces_join_to_the_text_before_the_first_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    tokens = ByteTokenizer().encode(text)
    detokenizer, cutter, told, at = Detokenizer(ByteTokenizer().decode), StopStrings(stops), "", 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 5))
        piece = cutter.add(detokenizer.add(tokens[at : at + size]))
        assert "\ufffd" not in piece or "\ufffd" in text
        told, at = told + piece, at + size
    if not cutter.found:
        told += cutter.add(detokenizer.flush())
        told += "" if cutter.found else cutter.flush()
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert told == text
    else:  # of two that overlap, the one that was complete first ends it
        assert text.startswith(told) and len(told) <= min(text.find(s) for s in stops if s in told + text[len(told) :])


@given(
    st.lists(st.sampled_from([THINK, THOUGHT, "<", "think", "</", ">", "a", "\n", "é"]), max_size=12), st.integers(1, 4)
)
def test_thoughts_and_words_joined_are_the_answer(pieces: list[str], step: int) -> None:
    text = "".join(pieces)
    splitter = ThoughtSplitter()
    parts = [splitter.add(text[at : at + step]) for at in range(0, len(text), step)] + [splitter.flush()]
    thought, words = ("".join(part[kind] for part in parts) for kind in (0, 1))
    if not text.startswith(THINK):
        assert (thought, words) == ("", text)
    else:
        assert THINK + thought + (THOUGHT + words if THOUGHT in text else "") == text


INERT = {"service_tier": "auto", "reasoning_effort": "low", "colour": 1}
CHAT = {"messages": ASK, "modalities": ["text"], "store": True, "user": "ann", "metadata": {"a": "b"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HEADER = "service_tier, reasoning_effort, colour"
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT | INERT, f"metadata, {HEADER}"),
    ("/v1/responses", {"input": "Hi", "background": True} | INERT, f"background, {HEADER}"),
    ("/v1/messages", {"messages": ASK, "max_tokens": 9} | INERT, HEADER),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "ignored"), BODIES, ids=[path for path, _, _ in BODIES])
async def test_fields_that_change_nothing_are_named_in_a_header_and_counted(
    tmp_path: Path, path: str, body: dict[str, Any], ignored: str, stream: bool
) -> None:
    async with serving(tmp_path) as served, served.http(await served.new_key()) as http:
        answer = await http.post(path, json={"model": "m", **body, "stream": stream})
        assert (answer.status_code, answer.headers["x-headrace-ignored"]) == (200, ignored), answer.text
        assert "x-headrace-trained" not in answer.headers
        assert served.count("fields_ignored") == len(ignored.split(", "))
        plain = await http.post("/v1/chat/completions", json={"model": "m", "messages": ASK})
        assert "x-headrace-ignored" not in plain.headers


@pytest.mark.parametrize(("field", "value", "why"), [("colour", 1, "ignores"), ("top_k", 5, "serves")])
async def test_a_strict_gateway_refuses_what_others_ignore_or_serve_and_answers_the_rest(
    tmp_path: Path, field: str, value: int, why: str
) -> None:
    async with serving(tmp_path, strict=True) as served, served.http(await served.new_key()) as http:
        ask = {"model": "m", "messages": ASK}
        refused = await http.post("/v1/chat/completions", json=ask | {field: value})
        assert refused.status_code == 400 and f"gateway.strict = false the gateway {why} it" in refused.text
        assert (await http.post("/v1/chat/completions", json=ask)).status_code == 200


class Unforced(ByteTokenizer):
    """A model whose format of calls has no known beginning, and is read without vLLM."""

    class Own(Writing, frozen=True):
        is_own = True

    writing = Own("mistral")


@pytest.mark.parametrize(("strict", "outcome"), [(False, (200, "tool_choice")), (True, (400, None))])
async def test_a_call_that_cannot_be_forced_is_ignored_and_named_or_refused(
    tmp_path: Path, strict: bool, outcome: tuple[int, str | None]
) -> None:
    gateway = serving(tmp_path, tokenizer=Unforced(), strict=strict)
    async with gateway as served, served.http(await served.new_key()) as http:
        ask = {"model": "m", "messages": ASK, "tools": [TOOL], "tool_choice": "required"}
        answer = await http.post("/v1/chat/completions", json=ask)
        assert (answer.status_code, answer.headers.get("x-headrace-ignored")) == outcome


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/chat/completions", {"messages": ASK, "frequency_penalty": 1.0}, "shaping"),
        ("/v1/chat/completions", {"messages": ASK, "logit_bias": {"65": 100}}, "shaping"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9, "top_k": 1}, "shaping"),
        ("/v1/responses", {"input": "Hi", "top_p": 0.5}, "top_p"),
        ("/v1/chat/completions", {"messages": ASK, "temperature": 0}, "temperature"),
    ],
)
async def test_an_answer_that_is_not_the_policys_own_draw_is_served_and_marked(
    tmp_path: Path, path: str, body: dict[str, Any], reason: str
) -> None:
    async with serving(tmp_path, engine(seed=1)) as served, served.http(await served.new_key()) as http:
        answer = await http.post(path, json={"model": "m", **body, "max_tokens": 5, "max_output_tokens": 5})
        assert (answer.status_code, answer.headers["x-headrace-trained"]) == (200, "no")
        (experience,) = await served.recorded(1)
        assert not any(span.ratio for span in experience.spans)
        assert served.metrics.counters()[f"recorded_without_ratio{{reason={reason}}}"] == 1


def test_shaped_logits_follow_the_definitions_of_vllm() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0], np.float32)

    def shaped(sampled: tuple[int, ...] = (), temperature: float = 1.0, **shaping: Any) -> list[float]:
        sampling = Sampling(max_tokens=1, temperature=temperature, shaping=Shaping(**shaping))
        return [round(float(value), 4) for value in shaped_logits(logits, sampling, (0, 1), sampled)]

    inf = float("-inf")
    assert shaped(temperature=0.5) == [4, -2, 1, 0]
    assert shaped(logit_bias=((3, 5.0),)) == [2, -1, 0.5, 5]
    assert shaped(repetition_penalty=2.0, sampled=(2,)) == [1, -2, 0.25, 0]
    assert shaped(frequency_penalty=0.5, sampled=(2, 2, 3)) == [2, -1, -0.5, -0.5]
    assert shaped(presence_penalty=0.5, sampled=(2, 2, 3)) == [2, -1, 0, -0.5]
    assert shaped(top_k=2) == [2, inf, 0.5, inf]
    assert shaped(min_p=0.2) == [2, inf, 0.5, inf]
    assert shaped(min_p=0.2, temperature=0.5) == [4, inf, inf, inf]
    assert logits.tolist() == [2.0, -1.0, 0.5, 0.0]


class Bare(ByteTokenizer):
    """A model whose chat template knows no tools."""

    takes_tools = False

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        assert all(message["role"] != "tool" and "tool_calls" not in message for message in conversation)
        return super().encode_request(conversation)


async def test_tools_of_a_model_whose_template_knows_none_are_put_into_a_system_message(tmp_path: Path) -> None:
    script = says(CALL, "Rain.")
    async with serving(tmp_path, engine(script), tokenizer=Bare()) as served:
        async with served.http(await served.new_key()) as http:
            ask = {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, *ASK], "tools": [TOOL]}
            first = await http.post("/v1/chat/completions", json=ask)
            tools = [{"name": "weather", "input_schema": {"type": "object"}}]
            same = {"model": "m", "system": "Be brief.", "messages": ASK, "tools": tools}
            counted = await http.post("/v1/messages/count_tokens", json=same)
            assert counted.json()["input_tokens"] == first.json()["usage"]["prompt_tokens"]
            message = first.json()["choices"][0]["message"]
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
            result = {"role": "tool", "content": "12 mm", "tool_call_id": call["id"]}
            ask["messages"] += [message, result]
            answer = (await http.post("/v1/chat/completions", json=ask)).json()
            assert answer["choices"][0]["message"]["content"] == "Rain."
            ask["tool_choice"] = "none"
            assert (await http.post("/v1/chat/completions", json=ask)).status_code == 200
        _, second, third = await served.recorded(3)
        prompt, last = (ByteTokenizer().decode(turn.tokens.tolist()) for turn in (second, third))
        assert "Be brief." in prompt and '"name": "weather"' in prompt and "<tool_response>\n12 mm" in prompt
        assert "<tool_response>\n12 mm" in last and "<tools>" not in last
