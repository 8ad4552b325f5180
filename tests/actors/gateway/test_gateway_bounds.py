"""What one request may hold: bounded before it is looked at, refused by name, and away from the event loop where it is long."""

import json
from array import array
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import openai
import pytest

from actors.engines.scripted import ScriptedEngine
from actors.gateway.answering.conversation import MAX_DEPTH, Prompt, read_calls
from actors.gateway.answering.requests import read_chat, read_text
from actors.gateway.answering.sessions import HeldSession, Sessions, held
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from actors.gateway.gateway import CHARS_PER_TOKEN
from actors.gateway.recording.record import THREAD_TOKENS
from actors.rollout.continuation import SampledTurn
from schemas import Message
from tests.actors.gateway.gateway_rig import VOCABULARY, ByteTokenizer, says, serving

MESSAGES = [{"role": "user", "content": "Hi"}]


def deep(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"p": parameters}}}


def calling(arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}]


def called(**more: Any) -> list[dict[str, Any]]:
    return [{**calling("{}")[0], **more}]


TOO_MUCH: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool(deep(MAX_DEPTH + 1))]}, "tools[0].function.parameters"),
    ({"tools": [tool(deep(900))]}, "tools[0].function.parameters"),
    ({"tools": [tool({})] * 129}, "tools"),
    ({"messages": called(tool_calls=calling("{}")[0]["tool_calls"] * 129)}, "messages[0].tool_calls"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "x" * 513}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "name": "x" * 513}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "x" * 65}]}]}, "messages[0].content[0].type"),
    ({"messages": calling('{"a": "\\ud800"}')}, "messages[0].tool_calls[0].function.arguments"),
    ({"user": "x" * 513}, "user"),
    ({"logit_bias": {str(index): 0 for index in range(1025)}}, "logit_bias"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
]


@pytest.mark.parametrize(("more", "param"), TOO_MUCH, ids=[param for _, param in TOO_MUCH])
def test_every_field_has_a_bound_and_what_passes_it_is_a_400_that_names_it(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_chat(json.dumps({"model": "m", "messages": MESSAGES, **more}).encode(), GatewayLimits())
    error = json.loads(refused.value.body())["error"]
    assert (refused.value.status, error["param"].replace("[...]", "[0]")) == (400, param)


def test_half_a_character_in_a_message_is_a_400() -> None:
    for body in (
        rb'{"model": "m", "messages": [{"role": "user", "content": "a\ud800"}]}',
        b'{"model": "\xed\xa0\x80"}',
    ):
        for read in (read_chat, read_text):
            with pytest.raises(ApiError) as refused:
                read(body, GatewayLimits())
            assert refused.value.status == 400


def test_json_as_deep_as_allowed_is_taken_and_an_answers_deeper_call_is_text() -> None:
    taken = read_chat(
        json.dumps({"model": "m", "messages": MESSAGES, "tools": [tool(deep(60))]}).encode(), GatewayLimits()
    )
    assert taken.prompt.tools
    read_chat(json.dumps({"model": "m", "messages": calling(json.dumps(deep(900)))}).encode(), GatewayLimits())
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(deep(900))}}}</tool_call>'
    assert read_calls(text) == (text, [])


async def test_deep_tool_parameters_are_told_and_leave_no_trace_of_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as served:
        key = await served.new_key()
        for levels in (400, 900):
            with pytest.raises(openai.BadRequestError):
                await served.client(key).chat.completions.create(
                    model="m", messages=MESSAGES, tools=[tool(deep(levels))]
                )
        await served.client(key).chat.completions.create(model="m", messages=MESSAGES, tools=[tool(deep(50))])
        assert len(await served.recorded(1)) == 1
        assert not [record for record in caplog.records if record.exc_info]


class WatchedTokenizer(ByteTokenizer):
    """Says where it is asked, and for how much at most."""

    def __init__(self) -> None:
        self.longest = {True: 0, False: 0}  # on the event loop's thread, or not
        self.decoded = {True: 0, False: 0}

    def decode(self, ids: Any) -> str:
        on_loop = current_thread() is main_thread()
        self.decoded[on_loop] = max(self.decoded[on_loop], len(ids))
        return super().decode(ids)

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        on_loop = current_thread() is main_thread()
        size = sum(len(str(message["content"])) for message in conversation)
        self.longest[on_loop] = max(self.longest[on_loop], size)
        return super().encode_request(conversation, tools)


