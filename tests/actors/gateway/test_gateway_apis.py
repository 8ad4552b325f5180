"""The gateway with the clients people have, openai and anthropic, unmodified, over a real port: three APIs alike."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from infra.model.model import Tokenizer
from infra.policies.tensors import to_numpy
from schemas.ids import answer_id
from tests.actors.gateway.families import FAMILIES, family_tokenizer
from tests.actors.gateway.gateway_rig import (
    APIS,
    CALL,
    EOS,
    VOCABULARY,
    ByteTokenizer,
    ask_chat,
    ask_messages,
    ask_responses,
    engine,
    result_turn,
    says,
    serving,
)  # fmt: skip

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
SESSION = {"x-session-id": "s"}
by_api = pytest.mark.parametrize("ask", APIS)
whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


@by_api
@whole_and_streamed
async def test_an_answer_is_recorded_token_by_token_and_named_by_its_id(tmp_path: Path, ask: Any, stream: bool) -> None:
    text = "Zürich 東京 🙂!"
    async with serving(tmp_path, engine(says(text))) as served:
        system: dict[str, Any] = {"system": "Be brief."} if ask is ask_messages else {"instructions": "Be brief."}
        said = ASK if ask is not ask_chat else [{"role": "system", "content": "Be brief."}, *ASK]
        user = {"metadata": {"user_id": "u@example.org"}} if ask is ask_messages else {"user": "u@example.org"}
        told = await ask(served, await served.new_key(), said, stream=stream, **user, **(system if said is ASK else {}))
        (experience,) = await served.recorded(1)
        assert (told.id, told.said) == (answer_id(experience.id), text)
        prompt = ByteTokenizer().encode_request([{"role": "system", "content": "Be brief."}, *ASK])
        assert experience.tokens.tolist() == [*prompt, *text.encode(), EOS]
        assert told.used == (len(prompt), len(text.encode()) + 1)
        assert (experience.tenant, experience.lane) == ("acme", "live")
        assert experience.subject and "example" not in experience.subject


@by_api
@whole_and_streamed
async def test_an_answer_that_is_cut_off_says_so(tmp_path: Path, ask: Any, stream: bool) -> None:
    limit = {ask_chat: "max_completion_tokens", ask_messages: "max_tokens", ask_responses: "max_output_tokens"}[ask]
    async with serving(tmp_path, engine(says("a long answer"))) as served:
        told = await ask(served, await served.new_key(), ASK, stream=stream, **{limit: 6})
        assert (told.said, told.finish) == ("a long", "length")
        assert (await served.recorded(1))[0].end == "truncated"


@by_api
@whole_and_streamed
async def test_the_next_turn_goes_on_from_the_very_tokens_behind_a_thought_words_and_a_call(
    tmp_path: Path, ask: Any, stream: bool
) -> None:
    answer = f"<think>\nA greeting <b>.\n</think>\n\nLet me look.{CALL}"
    async with serving(tmp_path, engine(says(answer, "21 degrees.", "Bye."))) as served:
        key, said = await served.new_key(), list(ASK)
        first = await ask(served, key, said, stream=stream, tools=True, extra_headers=SESSION)
        assert (first.thought, first.said.strip()) == ("\nA greeting <b>.\n", "Let me look.")
        assert [call[1:] for call in first.calls] == [("weather", {"city": "Bern"})]
        said += [*first.turn, result_turn(ask, first, "21")]
        second = await ask(served, key, said, stream=stream, tools=True, extra_headers=SESSION)
        assert second.said == "21 degrees." and not second.calls
        said += [*second.turn, {"role": "user", "content": "Thanks"}]
        await ask(served, key, said, stream=stream, tools=True, extra_headers=SESSION)
        turns = await served.recorded(3)
        assert len({turn.group.partition(".")[0] for turn in turns}) == 1 and [t.carried for t in turns] == [0, 1, 2]
        assert len({turn.group for turn in turns}) == 3, "each turn is a group of its own"
        for before, after in itertools.pairwise(turns):
            assert after.tokens.tolist()[: before.num_tokens] == before.tokens.tolist(), (
                "nothing sampled is spelled anew"
            )
        assert all(turn.spans[0].ratio for turn in turns), "a call that the model chose is the policy's own draw"


@whole_and_streamed
async def test_a_response_is_gone_on_from_by_its_id_by_its_own_tenant_where_it_is_kept(
    tmp_path: Path, stream: bool
) -> None:
    async with serving(tmp_path, engine(says(f"Let me look.{CALL}", "21 degrees.", "Bye."))) as served:
        mine, theirs = await served.new_key(), await served.new_key(tenant="other")
        first = await ask_responses(served, mine, ASK, stream=stream, tools=True)
        result = result_turn(ask_responses, first, "21")
        second = await ask_responses(served, mine, [result], stream=stream, tools=True, previous_response_id=first.id)
        await ask_responses(served, mine, ASK, stream=stream, tools=True, previous_response_id=second.id)
        turns = await served.recorded(3)
        for before, after in itertools.pairwise(turns):
            assert after.tokens.tolist()[: before.num_tokens] == before.tokens.tolist()
        left_out = await ask_responses(served, mine, ASK, store=False)
        for key, previous in ((theirs, first.id), (mine, left_out.id), (mine, "hr-none")):
            with pytest.raises(openai.NotFoundError, match="not known here") as refused:
                await ask_responses(served, key, ASK, previous_response_id=previous)
            assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("path", "begins"),
    [("chat/completions", b'data: {"error":'), ("messages", b"event: error\n"), ("responses", b"event: error\n")],
)
async def test_an_engine_that_fails_ends_the_stream_with_an_error_event(
    tmp_path: Path, path: str, begins: bytes
) -> None:
    def broken(prompt: tuple[int, ...]) -> list[int]:
        raise RuntimeError("the kernel broke")

    body = {"model": "m", "stream": True, "max_tokens": 9, "messages": ASK, "input": "Hi"}
    async with serving(tmp_path, engine(broken)) as served, served.http(await served.new_key()) as http:
        *_, last, end = (await http.post(f"/v1/{path}", json=body)).content.split(b"\n\n")
        assert last.startswith(begins) and b"the server had an error while answering" in last and not end


@pytest.mark.parametrize("ask", [ask_chat, ask_messages])
@whole_and_streamed
async def test_a_stop_string_is_not_told_and_its_tokens_are_recorded(tmp_path: Path, ask: Any, stream: bool) -> None:
    async with serving(tmp_path, engine(says("one STOP two"))) as served:
        stops = {"stop" if ask is ask_chat else "stop_sequences": ["never", "STOP"]}
        told = await ask(served, await served.new_key(), ASK, stream=stream, **stops)
        assert (told.said, told.finish) == ("one ", "stop" if ask is ask_chat else "STOP")
        (experience,) = await served.recorded(1)
        assert experience.response == "one " and experience.end == "terminal"
        assert ByteTokenizer().decode(experience.tokens[experience.num_prompt :].tolist()) == "one STOP"


def samples(tokenizer: Tokenizer, text: str) -> Any:
    answer = tokenizer.wrapped.backend_tokenizer.encode(text, add_special_tokens=False).ids
    size = max(VOCABULARY, tokenizer.num_tokens)
    return type(engine())(num_vocabulary=size, max_model_len=4096, script=lambda _: [*answer, tokenizer.eos_ids[0]])


@pytest.mark.parametrize(
    "name", ["qwen 3", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama 3", "magistral", "gemma 4"))]
)
async def test_clients_are_told_thoughts_words_and_calls_apart_in_every_api(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family_tokenizer(tmp_path / "model", family)
    async with serving(tmp_path / "gateway", samples(tokenizer, family.answer), tokenizer=tokenizer) as served:
        key = await served.new_key()
        for ask, stream in itertools.product(APIS, (False, True)):
            told = await ask(served, key, ASK, stream=stream, tools=True)
            assert (told.thought, told.said.strip()) == (family.parsed.thought, family.parsed.said), ask
            assert [call[1:] for call in told.calls] == [("weather", {"city": "Bern"})]
        sampled = [turn.tokens[turn.num_prompt :].tolist() for turn in await served.recorded(6)]
        assert all(tokens == sampled[0] for tokens in sampled) and tokenizer.spell(sampled[0][:-1]) == family.answer


@whole_and_streamed
async def test_a_call_that_breaks_off_is_told_as_text_and_counted(tmp_path: Path, stream: bool) -> None:
    family = FAMILIES["qwen 3"]
    tokenizer = family_tokenizer(tmp_path / "model", family)
    async with serving(tmp_path / "gateway", samples(tokenizer, family.half), tokenizer=tokenizer) as served:
        told = await ask_chat(served, await served.new_key(), ASK, stream=stream, tools=True)
        assert told.thought == family.parsed.thought and not told.calls
        assert told.said.strip() == family.half.partition("</think>")[2].strip()
        assert served.count("calls_unread") == 1


async def test_recorded_logprobs_are_those_of_the_policy_and_told_where_they_are_asked_for(tmp_path: Path) -> None:
    sampler = engine(seed=3)
    async with serving(tmp_path, sampler) as served:
        answer = await (await served.opened()).chat.completions.create(
            model="any", messages=ASK, max_tokens=20, temperature=0.7, logprobs=True, seed=5
        )
        (experience,) = await served.recorded(1)
        table = to_numpy(sampler.tensors["bigram.weight"]).astype(np.float64) / 0.7
        table -= np.log(np.exp(table).sum(-1, keepdims=True))
        at = experience.num_prompt
        pairs = zip(experience.tokens[at - 1 : -1], experience.tokens[at:], strict=True)
        np.testing.assert_allclose(experience.logprobs, [table[a, b] for a, b in pairs], atol=1e-5)
        (span,) = experience.spans
        assert (span.version, span.temperature, span.ratio) == (0, 0.7, True)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        told = [entry.logprob for entry in logprobs.content]
        np.testing.assert_allclose(told, experience.logprobs[: len(told)], atol=1e-6)


async def test_a_token_of_a_part_of_a_character_has_no_bytes_in_logprobs(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("é!"))) as served:
        ask = {"model": "m", "messages": ASK, "logprobs": True}
        answer = await (await served.opened()).chat.completions.create(**ask)  # type: ignore[call-overload]
        told = [(entry.token, entry.bytes) for entry in answer.choices[0].logprobs.content]
        assert told[:3] == [("\ufffd", None), ("\ufffd", None), ("!", [33])]


async def test_n_answers_are_one_group(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("a long answer"))) as served:
        client = await served.opened()
        answer = await client.chat.completions.create(model="m", messages=ASK, n=3, max_completion_tokens=4)
        experiences = await served.recorded(3)
        assert len({one.group for one in experiences}) == 1 and len({one.id for one in experiences}) == 3
        assert [(one.episode, one.group_size) for one in experiences] == [(index, 3) for index in range(3)]
        assert [choice.answer_id for choice in answer.choices] == [answer_id(one.id) for one in experiences]  # type: ignore[attr-defined]


async def test_a_forced_call_begins_as_forced(tmp_path: Path) -> None:
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    async with serving(tmp_path, engine(says('{"city": "Bern"}}\n</tool_call>'))) as served:
        told = await ask_chat(served, await served.new_key(), ASK, tools=True, tool_choice=forced)
        assert [call[1:] for call in told.calls] == [("weather", {"city": "Bern"})]
        (experience,) = await served.recorded(1)
        prompt = ByteTokenizer().decode(experience.tokens[: experience.num_prompt].tolist())
        assert prompt.endswith('"arguments": '), "what was forced was not sampled"


async def test_models(tmp_path: Path) -> None:
    async with serving(tmp_path, models=("gpt-x",)) as served:
        client = await served.opened()
        shown = [(model.id, model.owned_by) async for model in client.models.list()]
        assert shown == [("main", "headrace"), ("gpt-x", "headrace")]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=ASK)


@whole_and_streamed
async def test_thoughts_are_left_out_where_thinking_is_disabled_and_recorded_all_the_same(
    tmp_path: Path, stream: bool
) -> None:
    answer = "<think>\nA greeting.\n</think>\n\nHello."
    async with serving(tmp_path, engine(says(answer))) as served:
        told = await ask_messages(served, await served.new_key(), ASK, stream=stream, thinking={"type": "disabled"})
        assert (told.thought, told.said.strip()) == ("", "Hello.")
        (experience,) = await served.recorded(1)
        assert ByteTokenizer().decode(experience.tokens[experience.num_prompt :].tolist()) == answer


async def test_anthropics_client_counts_tokens_and_raises_its_own_errors(tmp_path: Path) -> None:
    import anthropic

    async with serving(tmp_path, models=("m",)) as served:
        key = await served.new_key()
        client = anthropic.AsyncAnthropic(api_key=key, base_url=served.url, max_retries=0)
        counted = await client.messages.count_tokens(model="m", messages=ASK, system="Be brief.")
        prompt = ByteTokenizer().encode_request([{"role": "system", "content": "Be brief."}, *ASK])
        assert counted.input_tokens == len(prompt) and not await served.experiences()
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=5, messages=ASK)
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(model="m", max_tokens=0, messages=ASK)
        assert json.loads(refused.value.response.content)["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="hr-unknown").messages.create(model="m", max_tokens=5, messages=ASK)
        bearer = anthropic.AsyncAnthropic(auth_token=key, base_url=served.url, max_retries=0)
        assert (await bearer.messages.create(model="m", max_tokens=5, messages=ASK)).content
