"""The OpenAI Agents SDK: an agent whose tool must be called first."""

import json
import os
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled

task = json.loads(sys.stdin.read())
set_tracing_disabled(True)
set_default_openai_api("chat_completions")  # by Responses it takes no answer that was cut off
calls: list[int] = []


@function_tool
def look(row: int) -> str:
    """Read a row."""
    calls.append(row)
    return f"row {row}"


agent = Agent(
    name="reader",
    instructions="Look first.",
    tools=[look],
    model=os.environ["HEADRACE_MODEL"],
    model_settings=ModelSettings(tool_choice="look"),
)
result = Runner.run_sync(agent, task["messages"])
said = result.final_output
asked = len(result.raw_responses)
print(
    json.dumps(
        {"reward": calls[0] + len(said) / 1000, "answer": json.dumps({"calls": calls, "said": said, "asked": asked})}
    )
)
