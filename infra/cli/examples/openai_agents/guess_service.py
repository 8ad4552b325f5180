"""Guess a number, played by a program of the OpenAI Agents SDK: a service that is sent one game per request.

    python guess_service.py 9000

A request brings all that it knows of headrace: the task, a base URL, a key and a model's name.
"""

import math
import sys
from typing import Any

import uvicorn
from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

HIGH, TURNS = 16, 5
SHAPED = 0.9  # of a hit's worth is given for numbers that the guesses ruled out
HTTP = DefaultAsyncHttpxClient(timeout=None)  # one for all games


class Game:
    """A number from 1 to HIGH, and the rest of the range."""

    def __init__(self, number: int) -> None:
        self.number, self.least, self.most = number, 1, HIGH

    def guess(self, said: str) -> tuple[float, str]:
        """Reward of a guess and the answer to the player; "" for a hit."""
        guess = int(said) if said.isdecimal() else 0
        if guess == self.number:
            return 1.0 + self.rule_out(guess, guess), ""
        if not 1 <= guess <= HIGH:
            return 0.0, "?"
        if guess < self.number:
            return self.rule_out(max(self.least, guess + 1), self.most), ">"
        return self.rule_out(self.least, min(self.most, guess - 1)), "<"

    def rule_out(self, least: int, most: int) -> float:
        """The share of log(HIGH) that is ruled out by this."""
        before = self.most - self.least + 1
        self.least, self.most = least, most
        return SHAPED * math.log(before / (most - least + 1)) / math.log(HIGH)


async def play(request: Request) -> JSONResponse:
    """One game: a run of the player per guess, each with all that was said before."""
    episode: dict[str, Any] = await request.json()
    client = AsyncOpenAI(base_url=episode["base_url"], api_key=episode["api_key"], http_client=HTTP, max_retries=0)
    player = Agent(name="player", model=OpenAIChatCompletionsModel(episode["model"], client))
    game = Game(int(episode["task"]["meta"]["number"]))
    said = episode["task"]["messages"]
    turns: list[dict[str, Any]] = []
    for _ in range(TURNS):
        try:
            answer = await Runner.run(player, said)
            item = answer.raw_responses[-1].output[0]
        except (ModelBehaviorError, IndexError):  # nothing was said: the SDK makes no turn of it
            return JSONResponse({"turns": turns, "rewards": {"environment": 0.0}})
        reward, hint = game.guess(answer.final_output)
        turns.append({"id": item.provider_data["response_id"], "rewards": {"environment": reward}})
        if not hint:
            break
        said = [*answer.to_input_list(), {"role": "user", "content": hint}]
    return JSONResponse({"turns": turns})


if __name__ == "__main__":
    set_tracing_disabled(True)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 9000
    app = Starlette(routes=[Route("/", play, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)
