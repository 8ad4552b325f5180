"""What people build agents with, unmodified: an agent framework, and the client's typed tools."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai import OpenAI

from actors.engines.scripted import ScriptedEngine
from tests.actors.gateway.gateway_rig import VOCABULARY, RunningGateway, engine, says, serving

ASK: list[Any] = [{"role": "user", "content": "How warm is it in Zürich?"}]


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def call_begins() -> str:
    """What every call begins with."""
    return call("").partition('""')[0] + '"'


async def client_of(served: RunningGateway) -> OpenAI:
    key = await served.new_key()
    return OpenAI(api_key=key, base_url=f"{served.url}/v1", max_retries=0)


def test_a_typed_tool_of_the_client_is_parsed_into_its_class(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, engine(says(call("Weather", city="Zürich", degrees=21)))) as served:
            client = await client_of(served)
            tool = openai.pydantic_function_tool(Weather)
            answer = await asyncio.to_thread(
                lambda: client.chat.completions.parse(model="m", messages=ASK, tools=[tool])
            )
            (called,) = answer.choices[0].message.tool_calls or []
            assert called.function.parsed_arguments == Weather(city="Zürich", degrees=21)
            (experience,) = await served.recorded(1)
            assert experience.spans[0].ratio, "a tool the model chose to call was drawn by the policy alone"

    asyncio.run(check())


@pytest.mark.slow  # the framework takes seconds to import
def test_an_agent_of_smolagents_asks_calls_its_tool_and_answers(tmp_path: Path) -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def degrees(city: str) -> int:
        """How warm it is.

        Args:
            city: Where.
        """
        return {"Zürich": 21}[city]

    async def check() -> None:
        # The framework asks with tool_choice "required", so the gateway writes the beginning of each call.
        calls = call("degrees", city="Zürich"), call("final_answer", answer="21 degrees")
        script = says(*(text.removeprefix(call_begins()) for text in calls))
        made = ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=32_768, script=script)
        async with serving(tmp_path, made) as served:
            key = await served.new_key()
            model = OpenAIModel(model_id="m", api_base=f"{served.url}/v1", api_key=key)
            agent = ToolCallingAgent(tools=[degrees], model=model, verbosity_level=0)
            answer = await asyncio.to_thread(agent.run, "How warm is it in Zürich?")
            assert answer == "21 degrees"
            first, second = await served.recorded(2)
            assert "How warm is it" in first.messages[-2].content
            assert "21" in second.messages[-2].content, "what the tool said came back"
            assert served.count("refused") == 0

    asyncio.run(check())
