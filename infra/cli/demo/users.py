"""Simulated users of the traffic demo: they ask sums over HTTP and say what they think of the answers.

    ask ─> answer ─> (think) ─> rate now or late, correct, withdraw, or say nothing

A process that knows only the address of the gateway and a key. No request is tried again, so that each failure is counted.
It writes one line per answer to a JSONL file, in the order of time.

python -m infra.cli.demo.users --url http://127.0.0.1:8000/v1 --out users.jsonl --minutes 4     (the key in HEADRACE_KEY)
"""

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import IO, TYPE_CHECKING, Literal

import msgspec

from actors.tasksets.arithmetic import Pair, split_pairs

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Habit = Literal["silent", "rates", "rates late", "corrects", "withdraws"]
# How users behave, in shares of all answers: what is left of 1 is rated at once.
HABITS: tuple[tuple[Habit, float], ...] = (
    ("silent", 0.10), ("rates late", 0.15), ("corrects", 0.05), ("withdraws", 0.03),
)  # fmt: skip
MISTAKEN = 0.03  # share of ratings that say the opposite of what is true
LATE_S = (2.0, 8.0)
THINK_S = 0.5  # between an answer and the same user's next question, on average
START_S = 900.0


class Opinion(msgspec.Struct, frozen=True):
    """What a user will say about one answer.

    habit: the kind of user. delay_s: before the first word. value: of the rating, None for none. correction: the answer
    as it should have been. withdrawn: the user withdraws the rating later.

    Example: Opinion(habit="corrects", delay_s=0.1, value=0.0, correction="280")
    """

    habit: Habit
    delay_s: float = 0.0
    value: float | None = None
    correction: str | None = None
    withdrawn: bool = False


class Seen(msgspec.Struct, frozen=True):
    """One line of the file: an answer as its user saw it.

    at_s: seconds of the epoch. version: that the gateway names. right: the answer is. habit: of the user. failed:
    number of requests about it that failed, the question included; then the other fields may be empty. error: of the
    last one that failed.

    Example: Seen(at_s=1763715600.0, version=12, right=True, habit="rates")
    """

    at_s: float
    version: int = -1
    right: bool = False
    habit: Habit = "silent"
    failed: int = 0
    error: str = ""


def right_answer(pair: Pair) -> str:
    """The sum as the task wants it written: three digits, backwards.

    >>> right_answer((37, 45))
    '280'
    """
    return f"{sum(pair):03d}"[::-1]


def opinion(text: str, pair: Pair, random: Random, late_s: tuple[float, float] = LATE_S) -> Opinion:
    """Draw what one user will say about an answer."""
    expected = right_answer(pair)
    truth = text == expected
    thumb = truth if random.random() >= MISTAKEN else not truth
    habit: Habit = "rates"
    draw = random.random()
    for name, share in HABITS:
        if draw < share:
            habit = name
            break
        draw -= share
    if habit == "silent":
        return Opinion(habit=habit)
    if habit == "corrects" and not truth:
        return Opinion(habit=habit, value=0.0, correction=expected)
    if habit == "withdraws":
        return Opinion(habit=habit, value=float(not truth), withdrawn=True)
    late = habit == "rates late"
    return Opinion(
        habit="rates late" if late else "rates", delay_s=random.uniform(*late_s) if late else 0.0, value=float(thumb)
    )


