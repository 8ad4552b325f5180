"""Whatever is sent: the status and error object an OpenAI client expects, a counter, and nothing else disturbed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.gateway.answering.requests import read_chat, read_text
from actors.gateway.answering.text import Detokenizer, StopStrings
from actors.gateway.config import GatewayConfig, GatewayLimits
from actors.gateway.errors import ApiError
from infra.settings.config import decode
from schemas.errors import ConfigError
from tests.actors.gateway.gateway_rig import ByteTokenizer, RunningGateway, engine, says, serving
from tests.actors.rig import until

MESSAGES = [{"role": "user", "content": "Hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **more}


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": MESSAGES}, "model"),
    ({"model": "m"}, "messages"),
    ({"model": "m", "messages": []}, "messages"),
    ({"model": "m", "messages": [{"role": "user"}]}, "messages[0].content"),
    ({"model": "m", "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"model": "m", "messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].image_url.url"),
    ({"model": "m", "messages": MESSAGES * 2000}, "messages"),
    (chat(temperature=3), "temperature"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(n=0), "n"),
    (chat(n=99), "n"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(stop=["x"] * 99), "stop"),
    (chat(stop=""), "stop"),
    (chat(frequency_penalty=3.0), "frequency_penalty"),
    (chat(logit_bias={"a": 5}), "logit_bias"),
    (chat(modalities=["text", "audio"]), "audio"),
    (chat(audio={"voice": "x"}), "audio"),
    (chat(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]), "messages[0].content[0]"),
    (chat(response_format={"type": "grammar"}), "response_format.type"),
]
TOOL = {"type": "function", "function": {"name": "f"}}
# What is ignored, or served, and refused where the gateway is strict.
UNSERVED: list[tuple[dict[str, Any], str]] = [
    (chat(max_tokens=10**9), "max_tokens"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(tools=[TOOL], tool_choice={"type": "allowed_tools"}), "tool_choice"),
    (chat(tools=[TOOL, {"type": "custom"}]), "tools.custom"),
    (chat(tools=[TOOL], response_format={"type": "json_object"}), "response_format"),
    (chat(stop=["."], response_format={"type": "json_object"}), "stop"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(colour="red"), "colour"),
    (chat(prediction={"type": "content", "content": "x"}), "prediction"),
    (chat(chat_template="x"), "chat_template"),
    (chat(guided_json={}), "guided_json"),
]
SHAPED = {
    "frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.2, "top_k": 5, "min_p": 0.1, "logit_bias": {"9": 3},
}  # fmt: skip


@pytest.mark.parametrize(("body", "name"), UNSERVED, ids=[name for _, name in UNSERVED])
def test_a_field_that_cannot_be_served_is_ignored_and_named_and_refused_by_strict_gateways(
    body: dict[str, Any], name: str
) -> None:
    assert read_chat(json.dumps(body).encode(), GatewayLimits()).ignored == (name,)
    with pytest.raises(ApiError) as caught:
        read_chat(json.dumps(body).encode(), GatewayLimits(), strict=True)
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("name", SHAPED)
def test_a_field_that_changes_the_distribution_is_served_and_refused_by_strict_gateways(name: str) -> None:
    body = json.dumps(chat(**{name: SHAPED[name]})).encode()
    assert read_chat(body, GatewayLimits()).untrained == "shaping"
    with pytest.raises(ApiError) as caught:
        read_chat(body, GatewayLimits(), strict=True)
    assert caught.value.param == name


def test_strict_gateways_name_the_place_of_an_unknown_field_and_take_those_that_change_nothing() -> None:
    inert = chat(metadata={"a": "b"}, service_tier="auto", tools=[TOOL | {"strict": True}])
    assert read_chat(json.dumps(inert).encode(), GatewayLimits(), strict=True).ignored == ()
    with pytest.raises(ApiError) as caught:
        read_chat(json.dumps(chat(messages=[{**MESSAGES[0], "mood": "x"}])).encode(), GatewayLimits(), strict=True)
    assert caught.value.param == "messages[0].mood"


@pytest.mark.parametrize(("body", "param"), BAD)
def test_a_bad_request_is_a_400_that_names_the_field(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(json.dumps(body).encode(), GatewayLimits())
    error = json.loads(caught.value.body())["error"]
    assert (caught.value.status, error["param"], error["type"]) == (400, param, "invalid_request_error")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["model", "messages", "role", "content", "tools", "stop", "n", "function", "prompt", "name"]),
        inner, max_size=6,
    ),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_a_request_or_a_400(body: bytes) -> None:
    for read in (read_chat, read_text):
        try:
            read(body, GatewayLimits())
        except ApiError as error:
            assert error.status == 400


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


def test_bytes_that_are_no_character_do_not_hold_the_stream_for_ever() -> None:
    detokenizer = Detokenizer(ByteTokenizer().decode)
    told = "".join(detokenizer.add([0x80]) for _ in range(100))
    assert len(told) > 50


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
            assert (await http.get("/healthz")).json() == {"status": "ok", "version": 0, "channel": "stable"}
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"model"')
        assert b"408" in await reader.readline(), "a slow client is not waited for"
        writer.close()
        answer = await served.client(key).chat.completions.create(**chat())
        assert answer.choices[0].message.content == "Hello."
        assert served.count("refused") == 4


async def test_too_much_at_once_is_a_429_and_passes(tmp_path: Path) -> None:
    async with serving(tmp_path, engine(says("slow"), token_s=0.03), limits=GatewayLimits(concurrency=2)) as served:
        client = await served.opened()
        asked = [client.chat.completions.create(**chat()) for _ in range(6)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, openai.RateLimitError)]
        assert len(refused) == 4 and refused[0].code == "overloaded"
        assert (await client.chat.completions.create(**chat())).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_the_engine_and_what_it_got_is_recorded(
    tmp_path: Path, stream: bool
) -> None:
    sampler = engine(says("x" * 4000), token_s=0.01)
    async with serving(tmp_path, sampler, limits=GatewayLimits(max_tokens=3000)) as served:
        client = await served.opened()
        if stream:
            pieces: Any = await client.chat.completions.create(**chat(stream=True))
            async for piece in pieces:
                if piece.choices[0].delta.content:
                    break
            await pieces.close()
        else:
            call = asyncio.create_task(client.chat.completions.create(**chat()))
            await until(lambda: sampler.num_running == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: sampler.num_running == 0)
        if stream:
            (experience,) = await served.recorded(1)
            assert experience.end == "truncated" and 0 < experience.num_sampled < 3000
        assert served.metrics.counters()["answers{end=broken off}"] == 1


async def test_an_answer_gets_the_room_that_is_left_and_a_context_that_leaves_none_is_refused(tmp_path: Path) -> None:
    limits = GatewayLimits(max_tokens=5000)
    async with serving(tmp_path, engine(lambda prompt: [120] * 5000), limits=limits) as served:
        key = await served.new_key()
        ask = served.client(key).completions.create
        for asked in ({"max_tokens": 5000}, {}):
            answer = await ask(model="m", prompt=[120] * 4090, **asked)  # type: ignore[call-overload]
            assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "length")
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model="m", prompt=[120] * 4096, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("listen", ["8000", "localhost", "h:99999", ":80"])
def test_an_address_that_is_none_is_refused_with_its_path(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen"):
        decode({"listen": listen}, GatewayConfig, "x.toml")
