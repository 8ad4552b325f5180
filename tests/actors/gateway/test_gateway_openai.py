"""The gateway with the client people have: openai, unmodified, over a real port."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from infra.policies.tensors import to_numpy
from infra.store.memory import MemoryStore
from schemas.ids import answer_id
from tests.actors.gateway.gateway_rig import EOS, ByteTokenizer, engine, says, serving
from tests.actors.rig import until

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


async def test_every_request_is_timed_to_its_end_and_a_streamed_answer_to_its_first_token_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        client = await served.opened()
        await client.chat.completions.create(model="any", messages=ASK)
        pieces = await client.chat.completions.create(model="any", messages=ASK, stream=True, n=2)
        said = [piece.choices[0].delta.content async for piece in pieces if piece.choices]
        assert "".join(filter(None, said)).count("Hello.") == 2 or len(said) > 2
        with pytest.raises(openai.AuthenticationError):
            await served.client("hr-nobody").chat.completions.create(model="any", messages=ASK)

        def timed(name: str) -> float:
            path = {"route": "/v1/chat/completions"}
            return served.metrics.registry.get_sample_value(f"headrace_{name}_count", path) or 0.0

        await until(lambda: timed("request_s") == 3)
        assert timed("first_token_s") == 1


async def test_a_chat_completion_is_answered_and_recorded_token_by_token(tmp_path: Path) -> None:
    sampler = engine(seed=3)
    async with serving(tmp_path, sampler) as served:
        client = await served.opened()
        answer = await client.chat.completions.create(
            model="any", messages=ASK, max_tokens=20, temperature=0.7, logprobs=True, seed=5, user="u@example.org"
        )
        (experience,) = await served.recorded(1)
        assert answer.id == answer_id(experience.id) and answer.object == "chat.completion"
        assert answer.usage is not None and answer.usage.completion_tokens == experience.num_sampled
        prompt = ByteTokenizer().encode_request(ASK)
        assert experience.tokens.tolist()[: experience.num_prompt] == prompt
        table = to_numpy(sampler.tensors["bigram.weight"]).astype(np.float64) / 0.7
        table -= np.log(np.exp(table).sum(-1, keepdims=True))
        at = experience.num_prompt
        pairs = zip(experience.tokens[at - 1 : -1], experience.tokens[at:], strict=True)
        np.testing.assert_allclose(experience.logprobs, [table[a, b] for a, b in pairs], atol=1e-5)
        (span,) = experience.spans
        assert (span.version, span.temperature, span.ratio) == (0, 0.7, True)
        assert (experience.tenant, experience.lane) == ("acme", "live")
        assert "example" not in experience.subject and experience.subject
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        told = [entry.logprob for entry in logprobs.content]
        np.testing.assert_allclose(told, experience.logprobs[: len(told)], atol=1e-6)


async def test_a_stream_tells_whole_characters_and_ends_with_usage(tmp_path: Path) -> None:
    text = "Zürich 東京 🙂!"
    async with serving(tmp_path, engine(says(text))) as served:
        client = await served.opened()
        stream = await client.chat.completions.create(
            model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == text and len(pieces) > 5
        assert not any("\ufffd" in piece for piece in pieces)
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(text.encode()) + 1
        (experience,) = await served.recorded(1)
        assert {chunk.id for chunk in chunks} == {answer_id(experience.id)}
        assert experience.response == text and experience.tokens[-1] == EOS


async def test_a_stop_string_is_not_told_and_its_tokens_are_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("one STOP two"))) as served:
        client = await served.opened()
        for stream in (False, True):
            answer: Any = await client.chat.completions.create(model="m", messages=ASK, stop=["STOP"], stream=stream)
            if stream:
                chunks = [chunk async for chunk in answer]
                assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one "
                assert chunks[-1].choices[0].finish_reason == "stop"
            else:
                assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
        for experience in await served.recorded(2):
            assert experience.response == "one " and experience.end == "terminal"
            assert ByteTokenizer().decode(experience.tokens[experience.num_prompt :].tolist()) == "one STOP"


async def test_n_answers_are_one_group_and_the_length_limit_is_a_truncation(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("a long answer"))) as served:
        client = await served.opened()
        answer = await client.chat.completions.create(model="m", messages=ASK, n=3, max_completion_tokens=4)
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
        experiences = await served.recorded(3)
        assert len({one.group for one in experiences}) == 1 and len({one.id for one in experiences}) == 3
        assert [(one.episode, one.group_size, one.end) for one in experiences] == [
            (index, 3, "truncated") for index in range(3)
        ]
        assert [choice.answer_id for choice in answer.choices] == [answer_id(one.id) for one in experiences]  # type: ignore[attr-defined]


async def test_tools_are_called_told_and_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says(f"Let me see.{CALL}", "It rains."))) as served:
        client = await served.opened()
        headers = {"x-session-id": "s1"}
        messages = list(ASK)
        first = await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=[WEATHER],
            extra_headers=headers,  # type: ignore[list-item]
        )
        (call,) = first.choices[0].message.tool_calls or []
        assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content == "Let me see."
        assert json.loads(call.function.arguments) == {"city": "Zürich"}  # type: ignore[union-attr]
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        second = await client.chat.completions.create(
            model="m",
            messages=messages,
            tools=[WEATHER],
            extra_headers=headers,  # type: ignore[list-item]
        )
        assert second.choices[0].message.content == "It rains."
        turns = await served.recorded(2)
        assert all(turn.spans[0].ratio for turn in turns), (
            "a tool that the model chose to call is the policy's own draw"
        )


async def test_a_streamed_tool_call_comes_whole_and_a_forced_one_begins_as_forced(tmp_path: Path) -> None:
    forced = {"type": "function", "function": {"name": "weather"}}
    async with serving(tmp_path, engine(says(f"Well. {CALL}", '{"city": "Bern"}}\n</tool_call>'))) as served:
        client = await served.opened()
        stream: Any = await client.chat.completions.create(
            model="m",
            messages=ASK,
            tools=[WEATHER],
            stream=True,  # type: ignore[list-item]
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Well. "
        (call,) = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
        assert (call.index, call.function.name) == (0, "weather")
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        answer: Any = await client.chat.completions.create(
            model="m",
            messages=ASK,
            tools=[WEATHER],
            tool_choice=forced,  # type: ignore[list-item, arg-type]
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
        experience = (await served.recorded(2))[-1]
        prompt = ByteTokenizer().decode(experience.tokens[: experience.num_prompt].tolist())
        assert prompt.endswith('"arguments": '), "what was forced was not sampled"


async def test_completions_and_models(tmp_path: Path) -> None:
    async with serving(tmp_path, models=("gpt-x",)) as served:
        client = await served.opened()
        answer = await client.completions.create(model="gpt-x", prompt="Hi", logprobs=1, max_tokens=50)
        assert answer.choices[0].text == "Hello." and answer.choices[0].logprobs is not None
        stream = await client.completions.create(model="gpt-x", prompt=[72, 105], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello."
        assert [model.id async for model in client.models.list()] == ["main", "gpt-x"]
        assert (await client.models.retrieve("main")).owned_by == "headrace"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=ASK)


async def test_turns_of_a_session_go_on_from_the_very_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("One.", "Two.", "Three."))) as served:
        client = await served.opened()
        messages = list(ASK)
        for turn in range(3):
            answer = await client.chat.completions.create(
                model="m", messages=messages, extra_headers={"x-session-id": "chat-1"}
            )
            said = answer.choices[0].message
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": f"and {turn}"}]
        rewritten = [{"role": "user", "content": "Other"}, *messages[1:]]
        await client.chat.completions.create(model="m", messages=rewritten, extra_headers={"x-session-id": "chat-1"})
        turns = await served.recorded(4)
        assert len({one.group.partition(".")[0] for one in turns}) == 1, "one session"
        assert len({one.group for one in turns}) == 4, "every turn is a group of its own: none repeats another"
        assert [one.carried for one in turns] == [0, 1, 2, 0]
        for before, after in itertools.pairwise(turns[:3]):
            assert after.tokens[: before.num_tokens].tolist() == before.tokens.tolist()


async def test_replicas_that_know_nothing_of_each_other_mint_different_ids(tmp_path: Path) -> None:
    store = MemoryStore()
    ids = []
    for replica in range(3):
        async with serving(tmp_path / str(replica), store=store) as served:
            client = await served.opened()
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model="m", messages=ASK, extra_headers={"x-session-id": "same"}
                )
                ids.append(answer.id)
    assert len(set(ids)) == 6
    assert len({one.partition(".")[0] for one in ids}) == 1, "one session has one name at every replica"