class Crowd:
    """Users at one gateway. questions: to be drawn from. out: file of the answers."""

    def __init__(
        self,
        client: "AsyncOpenAI",
        questions: Sequence[Pair],
        out: IO[bytes],
        seed: int,
        *,
        think_s: float = THINK_S,
        late_s: tuple[float, float] = LATE_S,
    ) -> None:
        self._client = client
        self._questions = questions
        self._out = out
        self._seed = seed
        self._think_s = think_s
        self._late_s = late_s
        self._left = False
        self.counts: Counter[str] = Counter()

    def leave(self) -> None:
        """Let no user ask again."""
        self._left = True

    async def run(self, num_users: int, until_s: float) -> None:
        """Ask until `until_s` of the monotonic clock, then wait until every user has said what they wanted to say."""
        async with asyncio.TaskGroup() as users:
            for number in range(num_users):
                users.create_task(self._user(Random(f"{self._seed}/{number}"), number, until_s, users))

    async def _user(self, random: Random, number: int, until_s: float, background: asyncio.TaskGroup) -> None:
        while not self._left and time.monotonic() < until_s:
            await asyncio.sleep(random.expovariate(1 / self._think_s))
            pair = random.choice(self._questions)
            try:
                answer = await self._client.chat.completions.create(
                    model="main",
                    messages=[{"role": "user", "content": f"{pair[0]:02d}+{pair[1]:02d}="}],
                    user=f"user-{number}",
                )
            except Exception as error:  # whatever a user would see is noted
                self._note(Seen(at_s=time.time(), failed=1, error=f"{type(error).__name__}: {error}"[:300]))
                continue
            text = answer.choices[0].message.content or ""
            opinion_given = opinion(text, pair, random, self._late_s)
            seen = Seen(
                at_s=time.time(),
                version=int((answer.system_fingerprint or "v-1").removeprefix("v")),
                right=text == right_answer(pair),
                habit=opinion_given.habit,
            )
            background.create_task(self._send_feedback(answer.id, opinion_given, seen, f"user-{number}"))

    async def _send_feedback(self, answer: str, opinion_given: Opinion, seen: Seen, rater: str) -> None:
        failed, error = 0, ""
        try:
            await asyncio.sleep(opinion_given.delay_s)
            if opinion_given.value is not None:
                await self._feedback(answer, rater, value=opinion_given.value)
            if opinion_given.correction is not None:
                await self._feedback(answer, rater, correction=opinion_given.correction)
            if opinion_given.withdrawn:
                await asyncio.sleep(self._late_s[1])
                await self._feedback(answer, rater, retract=True)
        except Exception as problem:
            failed, error = 1, f"{type(problem).__name__}: {problem}"[:300]
        self._note(msgspec.structs.replace(seen, failed=failed, error=error))

    async def _feedback(self, answer: str, rater: str, **body: object) -> None:
        await self._client.post("/feedback", cast_to=object, body={"answer_id": answer, "rater": rater, **body})

    def _note(self, seen: Seen) -> None:
        self.counts["failed" if seen.failed else "answered"] += 1
        self._out.write(msgspec.json.encode(seen) + b"\n")


async def until_promoted(url: str, *, every_s: float = 0.5) -> None:
    """Wait until the gateway serves a trained policy. Raises TimeoutError."""
    import httpx

    address = url.removesuffix("/v1") + "/healthz"
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while True:
            try:
                if (await client.get(address)).json().get("version", -1) >= 1:
                    return
            except httpx.HTTPError:
                pass  # it is still loading its model
            await asyncio.sleep(every_s)


async def run_users(options: argparse.Namespace) -> None:
    """Wait for the gateway, ask for `minutes`, finish."""
    from openai import AsyncOpenAI

    await until_promoted(options.url)
    questions = split_pairs(options.seed).train
    async with AsyncOpenAI(base_url=options.url, api_key=os.environ["HEADRACE_KEY"], max_retries=0) as client:
        with options.out.open("ab", buffering=0) as out:
            crowd = Crowd(client, questions, out, options.seed)
            await crowd.run(options.users, time.monotonic() + 60 * options.minutes)
    print(" ".join(f"{name}={count}" for name, count in sorted(crowd.counts.items())), flush=True)


def main() -> None:
    """Entry point of `python -m infra.cli.demo.users`."""
    parser = argparse.ArgumentParser(description="Ask a gateway sums, and rate the answers.")
    parser.add_argument("--url", required=True, help="base_url of the gateway")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--users", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(run_users(parser.parse_args()))


if __name__ == "__main__":
    main()
