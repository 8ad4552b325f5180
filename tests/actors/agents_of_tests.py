"""Programs that tests train: functions that know a base URL and a key."""

import asyncio
import contextlib
import inspect
import sys
import threading
from typing import Any

import anthropic
import openai

from tests.actors.rig import until


async def two_turns(task: dict[str, Any], base_url: str, key: str, model: str) -> dict[str, Any]:
    """A chat of two turns; the first is rated on its own."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        messages = list(task["messages"])
        first = await client.chat.completions.create(model=model, messages=messages, temperature=0.0)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "and?"},
        ]
        second = await client.chat.completions.create(model=model, messages=messages)
        turns = [{"id": first.id, "rewards": {"polite": 0.5}}]
        return {"reward": 1.0, "turns": turns, "answer": second.choices[0].message.content}


def blocking(base_url: str, key: str) -> float:
    """A program that knows nothing of asyncio."""
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    client.responses.create(model="m", input="Hi")
    return 0.25


async def at_once(base_url: str, key: str) -> None:
    """Three requests of one conversation together, and a sub-agent."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        ask = client.chat.completions.create
        await asyncio.gather(*(ask(model="m", messages=[{"role": "user", "content": "Hi"}]) for _ in range(3)))
        await ask(model="m", messages=[{"role": "user", "content": "You are another agent"}])


async def two_after_much(base_url: str, key: str) -> None:
    """Two requests together that go on from one long conversation, whose answer they spell otherwise."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        asked: list[Any] = [{"role": "user", "content": "x" * 20_000}]
        first = await client.chat.completions.create(model="m", messages=asked)
        asked += [{"role": "assistant", "content": f"{first.choices[0].message.content} "}, *asked[:1]]
        await asyncio.gather(*(client.chat.completions.create(model="m", messages=asked) for _ in range(2)))


async def drops_its_tools(base_url: str, key: str) -> None:
    """Two turns, the second without the tools of the first."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        asked: list[Any] = [{"role": "user", "content": "Hi"}]
        tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
        first = await client.chat.completions.create(model="m", messages=asked, tools=tools)
        asked += [{"role": "assistant", "content": first.choices[0].message.content}, *asked]
        await client.chat.completions.create(model="m", messages=asked)


async def messages(base_url: str, key: str) -> float:
    """Anthropic's client, streaming."""
    asked: Any = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    url = base_url.removesuffix("/v1")
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=60.0) as client,
        client.messages.stream(**asked) as stream,
    ):
        return float((await stream.get_final_message()).usage.output_tokens)


async def raises(base_url: str, key: str) -> None:
    """Asks once and breaks."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    raise LookupError("the agent broke")


async def exits() -> None:
    """Would end the explorer."""
    sys.exit(3)


async def cancels_itself() -> None:
    """Cancels itself, like a framework with mixed-up scopes."""
    raise asyncio.CancelledError


CUT_OFF: list[str] = []


async def notes_its_thread(base_url: str, key: str) -> None:
    """Asks once, then waits until it is cancelled; in which thread that was."""
    await messages(base_url, key)
    try:
        CUT_OFF.append("")
        await asyncio.sleep(3600)
    finally:
        CUT_OFF[-1] = threading.current_thread().name


async def asks_nothing() -> float:
    """Ends at once."""
    return 1.0


async def not_a_number(base_url: str, key: str) -> float:
    """A reward that is none."""
    await two_turns({"messages": [{"role": "user", "content": "Hi"}]}, base_url, key, "m")
    return float("nan")


async def never_ends(base_url: str, key: str) -> None:
    """Talks until its context is full."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        conversation: list[Any] = [{"role": "user", "content": "x" * 200}]
        while True:
            answer = await client.chat.completions.create(model="m", messages=conversation)
            conversation += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "x" * 200},
            ]


LEFT: list[tuple[str, str]] = []


async def keeps_its_key(base_url: str, key: str) -> None:
    """Remembers how it got in."""
    LEFT.append((base_url, key))
    await messages(base_url, key)


async def goes_away(base_url: str, key: str) -> float:
    """Leaves in the middle of a stream, and asks again."""
    await leaves_in_mid_stream(base_url, key)
    await messages(base_url, key)
    return 1.0


OPEN: list[Any] = []


def ends_in_mid_stream(base_url: str, key: str) -> float:
    """Asks once, and ends while another request is answered."""
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    client.responses.create(model="m", input="Hi")
    OPEN.append(client.responses.create(model="m", input="You are another agent", stream=True))
    return 1.0


async def floods(base_url: str, key: str) -> float:
    """More requests at once than one episode may make; how many were refused."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:

        async def ask(number: int) -> int:
            try:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}"}])
            except openai.RateLimitError:
                return 1
            return 0

        return float(sum(await asyncio.gather(*(ask(number) for number in range(40)))))


async def invents_a_key(base_url: str) -> None:
    """Asks with a key that nobody has."""
    await messages(base_url, "hr-" + "x" * 32)


async def asks_too_often(base_url: str, key: str) -> None:
    """More requests than an episode may make, one after the other."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        for number in range(40):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{number}"}])


async def leaves_in_mid_stream(base_url: str, key: str) -> None:
    """Reads one event, and is gone."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        stream = await client.chat.completions.create(**asked, stream=True)
        async for _ in stream:
            break
        await stream.close()


async def sends_no_json(base_url: str, key: str) -> None:
    """A body that is none, and one that is too deep."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        for body in (b"{", b"[" * 100_000):
            with contextlib.suppress(openai.BadRequestError):
                await client.post("/chat/completions", cast_to=object, content=body)


STOLEN: list[str] = []


async def steals_a_key(base_url: str) -> None:
    """Asks with the key of the other episode that runs, and never with its own."""
    await until(lambda: bool(STOLEN))
    async with openai.AsyncOpenAI(base_url=base_url, api_key=STOLEN[0], max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "of another"}])


async def good_or_bad(task: dict[str, Any], base_url: str, key: str, model: str) -> Any:
    """Plays two turns, or does what the task names."""
    named = task["meta"].get("bad")
    if named is None:
        STOLEN.append(key)
        try:
            found = await two_turns(task, base_url, key, model)
            await until(lambda: not BAD_RUNNING)  # so that both were there at once
            return found
        finally:
            STOLEN.remove(key)
    given = {"task": task, "base_url": base_url, "key": key, "model": model}
    function = globals()[named]
    BAD_RUNNING.append(named)
    try:
        return await function(**{name: given[name] for name in inspect.signature(function).parameters})
    finally:
        BAD_RUNNING.remove(named)


BAD_RUNNING: list[str] = []