async def test_the_event_loop_tokenizes_short_prompts_alone_and_nobody_those_that_cannot_fit(tmp_path: Path) -> None:
    tokenizer, limit = WatchedTokenizer(), GatewayLimits(prompt_tokens=1000)
    async with serving(tmp_path, tokenizer=tokenizer, limits=limit) as served:
        key = await served.new_key()
        for size in (10, 4000, 4097, 15_000, 16_001, 900_000):
            messages = [{"role": "user", "content": "x" * size}]
            if size < 1000:
                await served.client(key).chat.completions.create(model="m", messages=messages)
                continue
            with pytest.raises(openai.BadRequestError) as refused:
                await served.client(key).chat.completions.create(model="m", messages=messages)
            assert refused.value.code == "context_length_exceeded"
    assert tokenizer.longest[True] <= 4096
    assert tokenizer.longest[False] == 15_000 <= 1000 * CHARS_PER_TOKEN


async def test_the_event_loop_redacts_short_texts_alone(tmp_path: Path) -> None:
    tokenizer = WatchedTokenizer()
    sampler = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=32_768, script=says("call +49 30 123456789"))
    async with serving(tmp_path, sampler, tokenizer=tokenizer) as served:
        key = await served.new_key()
        for size in (10, THREAD_TOKENS + 1, 20_000):
            await served.client(key).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x" * size}], max_tokens=50
            )
        assert all("[phone]" in one.response for one in await served.recorded(3))
    assert tokenizer.decoded[True] <= THREAD_TOKENS < 20_000 < tokenizer.decoded[False]


def test_tools_count_as_the_prompt_does() -> None:
    much = [tool({"description": "x" * 5000})]
    ask = read_chat(json.dumps({"model": "m", "messages": MESSAGES, "tools": much}).encode(), GatewayLimits())
    assert ask.num_chars > 5000


def session(num_tokens: int, content: str = "Hi") -> HeldSession:
    plain = (Message(role="user", content=content), Message(role="assistant", content="y"))
    return held(range(num_tokens), SampledTurn(range(num_tokens - 1), [7], "y", True), plain, 1)


def test_sessions_are_bounded_in_bytes_as_well_as_in_number() -> None:
    sessions = Sessions(limit=1000, max_bytes=1_000_000)
    for index in range(100):
        sessions.keep(f"s{index}", session(20_000, "x" * 100_000))
        assert sessions.num_bytes <= 1_000_000
    assert 0 < len(sessions) < 10
    sessions.keep("s99", session(10))
    sessions.forget("nobody")
    for index in range(100):
        sessions.forget(f"s{index}")
    assert (len(sessions), sessions.num_bytes) == (0, 0)
    sessions.keep("too large alone", session(300_000))
    assert (len(sessions), sessions.num_bytes) == (0, 0)
    few = Sessions(limit=2, max_bytes=1_000_000)
    for index in range(5):
        few.keep(f"s{index}", session(10))
    assert len(few) == 2


def test_a_session_is_packed_and_goes_on_with_its_very_tokens_where_its_history_is_the_same() -> None:
    sessions = Sessions(limit=2, max_bytes=1_000_000)
    plain = (Message(role="user", content="Hi"), Message(role="assistant", content="y"))
    one = held([1, 2, 3, 9], SampledTurn([1, 2, 4], [3, 9], "y", True), plain, 4)
    assert isinstance(one.tokens, array) and isinstance(one.turn.rendered, array) and one.num_bytes < 2000
    sessions.keep("s", one)
    following, other = Message(role="user", content="and?"), Message(role="user", content="Ho")
    rendered = [1, 2, 4, 3, 9, 5, 6]
    for said, expected in (
        ((*plain, following), ([1, 2, 3, 9, 5, 6], 4, "")),
        ((other, plain[1], following), (rendered, 0, "another conversation")),
        (plain, (rendered, 0, "goes on from an earlier turn")),
    ):
        assert sessions.prompt("s", Prompt(plain=said), rendered, ByteTokenizer()) == expected
