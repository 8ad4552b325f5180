"""An environment of the package `verifiers` as a program of headrace. It runs where `verifiers` is, and needs no headrace.

    python serve_verifiers.py tasks ENV > tasks.jsonl    its examples, for headrace load tasks
    python serve_verifiers.py serve ENV                  its rollouts: one for each POST of a task, base URL, key and model

Answers and info of the examples stay here: a task names its example by number.
"""

import argparse
import contextlib
import json
import math
import socket
import sys
from typing import Any

import uvicorn
import verifiers as vf  # type: ignore[import-not-found]
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from verifiers.clients import OpenAIChatCompletionsClient  # type: ignore[import-not-found]

MAX_BODY_BYTES = 16 * 1024 * 1024
TIMEOUT_S = 3600.0  # an episode has a time of its own, and its key ends with it


class VerifiersClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
    """Sends no field without a value."""

    async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages as they are sent."""
        prompt, more = await super().to_native_prompt(messages)
        return [{name: value for name, value in item.items() if value is not None} for item in prompt], more


class Rollouts:
    """One environment with its examples, of which `held-out` are those to evaluate on."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the tasks
            self.environment = vf.load_environment(name, **options)
        if self.environment.requires_group_rollouts:
            sys.exit(f"{name}: it rewards rollouts of a group together; expected one that rewards each by itself")
        self.rows = {"train": self._rows("dataset", self.environment.get_dataset)}
        self.rows["held-out"] = self._rows("eval_dataset", self.environment.get_eval_dataset)

    def _rows(self, kind: str, get: Any) -> dict[int, dict[str, Any]]:
        has = getattr(self.environment, kind, None) or getattr(self.environment, f"{kind}_source", None)
        return {int(row["example_id"]): row for row in get().to_list()} if has is not None else {}

    def tasks(self) -> list[dict[str, Any]]:
        """The examples as tasks. Raises ValueError for one whose prompt is not of texts alone."""
        return [
            {"id": f"{self.name}-{split}-{number}", "split": split, "messages": to_messages(row),
             "meta": {"example": number, "of": split}}
            for split, rows in self.rows.items()
            for number, row in rows.items()
        ]  # fmt: skip

    async def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One rollout, in the form that headrace reads. Raises the environment's errors."""
        meta = asked["task"]["meta"]
        row = dict(self.rows[meta["of"]][meta["example"]])
        async with AsyncOpenAI(base_url=asked["base_url"], api_key=asked["api_key"], timeout=TIMEOUT_S) as client:
            output = await self.environment.run_rollout(
                row, VerifiersClient(client), asked["model"], {}, state_columns=["trajectory"]
            )
        return to_result(output)

    async def answer(self, request: Request) -> JSONResponse:
        """The rollout of a posted episode; status 500 with the error where it failed."""
        length = int(request.headers.get("content-length", 0))
        if not 0 < length <= MAX_BODY_BYTES:
            return JSONResponse({"error": f"got {length} bytes, expected 1 to {MAX_BODY_BYTES}"}, 413)
        try:
            return JSONResponse(await self.run(await request.json()))
        except Exception as error:  # any error of an environment fails only its episode
            print(f"episode failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)


def to_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """The prompt of an example."""
    messages = [{"role": item["role"], "content": item["content"]} for item in row["prompt"]]
    if not all(isinstance(message["content"], str) for message in messages):
        raise ValueError(f"example {row['example_id']}: its prompt has more than texts")
    return messages


def to_result(output: dict[str, Any]) -> dict[str, Any]:
    """Rewards by name, and the rewards of single turns. Raises RuntimeError for a rollout that failed."""
    if output.get("error"):
        raise RuntimeError(f"the rollout failed: {json.dumps(output['error'], default=str)[:1000]}")
    turns = [
        {"id": step["response"]["id"] if isinstance(step["response"], dict) else step["response"].id,
         "rewards": {"turn": step["reward"]}}
        for step in output.get("trajectory") or ()
        if step.get("reward") is not None
    ]  # fmt: skip
    rewards = {name: float(value) for name, value in (output["metrics"] or {}).items() if value is not None}
    if not all(map(math.isfinite, rewards.values())):
        raise RuntimeError(f"the rollout has the rewards {rewards}, expected finite numbers")
    end = {"end": "truncated"} if output["is_truncated"] else {}
    return {"reward": float(output["reward"]), "rewards": rewards, "turns": turns, **end}


def main() -> None:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="An environment of verifiers, for headrace.")
    parser.add_argument("what", choices=("tasks", "serve"))
    parser.add_argument("environment", help="its name, as vf.load_environment takes it")
    parser.add_argument("--options", type=json.loads, default={}, help="of load_environment, as a JSON object")
    parser.add_argument(
        "--listen", default="127.0.0.1:9301", help="host:port; any client that reaches it can run rollouts"
    )
    given = parser.parse_args()
    rollouts = Rollouts(given.environment, given.options)
    if given.what == "tasks":
        for task in rollouts.tasks():
            print(json.dumps(task))
        return
    host, _, port = given.listen.rpartition(":")
    with socket.create_server((host, int(port)), backlog=1024) as sock:
        print(f"serving {rollouts.name} at http://{host}:{sock.getsockname()[1]}/", flush=True)
        app = Starlette(routes=[Route("/", rollouts.answer, methods=["POST"])])
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[sock])


if __name__ == "__main__":
    main()
