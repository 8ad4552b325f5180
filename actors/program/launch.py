"""Runs a program for one episode: a function of this process, a command, or a call of a service.

Guarantees: a command gets only the environment variables that `run_command` sets, and its child processes end with it if they
stay in its process group; its output is bounded; a sync function that blocks delays no other episode, and an async function
that blocks delays only the other functions on the loop of programs.
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import signal
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import httpx
import msgspec
from msgspec import Meta

from actors.rollout.workflow import EpisodeFailed
from infra.chain.calls import Failure, Trouble, as_tasks, in_thread
from infra.settings.outside import AnswerRefused, bounded_answer
from infra.settings.plugin import describe
from schemas import Score


class AgentLoop:
    """An event loop for async functions, in a thread. It lasts as long as the process: a function may keep its clients."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.trouble = Trouble("program")

    async def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="programs", daemon=True).start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._loop))


MAX_OUTPUT_BYTES = 1024 * 1024
LAST_WORDS = 300
REST_S = 1.0  # for the rest of the output of a command that has ended
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV")


class ProgramInput(msgspec.Struct, frozen=True):
    """Inputs of a program. base_url: without /v1. key: for it, of this episode alone. model: as requests call it.
    task: as JSON takes it.
    """

    base_url: str
    key: str
    model: str
    task: Mapping[str, Any]


async def call(function: Callable[..., Any], access: ProgramInput, agents: AgentLoop) -> Any:
    """Call a function with task, base_url, key and model, as far as it has parameters for them. Raises EpisodeFailed.

    base_url: with /v1, as OpenAI's clients take it. agents: runs an async function.
    """
    given = {"task": access.task, "base_url": f"{access.base_url}/v1", "key": access.key, "model": access.model}
    taken = inspect.signature(function).parameters
    every = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
    given = given if every else {name: value for name, value in given.items() if name in taken}

    def run(_: None) -> Any:
        return function(**given)

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        (result,) = await agents.run(lambda: as_tasks(run, [None], math.inf, agents.trouble))
    else:
        (result,) = await in_thread(run, [None], math.inf, agents.trouble)
    if isinstance(result, Failure):
        raise EpisodeFailed("agent", result.detail)
    return result


def variables(access: ProgramInput) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": f"{access.base_url}/v1",
        "OPENAI_API_BASE": f"{access.base_url}/v1",
        "OPENAI_API_KEY": access.key,
        "ANTHROPIC_BASE_URL": access.base_url,
        "ANTHROPIC_API_KEY": access.key,
        "HEADRACE_MODEL": access.model,
    }


async def run_command(command: Sequence[str], access: ProgramInput, environment: Mapping[str, str]) -> Any:
    """Run a command and return its last line as JSON, None where it printed nothing. Raises EpisodeFailed.

    The task is on its standard input. environment: besides a few names like PATH.
    """
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    loop = asyncio.get_running_loop()
    try:
        process, said = await loop.subprocess_exec(
            _Said, *command, env={**inherited, **environment, **variables(access)}, start_new_session=True
        )
    except OSError as error:
        raise EpisodeFailed("agent", f"cannot be started: {command[0]}: {error.strerror}") from error
    with contextlib.closing(process):
        try:
            stdin = cast(asyncio.WriteTransport, process.get_pipe_transport(0))
            stdin.write(msgspec.json.encode(access.task) + b"\n")  # it need not read its task
            stdin.write_eof()
            await said.ended.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.get_pid(), signal.SIGKILL)
            await said.ended.wait()
        with contextlib.suppress(TimeoutError):  # a process that left the group may hold the output open
            await asyncio.wait_for(said.closed.wait(), REST_S)
    if code := process.get_returncode():
        last = said.words[-LAST_WORDS:].decode(errors="replace").strip()
        raise EpisodeFailed("agent", f"{command[0]} ended with {code}: {last}")
    if len(said.out) > MAX_OUTPUT_BYTES:
        raise EpisodeFailed("reward", f"the program printed more than {MAX_OUTPUT_BYTES} bytes")
    return _last_json(said.out)


