"""Anthropic's Messages API with the client people have: anthropic, unmodified, over a real port."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gateway.answering.text import THINK, THOUGHT, ThoughtSplitter
from actors.gateway.apis.messages import read_messages
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from schemas.ids import answer_id
from tests.actors.gateway.gateway_rig import EOS, ByteTokenizer, RunningGateway, engine, says, serving

if TYPE_CHECKING:  # seconds of imports, which every worker would pay to collect the tests
    from anthropic import AsyncAnthropic

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "name": "weather",
    "description": "How warm it is.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


async def opened(served: RunningGateway, **key: Any) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic

    made = await served.new_key(**key)
    return AsyncAnthropic(api_key=made, base_url=served.url, max_retries=0)


async def streamed(client: "AsyncAnthropic", **asked: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the message that the client makes of them."""
    async with client.messages.stream(model="m", max_tokens=200, **asked) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_message()


async def test_a_message_is_answered_and_recorded_token_by_token(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = await opened(served)
        message = await client.messages.create(
            model="any", max_tokens=20, messages=ASK, system="Be brief.", metadata={"user_id": "u@example.org"}
        )
        (experience,) = await served.recorded(1)
        assert message.id == answer_id(experience.id), "feedback names it"
        assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", "Hello.")]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        prompt = ByteTokenizer().encode_request([{"role": "system", "content": "Be brief."}, *ASK])
        assert experience.tokens.tolist() == [*prompt, *b"Hello.", EOS]
        assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), 7)
        assert experience.subject and "example" not in experience.subject


async def test_a_streamed_message_is_the_whole_one_in_pieces(tmp_path: Path) -> None:
    text = "Zürich 東京 🙂!"
    async with serving(tmp_path, engine(says(text))) as served:
        client = await opened(served)
        events, message = await streamed(client, messages=ASK)
        assert [block.text for block in message.content] == [text]
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(text.encode()) + 1)
        kinds = [event.type for event in events]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        assert kinds.count("content_block_delta") > 5
        (experience,) = await served.recorded(1)
        assert message.id == answer_id(experience.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named_and_the_longest_answer_says_so(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, engine(says("one STOP two"))) as served:
        client = await opened(served)
        for asked, expected in (
            ({"max_tokens": 200, "stop_sequences": ["never", "STOP"]}, ("one ", "stop_sequence", "STOP")),
            ({"max_tokens": 3}, ("one", "max_tokens", None)),
        ):
            if stream:
                async with client.messages.stream(model="m", messages=ASK, **asked) as pieces:  # type: ignore[arg-type]
                    message: Any = await pieces.get_final_message()
            else:
                message = await client.messages.create(model="m", messages=ASK, **asked)  # type: ignore[call-overload]
            assert (message.content[0].text, message.stop_reason, message.stop_sequence) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_the_next_turn_goes_on_from_the_very_tokens(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, engine(says(f"Let me look.{CALL}", "21 degrees."))) as served:
        client = (await opened(served)).with_options(default_headers={"x-session-id": "s"})
        asked: Any = {"tools": [WEATHER], "messages": list(ASK)}
        if stream:
            _, message = await streamed(client, **asked)
        else:
            message = await client.messages.create(model="m", max_tokens=200, **asked)
        said, use = message.content
        assert (said.text, use.name, use.input) == ("Let me look.", "weather", {"city": "Bern"})
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "21"}]}
        asked["messages"] += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]},
            {"role": "user", "content": [result]},
        ]
        last = await client.messages.create(model="m", max_tokens=200, **asked)
        assert last.content[0].text == "21 degrees."
        first, second = await served.recorded(2)
        size = len(first.tokens)
        assert second.tokens.tolist()[:size] == first.tokens.tolist(), "what was sampled is not spelled anew"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_model_thinks_is_a_block_that_can_be_sent_back(tmp_path: Path, stream: bool) -> None:
    answer = "<think>\nA greeting <b>.\n</think>\n\nHello."
    async with serving(tmp_path, engine(says(answer, "Bye."))) as served:
        client = (await opened(served)).with_options(default_headers={"x-session-id": "s"})
        if stream:
            _, message = await streamed(client, messages=ASK, thinking=THINKING)
        else:
            message = await client.messages.create(model="m", max_tokens=200, messages=ASK, thinking=THINKING)
        thought, said = message.content
        assert (thought.thinking, said.text) == ("\nA greeting <b>.\n", "\n\nHello.")
        history = [block.model_dump(exclude_none=True) for block in message.content]
        more = [*ASK, {"role": "assistant", "content": history}, {"role": "user", "content": "Bye"}]
        await client.messages.create(model="m", max_tokens=200, messages=more, thinking=THINKING)
        first, second = await served.recorded(2)
        assert second.tokens.tolist()[: len(first.tokens)] == first.tokens.tolist()


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_left_out_where_thinking_is_disabled_and_recorded_all_the_same(
    tmp_path: Path, stream: bool
) -> None:
    async with serving(tmp_path, engine(says("<think>x</think>y", "Bye."))) as served:
        client = (await opened(served)).with_options(default_headers={"x-session-id": "s"})
        asked: Any = {"messages": ASK, "thinking": {"type": "disabled"}}
        if stream:
            _, message = await streamed(client, **asked)
        else:
            message = await client.messages.create(model="m", max_tokens=200, **asked)
        assert [(block.type, block.text) for block in message.content] == [("text", "y")]
        more = [*ASK, {"role": "assistant", "content": "y"}, *ASK]
        await client.messages.create(model="m", max_tokens=200, messages=more)
        first, second = await served.recorded(2)
        assert first.messages[-1].content == "<think>x</think>y"
        assert second.tokens.tolist()[: len(first.tokens)] == first.tokens.tolist()


