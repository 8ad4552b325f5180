"""Sessions and bounds of a gateway: which turns go on from which, how much is held, and what is too much at once."""

import asyncio
import json
from array import array
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.gateway.answering.conversation import Prompt
from actors.gateway.answering.sessions import BRANCHED, HeldSession, Sessions, behind_answer, held
from actors.gateway.config import GatewayLimits
from actors.rollout.continuation import SampledTurn
from actors.rollout.parts import TEMPLATE_DIFFERS
from schemas import Experience, Message
from schemas.fields import HISTORY_REWRITTEN
from tests.actors.gateway.gateway_rig import ASK, TOOL, ByteTokenizer, RunningGateway, engine, says, serving
from tests.actors.rig import until


def session(num_tokens: int, content: str = "Hi") -> HeldSession:
    plain = (Message(role="user", content=content), Message(role="assistant", content="y"))
    return held(range(num_tokens), SampledTurn(range(num_tokens - 1), [7], "y", True), plain, 1)


def test_sessions_are_bounded_in_bytes_as_well_as_in_number() -> None:
    sessions = Sessions(limit=1000, max_bytes=1_000_000)
    for index in range(100):
        sessions.keep(f"s{index}", session(20_000, "x" * 100_000))
        assert sessions.held.total_size <= 1_000_000
    assert 0 < len(sessions.held) < 10
    sessions.keep("s99", session(10))
    sessions.held.pop("nobody")
    for index in range(100):
        sessions.held.pop(f"s{index}")
    assert (len(sessions.held), sessions.held.total_size) == (0, 0)
    sessions.keep("too large alone", session(300_000))
    assert (len(sessions.held), sessions.held.total_size) == (0, 0)
    few = Sessions(limit=2, max_bytes=1_000_000)
    for index in range(5):
        few.keep(f"s{index}", session(10))
    assert len(few.held) == 2


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
        assert sessions.prompt("s", Prompt(plain=said, chat=()), rendered, ByteTokenizer()) == expected


def test_a_system_message_for_the_tools_shifts_no_turn() -> None:
    roles: tuple[Any, ...] = ("user", "assistant", "user")
    plain = tuple(Message(role=role, content=role) for role in roles)
    prompt = Prompt(plain=plain, chat=tuple({"role": role, "content": role} for role in ("system", *roles)))
    turn = SampledTurn([1], [*b"y", 256], "y", True, prompt.tools_digest)
    assert behind_answer(prompt, turn, 2, ByteTokenizer()) == [*b"<user>user", 256, *b"<assistant>"]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": ASK, **more}


async def error_of(
    served: RunningGateway, key: str, content: bytes, path: str = "/v1/chat/completions"
) -> tuple[int, Any]:
    async with served.http(key) as http:
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        return answer.status_code, answer.json()["error"]


async def test_http_mistakes_have_error_objects_too_and_disturb_nothing(tmp_path: Path) -> None:
    limits = GatewayLimits(body_bytes=2000, body_s=2.0, prompt_tokens=500)
    async with serving(tmp_path, limits=limits) as served:
        key = await served.new_key()
        assert (await error_of(served, key, b"{not json"))[0] == 400
        assert (await error_of(served, key, b"x" * 3000))[0] == 413
        long = json.dumps(chat(messages=[{"role": "user", "content": "x" * 600}])).encode()
        status, error = await error_of(served, key, long)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert (await error_of(served, key, b"", "/v1/nothing"))[1]["code"] == "unknown_url"
        async with served.http(key) as http:
            assert (await http.get("/v1/chat/completions")).status_code == 405
            while (health := await http.get("/healthz")).status_code != 200:
                await served.keys_read()
            assert health.json() == {"status": "ok", "version": 0, "channel": "stable"}
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"model"')
        assert b"408" in await reader.readline(), "a slow client is not waited for"
        writer.close()
        answer = await served.client(key).chat.completions.create(**chat())
        assert answer.choices[0].message.content == "Hello."
        assert served.count("refused") == 4


@pytest.mark.parametrize(("stream", "more"), [(True, {}), (True, {"stop": ["zzz"]}), (True, {"n": 2}), (False, {})])
async def test_a_client_that_goes_away_frees_the_engine_and_what_it_got_is_recorded_and_charged(
    tmp_path: Path, stream: bool, more: dict[str, Any]
) -> None:
    sampler = engine(says("x" * 4000), token_s=0.01)
    async with serving(tmp_path, sampler, limits=GatewayLimits(max_tokens=3000)) as served:
        client = await served.opened(tpm=50)
        if stream:
            pieces: Any = await client.chat.completions.create(**chat(stream=True, **more))
            told = ""
            async for piece in pieces:
                if len(told := told + (piece.choices[0].delta.content or "")) > 100:
                    break
            await pieces.close()
        else:
            call = asyncio.create_task(client.chat.completions.create(**chat()))
            await until(lambda: sampler.num_running == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: sampler.num_running == 0)
        if stream:
            experience, *_ = await served.recorded(1)
            assert experience.end == "truncated" and 0 < experience.num_sampled < 3000
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(**chat())
        assert served.metrics.counters()["answers{end=broken off}"] == more.get("n", 1)


