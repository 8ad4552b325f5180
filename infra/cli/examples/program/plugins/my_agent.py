"""An agent that knows a base URL and a key. Its reward: the share of digits in the policy's answer."""

from openai import AsyncOpenAI


async def run(task, base_url, key, model):
    agent = AsyncOpenAI(base_url=base_url, api_key=key)
    answer = await agent.chat.completions.create(model=model, messages=task["messages"])
    text = answer.choices[0].message.content or ""
    return {"reward": sum(character.isdigit() for character in text) / max(1, len(text))}
