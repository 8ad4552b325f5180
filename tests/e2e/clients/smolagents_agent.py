"""smolagents: an agent that calls tools until one of them is the final answer, three steps at most."""

import json
import os
import sys

from smolagents import LogLevel, OpenAIServerModel, Tool, ToolCallingAgent

task = json.loads(sys.stdin.read())
calls: list[int] = []


class Look(Tool):
    """A tool as smolagents has them."""

    name = "look"
    description = "Read a row."
    inputs = {"row": {"type": "integer", "description": "its number"}}
    output_type = "string"

    def forward(self, row: int) -> str:
        calls.append(row)
        return f"row {row}"


model = OpenAIServerModel(
    os.environ["HEADRACE_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[Look()], model=model, max_steps=3, verbosity_level=LogLevel.OFF)
said = str(agent.run(task["messages"][0]["content"]))
asked = sum(1 for step in agent.memory.steps if getattr(step, "model_output_message", None) is not None)
reward = sum(calls) / 10 + len(said) / 1000
print(json.dumps({"reward": reward, "answer": json.dumps({"calls": calls, "said": said, "asked": asked})}))
