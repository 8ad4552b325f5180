"""Calls that clients make with their defaults, against any server: `python calls.py URL KEY` says which of them fail.

Run with the Python of the project for its clients, and with that of `.venv/agents` for the frameworks. `record.py` keeps the
requests that they send.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

ASK: Any = [{"role": "user", "content": "How warm is it in Bern?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}
Call = Callable[[str, str], Any]


def openai_chat(url: str, key: str) -> None:
    """The SDK of OpenAI: Chat Completions, whole and streamed, with tools and with a format."""
    import openai

    ask = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0).chat.completions.create
    ask(model="m", messages=ASK)
    list(ask(model="m", messages=ASK, stream=True, stream_options={"include_usage": True}))
    ask(model="m", messages=ASK, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    ask(model="m", messages=ASK, response_format=form, max_tokens=20)
    more: Any = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"50": 1}, "user": "ann"}
    more |= {"metadata": {"a": "b"}, "reasoning_effort": "low", "service_tier": "auto", "modalities": ["text"]}
    ask(model="m", messages=ASK, prediction={"type": "content", "content": "x"}, verbosity="low", seed=1, n=2, **more)


def openai_responses(url: str, key: str) -> None:
    """The SDK of OpenAI: Responses."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tool: Any = {"type": "function", **FUNCTION}
    first = client.responses.create(model="m", input="Hi", reasoning={"effort": "low"}, truncation="auto")
    client.responses.create(
        model="m", input="And?", previous_response_id=first.id, tools=[tool, {"type": "web_search"}]
    )
    list(client.responses.create(model="m", input=ASK, stream=True, include=["reasoning.encrypted_content"]))


def anthropic_messages(url: str, key: str) -> None:
    """The SDK of Anthropic."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    ask: Any = client.messages.create
    ask(model="m", max_tokens=4096, messages=ASK)
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
    search = {"type": "web_search_20250305", "name": "web_search"}
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(
        model="m", max_tokens=64_000, system=cached, messages=ASK, tools=[tool, search], extra_body={"top_k": 40},
        thinking={"type": "enabled", "budget_tokens": 1024}, service_tier="auto", metadata={"user_id": "ann"},
    ) as stream:  # type: ignore[call-overload]  # fmt: skip
        stream.get_final_message()
    client.messages.count_tokens(model="m", messages=ASK)


def langchain(url: str, key: str) -> None:
    """LangChain's ChatOpenAI."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, max_retries=0)
    model.invoke("Hi")
    list(model.stream("Hi"))
    model.bind_tools([TOOL]).invoke("Hi")


def openai_agents(url: str, key: str) -> None:
    """OpenAI's Agents SDK, over Responses and over Chat Completions."""
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """Tell the weather."""
        return city

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        agent = agents.Agent(name="a", instructions="Be brief.", model=kind("m", client), tools=[weather])
        asyncio.run(agents.Runner.run(agent, "Hi", max_turns=2))


def pydantic_ai(url: str, key: str) -> None:
    """Pydantic AI over OpenAI's and Anthropic's APIs."""
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    models: list[Any] = [
        OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)),
        AnthropicModel("m", provider=AnthropicProvider(base_url=url, api_key=key)),
    ]
    for model in models:
        agent = Agent(model, system_prompt="Be brief.", retries=0)
        agent.tool_plain(lambda city: city, name="weather")
        asyncio.run(agent.run("Hi"))


def smolagents(url: str, key: str) -> None:
    """The model class of smolagents."""
    from smolagents import OpenAIModel

    model = OpenAIModel(model_id="m", api_base=f"{url}/v1", api_key=key)
    model.generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], stop_sequences=["Observation:"])


CALLS: dict[str, Call] = {
    call.__name__: call
    for call in (openai_chat, openai_responses, anthropic_messages, langchain, openai_agents, pydantic_ai, smolagents)
}


def main(url: str, key: str, *names: str) -> int:
    """Make the calls of all clients that are installed; print what became of each."""
    failed = {}
    for name in names or CALLS:
        try:
            CALLS[name](url, key)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
