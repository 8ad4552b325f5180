"""pydantic-ai: an agent with a tool and a typed answer, which is a tool as well: the library has one of the two called."""

import json
import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

task = json.loads(sys.stdin.read())
calls: list[int] = []


class Row(BaseModel):
    """Answer of the agent."""

    row: int


agent = Agent(OpenAIChatModel(os.environ["HEADRACE_MODEL"]), output_type=Row, instructions="Look first.")


@agent.tool_plain
def look(row: int) -> str:
    """Read a row."""
    calls.append(row)
    return f"row {row}"


result = agent.run_sync(task["messages"][0]["content"])
said = result.output.row
asked = result.usage.requests
reward = said + sum(calls) / 10
print(json.dumps({"reward": reward, "answer": json.dumps({"calls": calls, "said": said, "asked": asked})}))
