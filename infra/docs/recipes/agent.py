"""An agent of the OpenAI Agents SDK that answers in two turns: a draft, then the draft checked and rewritten.

    .venv/agents/bin/python infra/docs/recipes/agent.py 9000

A service that gets one task per request, with a base URL, a key and the name of a model.
"""

import sys
from typing import Any

import uvicorn
from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

CHECK = "Check each instruction. Then write the final answer, and nothing else."
HTTP = DefaultAsyncHttpxClient(timeout=None)


async def write(request: Request) -> JSONResponse:
    episode: dict[str, Any] = await request.json()
    client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"], http_client=HTTP, max_retries=0)
    writer = Agent(name="writer", model=OpenAIChatCompletionsModel(episode["model"], client))
    try:
        draft = await Runner.run(writer, episode["task"]["messages"])
        await Runner.run(writer, [*draft.to_input_list(), {"role": "user", "content": CHECK}])
    except (ModelBehaviorError, IndexError):  # the policy answered nothing
        pass
    return JSONResponse(None)  # the stream workers score the last answer


if __name__ == "__main__":
    set_tracing_disabled(True)
    app = Starlette(routes=[Route("/", write, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
