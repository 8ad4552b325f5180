"""Runs a program for one episode: a function of this process, a command, or a service that is asked to.

Guarantees: a command gets no environment but what it is given, and what it started ends with it, as far as it stays in its
process group; what it prints is bounded; a sync function that blocks keeps no other episode waiting, and an async one keeps
waiting only what else runs on the loop of programs.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import ssl
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from actors.program.aside import Aside
from actors.rollout.failure import EpisodeFailed
from infra.settings.outside import AnswerRefused, bounded_answer
from infra.settings.plugin import describe

MAX_OUTPUT_BYTES = 1024 * 1024
LAST_WORDS = 300
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV")


class ProgramInput(msgspec.Struct, frozen=True):
    """What a program is given. base_url: without /v1. key: for it, of this episode alone. model: as requests call it.
    task: as JSON takes it.
    """

    base_url: str
    key: str
    model: str
    task: Mapping[str, Any]


async def call(function: Callable[..., Any], access: ProgramInput, aside: Aside) -> Any:
    """What a function returns. It is called with those of task, base_url, key and model that it takes. Raises EpisodeFailed.

    base_url: with /v1, as OpenAI's clients take it. aside: where an async one runs.
    """
    given = {"task": access.task, "base_url": f"{access.base_url}/v1", "key": access.key, "model": access.model}
    taken = inspect.signature(function).parameters
    every = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    given = given if every else {name: value for name, value in given.items() if name in taken}
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await aside.run(lambda: function(**given))
        return await in_thread_of_its_own(lambda: function(**given))
    except (asyncio.CancelledError, EpisodeFailed):
        raise
    except Exception as error:
        raise EpisodeFailed("agent", describe(error)) from error


async def in_thread_of_its_own(work: Callable[[], Any]) -> Any:
    """What `work` returns. A pool's threads would run out where many programs block, and the server needs some itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():  # it was waited for no longer
            set_it(value)

    def run() -> None:
        try:
            outcome: tuple[Any, Any] = (done.set_result, work())
        except BaseException as error:
            outcome = (done.set_exception, error if isinstance(error, Exception) else RuntimeError(repr(error)))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="program", daemon=True).start()
    return await done


def variables(access: ProgramInput) -> dict[str, str]:
    """The environment of a command."""
    return {
        "OPENAI_BASE_URL": f"{access.base_url}/v1",
        "OPENAI_API_BASE": f"{access.base_url}/v1",
        "OPENAI_API_KEY": access.key,
        "ANTHROPIC_BASE_URL": access.base_url,
        "ANTHROPIC_API_KEY": access.key,
        "HEADRACE_MODEL": access.model,
    }


async def run_command(command: Sequence[str], access: ProgramInput, environment: Mapping[str, str]) -> Any:
    """What a command printed as its last line, where that is JSON; None where it printed nothing. Raises EpisodeFailed.

    The task is on its standard input. environment: besides a few names like PATH.
    """
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**inherited, **environment, **variables(access)},
            start_new_session=True,
        )
    except OSError as error:
        raise EpisodeFailed("agent", f"cannot be started: {command[0]}: {error.strerror}") from error
    try:
        out, words = await _talk(process, msgspec.json.encode(access.task) + b"\n")
        code = await process.wait()
    finally:
        _end(process)
        await process.wait()
    return printed(command, code, out, words)


def printed(command: Sequence[str], code: int, out: bytes, words: bytes) -> Any:
    """What a command that ended printed as its last line. words: its complaints. Raises EpisodeFailed."""
    if code:
        last = words[-LAST_WORDS:].decode(errors="replace").strip()
        raise EpisodeFailed("agent", f"{command[0]} ended with {code}: {last}")
    return _last_json(out)


async def _talk(process: Process, task: bytes) -> tuple[bytes, bytes]:
    """What it printed, and the last of what it complained. Raises EpisodeFailed where it prints too much."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    stdin = process.stdin

    async def give() -> None:
        with contextlib.suppress(ConnectionError):  # it need not read its task
            stdin.write(task)
            await stdin.drain()
            stdin.close()

    async with asyncio.TaskGroup() as group:
        group.create_task(give())
        out = group.create_task(_read(process.stdout))
        words = group.create_task(_read(process.stderr))
    if len(out.result()) > MAX_OUTPUT_BYTES:
        raise EpisodeFailed("reward", f"the program printed more than {MAX_OUTPUT_BYTES} bytes")
    return out.result(), words.result()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """To its end; of more than MAX_OUTPUT_BYTES the last, and one byte more, which shows that it was cut."""
    found = bytearray()
    while piece := await stream.read(65_536):
        found += piece
        del found[: max(0, len(found) - MAX_OUTPUT_BYTES - 1)]
    return bytes(found)


def _end(process: Process) -> None:
    """End it, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_json(out: bytes) -> Any:
    lines = out.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except (ValueError, RecursionError) as error:
        raise EpisodeFailed("reward", f"the program's last line is no JSON: {lines[-1][:LAST_WORDS]!r}") from error


async def ask_service(url: str, access: ProgramInput, tls: ssl.SSLContext | None) -> Any:
    """What a service answers to the task, the address and the key. tls: of an https address; to make one takes a while.
    Raises EpisodeFailed.
    """
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