async def test_tokens_are_counted_without_an_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = await opened(served)
        counted = await client.messages.count_tokens(model="m", messages=ASK, tools=[WEATHER])
        message = await client.messages.create(model="m", max_tokens=5, messages=ASK, tools=[WEATHER])
        assert counted.input_tokens == message.usage.input_tokens
        assert len(await served.recorded(1)) == 1


async def test_refusals_are_the_clients_own_errors(tmp_path: Path) -> None:
    import anthropic

    async with serving(tmp_path, models=("small",)) as served:
        client = await opened(served)
        with pytest.raises(anthropic.NotFoundError, match="`m` does not exist"):
            await client.messages.create(model="m", max_tokens=5, messages=ASK)
        with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
            await client.messages.create(model="small", max_tokens=5, messages=ASK, extra_body={"temperature": 3.0})
        body: Any = refused.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        stranger = client.with_options(api_key="hr-unknown")
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model="small", max_tokens=5, messages=ASK)
        bearer = anthropic.AsyncAnthropic(auth_token=client.api_key, base_url=served.url, max_retries=0)
        assert (await bearer.messages.create(model="small", max_tokens=5, messages=ASK)).content


async def test_an_engine_that_fails_ends_the_stream_with_an_error_event(tmp_path: Path) -> None:
    import anthropic

    def broken(prompt: tuple[int, ...]) -> list[int]:
        raise RuntimeError("the kernel broke")

    async with serving(tmp_path, engine(broken)) as served:
        client = await opened(served)
        with pytest.raises(anthropic.APIStatusError, match="the server had an error while answering"):
            await streamed(client, messages=ASK)


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0]",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_its_place(changes: dict[str, Any], where: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": ASK} | changes
    with pytest.raises(ApiError) as refused:
        read_messages(json.dumps(body).encode(), GatewayLimits())
    assert (refused.value.status, refused.value.param) == (400, where)


def test_what_a_server_would_run_and_unknown_fields_are_ignored_and_named() -> None:
    body = {"model": "m", "messages": ASK, "mcp_servers": [], "top_k": 5}
    body["tools"] = [{"type": "web_search_20250305", "name": "web_search"}, {**WEATHER, "defer_loading": True}]
    found = read_messages(json.dumps(body).encode(), GatewayLimits())
    assert (found.ignored, found.max_tokens, len(found.prompt.tools)) == (
        ("mcp_servers", "tools.web_search_20250305"),
        None,
        1,
    )
    assert found.shaping is not None and found.shaping.top_k == 5


@given(
    st.lists(st.sampled_from([THINK, THOUGHT, "<", "think", "</", ">", "a", "\n", "é"]), max_size=12), st.integers(1, 4)
)
def test_thoughts_and_words_joined_are_the_answer(pieces: list[str], step: int) -> None:
    text = "".join(pieces)
    splitter = ThoughtSplitter()
    parts = [splitter.add(text[at : at + step]) for at in range(0, len(text), step)] + [splitter.flush()]
    thought, said = ("".join(part[kind] for part in parts) for kind in (0, 1))
    if not text.startswith(THINK):
        assert (thought, said) == ("", text)
    else:
        assert THINK + thought + (THOUGHT + said if THOUGHT in text else "") == text