async def test_an_answer_gets_the_room_that_is_left_and_a_context_that_leaves_none_is_refused(tmp_path: Path) -> None:
    limits = GatewayLimits(max_tokens=5000)
    async with serving(tmp_path, engine(lambda prompt: [120] * 5000), limits=limits) as served:
        ask = (await served.opened()).chat.completions.create
        around = len(ByteTokenizer().encode_request([{"role": "user", "content": ""}]))
        almost, full = ([{"role": "user", "content": "x" * (size - around)}] for size in (4090, 4096))
        for asked in ({"max_tokens": 5000}, {}):
            answer = await ask(**chat(messages=almost, **asked))
            assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "length")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(**chat(messages=full, max_tokens=1))
        assert caught.value.code == "context_length_exceeded"


SESSION = {"x-session-id": "s"}
Conversation = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answers(prompt: tuple[int, ...]) -> list[int]:
    """Says what it was asked last, so that no two answers are the same."""
    text = bytes(token for token in prompt if token < 256).decode()
    return [*f"to {text.rpartition('<user>')[2].partition('<')[0]}".encode(), 256]


async def asked(client: openai.AsyncOpenAI, said: Conversation, **headers: str) -> Conversation:
    """The conversation with its answer."""
    made = await client.chat.completions.create(model="m", messages=said, extra_headers=SESSION | headers)  # type: ignore[arg-type]
    return [*said, {"role": "assistant", "content": made.choices[0].message.content}]


def found(turns: list[Experience]) -> list[tuple[int, str]]:
    return [(one.carried, one.part_reason) for one in turns]


async def test_parallel_calls_go_on_from_the_same_turn_and_are_gone_on_from_each(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers, token_s=0.002)) as served:
        client = await served.opened()
        first = await asked(client, [user("q")])
        left, right = await asyncio.gather(asked(client, [*first, user("l")]), asked(client, [*first, user("r")]))
        for one in (left, right):
            await asked(client, [*one, user("more")])
        turns = await served.recorded(5)
        assert found(turns) == [(0, ""), (1, ""), (1, ""), (2, ""), (2, "")]
        ends = {bytes(one.tokens[one.tokens < 256].tolist()).decode() for one in turns[3:]}
        assert len(ends) == 2 and all(text.startswith("<user>q<assistant>to q<user>") for text in ends)


async def test_what_does_not_go_on_says_why(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers)) as served:
        client = await served.opened()
        system = {"role": "system", "content": "A."}
        one = await asked(client, [system, user("a0")])
        two = await asked(client, [*one, user("a1")])
        await asked(client, [*one, user("instead of a1")])
        await asked(client, [*two, user("a2")])
        await asked(client, [system, user("what was said before: a0, a1, a2")])
        turns = await served.recorded(5)
        assert found(turns) == [(0, ""), (1, ""), (0, BRANCHED), (2, ""), (0, HISTORY_REWRITTEN)]


async def test_the_model_reads_the_tools_of_a_turn_s_own_request(tmp_path: Path) -> None:
    tools, others = ([{"type": "function", "function": {**TOOL, "name": name}}] for name in ("weather", "clock"))
    async with serving(tmp_path, engine(answers)) as served:
        client = (await served.opened()).with_options(default_headers=SESSION)
        said: list[Any] = [user("q")]
        asks: list[Any] = [{"tools": tools}] * 2 + [{"tools": tools, "tool_choice": "none"}]
        asks += [{"tools": others}, {}, {"tools": others, "tool_choice": "none"}]
        for more in asks:
            made = await client.chat.completions.create(model="m", messages=said, **more)
            said += [{"role": "assistant", "content": made.choices[0].message.content}, user("and?")]
        turns = await served.recorded(6)
        prompts = [ByteTokenizer().decode(turn.tokens.tolist()) for turn in turns]
        assert [("weather" in text, "clock" in text) for text in prompts] == [
            (True, False), (True, False), (True, False), (False, True), (False, False), (False, False)
        ]  # fmt: skip
        assert found(turns) == [(0, ""), (1, ""), (2, ""), (0, TEMPLATE_DIFFERS), (0, TEMPLATE_DIFFERS), (1, "")]


async def test_a_client_ends_its_session_by_a_header_that_any_client_can_send(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(answers)) as served:
        client = await served.opened()
        said = await asked(client, [user("a")])
        said = await asked(client, [*said, user("b")], **{"x-session-end": "false"})
        await asked(client, [*said, user("c")], **{"x-session-end": "true"})
        await client.chat.completions.create(
            model="m",
            messages=[user("alone")],
            extra_headers={"x-session-end": "true"},  # type: ignore[list-item]
        )
        with pytest.raises(openai.BadRequestError, match="x-session-end: got 'maybe', expected"):
            await asked(client, [user("a")], **{"x-session-end": "maybe"})
        assert [one.ends_session for one in await served.recorded(4)] == [False, False, True, False]
