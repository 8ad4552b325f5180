"""OpenAI's Responses API with the client people have: openai, unmodified, over a real port."""

import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.gateway.answering.conversation import ChatMessage, Conversation, ConversationCache
from actors.gateway.apis.responses import read_responses
from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from schemas.ids import answer_id
from tests.actors.gateway.gateway_rig import EOS, ByteTokenizer, engine, says, serving

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def asked(client: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """The response, or what the client makes of the events of a stream."""
    if not stream:
        return await client.responses.create(model="m", **fields)
    async with client.responses.stream(model="m", **fields) as events:
        seen = [event async for event in events]
        assert [event.sequence_number for event in seen if hasattr(event, "sequence_number")] == list(range(len(seen)))
        return await events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_answered_and_recorded_token_by_token(tmp_path: Path, stream: bool) -> None:
    text = "Zürich 東京 🙂!"
    async with serving(tmp_path, engine(says(text))) as served:
        client = await served.opened()
        response = await asked(client, stream, input="Hi", instructions="Be brief.")
        (experience,) = await served.recorded(1)
        assert (response.id, response.status) == (answer_id(experience.id), "completed")
        assert response.output_text == text
        prompt = ByteTokenizer().encode_request(
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        )
        assert experience.tokens.tolist() == [*prompt, *text.encode(), EOS]
        assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), len(text.encode()) + 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, engine(says("a long answer"))) as served:
        client = await served.opened()
        response: Any = await client.responses.create(model="m", input="Hi", max_output_tokens=6, stream=stream)
        if stream:
            *_, last = [event async for event in response]
            assert last.type == "response.incomplete"
            response = last.response
        assert (response.status, response.output_text) == ("incomplete", "a long")
        assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("by_id", [False, True], ids=["the whole conversation", "by the id of the last response"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_is_called_and_the_next_turn_goes_on_from_the_very_tokens(
    tmp_path: Path, stream: bool, by_id: bool
) -> None:
    async with serving(tmp_path, engine(says(f"Let me look.{CALL}", "21 degrees.", "Bye."))) as served:
        client = (await served.opened()).with_options(default_headers={} if by_id else {"x-session-id": "s"})
        given: list[Any] = [{"role": "user", "content": "How warm is it?"}]
        first = await asked(client, stream, input=given, tools=[WEATHER])
        said, called = first.output
        assert (said.content[0].text, called.name, called.arguments) == (
            "Let me look.",
            "weather",
            '{"city": "Bern"}',
        )
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "21"}
        more = [result] if by_id else [*given, *(one.model_dump(exclude_none=True) for one in first.output), result]
        previous = {"previous_response_id": first.id} if by_id else {}
        second = await asked(client, stream, input=more, tools=[WEATHER], **previous)
        assert second.output_text == "21 degrees."
        if by_id:
            third = await asked(client, stream, input="Thanks", tools=[WEATHER], previous_response_id=second.id)
            assert third.previous_response_id == second.id
        turns = await served.recorded(2 + by_id)
        for before, after in itertools.pairwise(turns):
            size = len(before.tokens)
            assert after.tokens.tolist()[:size] == before.tokens.tolist(), "what was sampled is not spelled anew"
        assert len({one.group.partition(".")[0] for one in turns}) == 1, "one session"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_model_thinks_is_an_item_that_can_be_sent_back(tmp_path: Path, stream: bool) -> None:
    answer = "<think>\nA greeting <b>.\n</think>\n\nHello."
    async with serving(tmp_path, engine(says(answer, "Bye."))) as served:
        client = (await served.opened()).with_options(default_headers={"x-session-id": "s"})
        given: list[Any] = [{"role": "user", "content": "Hi"}]
        response = await asked(client, stream, input=given, reasoning={"effort": "low"})
        thought, said = response.output
        assert (thought.content[0].text, said.content[0].text) == ("\nA greeting <b>.\n", "\n\nHello.")
        history = [one.model_dump(exclude_none=True) for one in response.output]
        await asked(client, stream, input=[*given, *history, {"role": "user", "content": "Bye"}])
        first, second = await served.recorded(2)
        assert second.tokens.tolist()[: len(first.tokens)] == first.tokens.tolist()


async def test_what_is_not_known_here_or_was_given_to_others_is_not_gone_on_from(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        mine, theirs = await served.new_key(), await served.new_key(tenant="other")
        kept = await served.client(mine).responses.create(model="m", input="Hi")
        left_out = await served.client(mine).responses.create(model="m", input="Hi", store=False)
        for key, previous in ((theirs, kept.id), (mine, left_out.id), (mine, "hr-none")):
            with pytest.raises(openai.NotFoundError, match="not known here") as refused:
                await served.client(key).responses.create(model="m", input="Go on", previous_response_id=previous)
            assert refused.value.code == "previous_response_not_found"


async def test_an_engine_that_fails_ends_the_stream_with_an_error_event(tmp_path: Path) -> None:
    def broken(prompt: tuple[int, ...]) -> list[int]:
        raise RuntimeError("the kernel broke")

    async with serving(tmp_path, engine(broken)) as served:
        client = await served.opened()
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        *_, last = [event async for event in stream]
        assert last.type == "error" and last.message == "the server had an error while answering"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "response_format.json_schema"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_its_place(changes: dict[str, Any], where: str) -> None:
    body = {"model": "m", "input": "Hi"} | changes
    with pytest.raises(ApiError) as refused:
        read_responses(json.dumps(body).encode(), GatewayLimits(), lambda answer: None)
    assert (refused.value.status, refused.value.param) == (400, where)


def test_what_a_server_would_run_and_unknown_fields_are_ignored_and_named() -> None:
    body = {"model": "m", "input": "Hi", "tools": [{"type": "web_search"}], "background": True, "truncation": "auto"}
    found = read_responses(json.dumps(body).encode(), GatewayLimits(), lambda answer: None)
    assert found.ignored == ("background", "truncation", "tools.web_search")


def test_conversations_that_are_kept_are_bounded_in_number_and_in_bytes() -> None:
    cache = ConversationCache(2, 10**9)
    for number in range(10):
        cache.put(f"a{number}", Conversation(tenant="acme", messages=(ChatMessage(role="user", content="x"),)))
    assert len(cache) == 2 and cache.find("a9", "acme") is not None and cache.find("a7", "acme") is None
    assert cache.find("a9", "globex") is None
    small = ConversationCache(100, 5000)
    small.put("large", Conversation(messages=(ChatMessage(role="user", content="x" * 10_000),)))
    assert (len(small), small.total_size) == (0, 0)
