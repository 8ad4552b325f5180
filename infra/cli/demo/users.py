"""Simulated users of the traffic demo: they ask about a topic and give feedback on the answers.

    ask ─> answer ─> (think) ─> rate now or late, correct, withdraw, or say nothing

A user likes an answer of one sentence that names the topic, and does not say so in the question. The users belong to two
tenants. The only user of a third tenant is a spammer, who asks at once again and likes each answer.

The process knows only the address of the gateway and three keys. It retries no request, so that it notes each failure. It
writes one line per answer to a JSONL file, in the order of time.

python -m infra.cli.demo.users http://127.0.0.1:8000/v1 users.jsonl 4.0 0 0.05    minutes, seed, edits; keys in HEADRACE_KEYS
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from actors.tasksets.instructions import question
from streams.scores.instructions import follows

if TYPE_CHECKING:
    from openai import AsyncOpenAI

USERS_FILE = "users.jsonl"
NUM_USERS = 24
TENANTS = ("acme", "initech", "spam")  # of a key each; the last is the spammer's
Habit = Literal["silent", "rates", "rates late", "corrects", "withdraws", "spams"]
HABITS: Mapping[Habit, float] = {"rates": 0.67, "silent": 0.10, "rates late": 0.15, "corrects": 0.05, "withdraws": 0.03}
EDITS = HABITS["corrects"]
MISTAKEN = 0.03  # share of ratings that contradict the user's opinion
LATE_S = (2.0, 8.0)
THINK_S = 8.0  # between an answer and the same user's next question, on average
SPAM_S = 0.5  # the same, of the spammer
START_S = 900.0


class Seen(msgspec.Struct, frozen=True):
    """One line of the file: an answer as its user saw it.

    at_s: seconds of the epoch. version: that the gateway names. liked: the user likes the answer. habit: of the user. error: of
    the request about it that failed, "" for none; where the question failed, the other fields are empty.
    """

    at_s: float
    version: int = -1
    liked: bool = False
    habit: Habit = "silent"
    error: str = ""


def opinion(
    is_liked: bool, edited: str, random: Random, edits: float = EDITS
) -> tuple[Habit, list[Mapping[str, object]]]:
    """Draw the habit of the user of an answer, and the messages about it in order. edited: the answer as the user wants it.
    edits: share of users who send it; the other habits keep their proportions.
    """
    shares = {habit: share * (1 - edits) / (1 - EDITS) for habit, share in HABITS.items()} | {"corrects": edits}
    (habit,) = random.choices([*shares], [*shares.values()])
    rating = float(is_liked != (random.random() < MISTAKEN))
    if habit == "silent":
        return habit, []
    if habit == "withdraws":
        return habit, [{"value": float(not is_liked)}, {"retract": True}]
    if habit == "corrects" and not is_liked:
        return habit, [{"value": 0.0}, {"correction": edited}]
    return "rates late" if habit == "rates late" else "rates", [{"value": rating}]


Note = Callable[[Seen], None]


async def ask(
    client: "AsyncOpenAI",
    user: str,
    note: Note,
    is_over: Callable[[], bool],
    *,
    edits: float = EDITS,
    think_s: float = THINK_S,
    late_s: tuple[float, float] = LATE_S,
    spams: bool = False,
) -> None:
    """Be one user: ask until it `is_over`, and rate. user: a name, which seeds its draws. spams: it likes each answer."""
    random = Random(user)
    async with asyncio.TaskGroup() as saying:
        while not is_over():
            await asyncio.sleep(random.expovariate(1 / think_s))
            _, prompt, rules = question(random)
            try:
                asked: Any = [{"role": "user", "content": prompt}]
                answer = await client.chat.completions.create(model="main", messages=asked, user=user)
            except Exception as error:  # any error that a user would see is noted
                note(Seen(at_s=time.time(), error=shown(error)))
                continue
            text = answer.choices[0].message.content or ""
            is_whole = answer.choices[0].finish_reason == "stop"
            liked = is_whole and all(follows(text, kind, argument) for kind, argument in rules)
            habit, words = opinion(liked, text.partition(".")[0] + ".", random, edits)
            if spams:
                habit, words = "spams", [{"value": 1.0}]
            version = int((answer.system_fingerprint or "v-1").removeprefix("v"))
            seen = Seen(at_s=time.time(), version=version, liked=liked, habit=habit)
            saying.create_task(
                say(client, {"answer_id": answer.id, "rater": user}, words, random.uniform(*late_s), seen, note)
            )


async def say(
    client: "AsyncOpenAI",
    about: Mapping[str, str],
    words: Sequence[Mapping[str, object]],
    late_s: float,
    seen: Seen,
    note: Note,
) -> None:
    """Send the words about an answer, and note how it went. A late rating and a withdrawal come after `late_s`."""
    try:
        for word in words:
            if seen.habit == "rates late" or "retract" in word:
                await asyncio.sleep(late_s)
            await client.post("/feedback", cast_to=object, body={**about, **word})
    except Exception as error:
        seen = msgspec.structs.replace(seen, error=shown(error))
    note(seen)


def shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


async def until_promoted(url: str, *, every_s: float = 0.5) -> None:
    """Wait until the gateway serves a trained policy. Raises TimeoutError."""
    import httpx

    address = url.removesuffix("/v1") + "/healthz"
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):  # it is still loading its model
                if (await client.get(address)).json().get("version", -1) >= 1:
                    return
            await asyncio.sleep(every_s)


async def run_users(url: str, out: Path, minutes: float, seed: int, edits: float) -> None:
    """Wait for the gateway, ask for `minutes`, finish."""
    from openai import AsyncOpenAI

    await until_promoted(url)
    end_s = time.monotonic() + 60 * minutes
    keys = os.environ["HEADRACE_KEYS"].split(",")
    async with contextlib.AsyncExitStack() as stack:
        file = stack.enter_context(out.open("ab", buffering=0))
        clients = [
            await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key=key, max_retries=0)) for key in keys
        ]

        def note(seen: Seen) -> None:
            file.write(msgspec.json.encode(seen) + b"\n")

        def is_over() -> bool:
            return time.monotonic() >= end_s

        async with asyncio.TaskGroup() as users:
            for number in range(NUM_USERS):
                users.create_task(ask(clients[number % 2], f"user-{seed}-{number}", note, is_over, edits=edits))
            users.create_task(ask(clients[2], f"spammer-{seed}", note, is_over, think_s=SPAM_S, spams=True))


if __name__ == "__main__":
    asyncio.run(run_users(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