class _Said(asyncio.SubprocessProtocol):
    """Output and standard error of a command: of more than MAX_OUTPUT_BYTES the last, and one more, which shows the cut.

    ended: set when the command has ended. closed: set when its output is closed; a child process may hold it open.
    """

    def __init__(self) -> None:
        self.out, self.words = bytearray(), bytearray()
        self.ended, self.closed = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self.out if fd == 1 else self.words
        kept += data
        del kept[: max(0, len(kept) - MAX_OUTPUT_BYTES - 1)]

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, _: Exception | None) -> None:
        self.closed.set()


def _last_json(out: bytearray) -> Any:
    lines = out.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise EpisodeFailed("reward", f"the program's last line is no JSON: {lines[-1][:LAST_WORDS]!r}") from error


async def ask_service(url: str, access: ProgramInput, tls: ssl.SSLContext | None) -> Any:
    """Send task, address and key to a service and return its answer. tls: of an https address. Raises EpisodeFailed."""
    body = {
        "task": dict(access.task),
        "base_url": f"{access.base_url}/v1",
        "anthropic_base_url": access.base_url,
        "api_key": access.key,
        "model": access.model,
    }
    try:
        async with httpx.AsyncClient(
            timeout=None, trust_env=False, verify=tls or not url.startswith("http://")
        ) as client:  # an episode has a time of its own
            response, content = await bounded_answer(client, "POST", url, MAX_OUTPUT_BYTES, json=body)
        response.raise_for_status()
    except AnswerRefused as error:
        raise EpisodeFailed("reward", f"{url}: {error}") from error
    except httpx.HTTPError as error:
        raise EpisodeFailed("agent", f"{url}: {describe(error)}") from error
    try:
        return msgspec.json.decode(content) if content else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise EpisodeFailed("reward", f"{url} answered no JSON: {error}") from error


NAME = "program"  # of a reward without a name
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TurnResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rewards of one turn, as {"id": "hr-…", "rewards": {"helpful": 1}}. id: of the response that the program got. rewards:
    names to values.
    """

    id: str
    rewards: Annotated[dict[Name, float], Meta(max_length=64)]


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """reward: of the whole, under the name "program". rewards: by name. turns: of single turns. answer: kept as a note. end:
    how the episode ended, where the last turn does not say.

    Example: {"reward": 1.0, "turns": [{"id": "hr-…", "rewards": {"format": 0.5}}]}
    """

    reward: float | None = None
    rewards: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    turns: Annotated[tuple[TurnResult, ...], Meta(max_length=4096)] = ()
    answer: Annotated[str, Meta(max_length=65_536)] | None = None
    end: Literal["terminal", "truncated"] | None = None

    def scores(self) -> tuple[Score, ...]:
        """Scores of the whole episode. Raises EpisodeFailed."""
        whole = {} if self.reward is None else {NAME: self.reward}
        return tuple(Score(name=name, value=finite(name, value)) for name, value in {**whole, **self.rewards}.items())


def parse_result(said: Any) -> Result:
    """The result that a function returned or a program printed. Raises EpisodeFailed, with the cause "reward"."""
    if isinstance(said, Result):
        return said
    if said is None:
        return Result()
    if isinstance(said, int | float):
        return Result(reward=float(said))
    try:
        return msgspec.convert(said, Result)
    except msgspec.ValidationError as error:
        raise EpisodeFailed(
            "reward", f"the program's result: {error}; expected nothing, a number, or {FIELDS}"
        ) from error


def finite(name: str, value: float) -> float:
    """The value. Raises EpisodeFailed where it is not a number."""
    if not math.isfinite(value):
        raise EpisodeFailed("reward", f"the program's result: {name}: got {value}, expected a finite number")
    return value


FIELDS = "an object with reward, rewards, turns, answer or end"
