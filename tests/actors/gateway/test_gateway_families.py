"""Tool calls and thoughts of each family in each API, with the clients people have; vLLM reads them, any engine samples."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic

from actors.engines.scripted import ScriptedEngine
from infra.model.model import Tokenizer
from tests.actors.gateway.families import FAMILIES, WEATHER, family_tokenizer
from tests.actors.gateway.gateway_rig import RunningGateway, serving

ASK: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [WEATHER]
FUNCTION = WEATHER["function"]
Told = tuple[str, str, list[tuple[str, Any]]]  # what was thought, what was said, and calls


def samples(tokenizer: Tokenizer, text: str) -> ScriptedEngine:
    """An engine that answers so, control tokens of the text included."""
    tokens = tokenizer.wrapped.backend_tokenizer.encode(text, add_special_tokens=False).ids
    script = [*tokens, tokenizer.eos_ids[0]]
    return ScriptedEngine(num_vocabulary=tokenizer.num_tokens, max_model_len=4096, script=lambda prompt: script)


async def chat(client: openai.AsyncOpenAI, served: RunningGateway, stream: bool) -> Told:
    if not stream:
        answer = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
        message = answer.choices[0].message.model_dump()
        calls = [one["function"] for one in message["tool_calls"] or ()]
        return (
            message.get("reasoning", ""),
            message["content"] or "",
            [(one["name"], json.loads(one["arguments"])) for one in calls],
        )
    thought = said = ""
    found = []
    pieces: Any = await client.chat.completions.create(model="m", messages=ASK, tools=TOOLS, stream=True)
    async for piece in pieces:
        delta = piece.choices[0].delta.model_dump()
        thought, said = thought + (delta.get("reasoning") or ""), said + (delta["content"] or "")
        found += [one["function"] for one in delta["tool_calls"] or ()]
    return thought, said, [(one["name"], json.loads(one["arguments"])) for one in found]


async def responses(client: openai.AsyncOpenAI, served: RunningGateway, stream: bool) -> Told:
    asked: Any = {"model": "m", "input": "Hi", "tools": [{"type": "function", **FUNCTION, "strict": False}]}
    if stream:
        async with client.responses.stream(**asked) as events:
            response: Any = await events.get_final_response()
    else:
        response = await client.responses.create(**asked)
    thought = "".join(one.content[0].text for one in response.output if one.type == "reasoning")
    calls = [one for one in response.output if one.type == "function_call"]
    return thought, response.output_text, [(one.name, json.loads(one.arguments)) for one in calls]


async def messages(client: openai.AsyncOpenAI, served: RunningGateway, stream: bool) -> Told:
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    asked: Any = {"model": "m", "max_tokens": 200, "messages": ASK, "tools": [tool]}
    async with AsyncAnthropic(api_key=client.api_key, base_url=served.url, max_retries=0) as other:
        if stream:
            async with other.messages.stream(**asked) as events:
                message: Any = await events.get_final_message()
        else:
            message = await other.messages.create(**asked)
    return (
        "".join(one.thinking for one in message.content if one.type == "thinking"),
        "".join(one.text for one in message.content if one.type == "text"),
        [(one.name, one.input) for one in message.content if one.type == "tool_use"],
    )


@pytest.mark.parametrize(
    "name", ["qwen 3", *(pytest.param(one, marks=pytest.mark.full) for one in ("llama 3", "magistral", "gemma 4"))]
)
async def test_clients_are_told_thoughts_words_and_calls_apart_in_every_api(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family_tokenizer(tmp_path / "model", family)

    async with serving(tmp_path / "gateway", samples(tokenizer, family.answer), tokenizer=tokenizer) as served:
        client = await served.opened()
        expected = (family.parsed.thought, family.parsed.said, [("weather", {"city": "Bern"})])
        for ask in (chat, responses, messages):
            for stream in (False, True):
                thought, said, calls = await ask(client, served, stream)
                assert (thought, said.strip(), calls) == expected, f"{ask.__name__}, streamed: {stream}"
        sampled = [one.tokens[one.num_prompt :].tolist() for one in await served.recorded(6)]
        assert all(one == sampled[0] and tokenizer.spell(one[:-1]) == family.answer for one in sampled)


async def test_a_call_that_breaks_off_is_told_as_text_and_counted(tmp_path: Path) -> None:
    family = FAMILIES["qwen 3"]
    tokenizer = family_tokenizer(tmp_path / "model", family)

    async with serving(tmp_path / "gateway", samples(tokenizer, family.half), tokenizer=tokenizer) as served:
        key = await served.new_key()
        for stream in (False, True):
            thought, said, calls = await chat(served.client(key), served, stream)
            assert thought == family.parsed.thought and not calls
            assert said.strip() == family.half.partition("</think>")[2].strip()
        assert served.count("calls_unread") == 2
