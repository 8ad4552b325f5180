"""Anthropic's SDK: two turns of Messages, the first with a tool that must be called, the second streamed."""

import json
import os
import sys

from anthropic import Anthropic

task = json.loads(sys.stdin.read())
client, model = Anthropic(), os.environ["HEADRACE_MODEL"]
schema = {
    "type": "object",
    "properties": {"row": {"type": "integer"}},
    "required": ["row"],
    "additionalProperties": False,
}
tools = [{"name": "look", "description": "Read a row.", "input_schema": schema}]
asked = {"model": model, "max_tokens": 100, "system": "Look first.", "tools": tools}
messages = task["messages"]
first = client.messages.create(**asked, messages=messages, tool_choice={"type": "any"})
(call,) = [block for block in first.content if block.type == "tool_use"]
row = call.input["row"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": f"row {row}"}
messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
with client.messages.stream(**asked, messages=messages) as stream:
    last = stream.get_final_message()
said = "".join(block.text for block in last.content if block.type == "text")
print(json.dumps({"reward": row + len(said) / 1000, "answer": json.dumps({"calls": [row], "said": said, "asked": 2})}))
