"""OpenEnv servers over their WebSocket, which keeps a world per connection (their HTTP routes make a new world per request).

    ws://…/ws   {"type": "reset", "data": {"seed": 7, "episode_id": "…"}}  ─> {"type": "observation", "data": {"observation":
                {"type": "step", "data": {"message": "…"}}                     {…}, "reward": 0.5, "done": false}}
                {"type": "close"}

If the server cannot read an action, the agent gets the server's error and loses a turn. If the server is full, the explorer
retries. Messages are bounded.
"""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from actors.rollout.environment import Outcome
from infra.settings.outside import checked_url
from infra.settings.plugin import load
from infra.settings.secret import bearer
from schemas import Task

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
FIRST_BACKOFF_S = 0.2
CLOSE_S = 5.0
UNREADABLE = ("VALIDATION_ERROR", "INVALID_JSON")
MAX_SHOWN_CHARS = 500


class _OpenEnvReply(msgspec.Struct):
    observation: dict[str, Any]
    reward: float | None = None
    done: bool = False


class _Message(msgspec.Struct):
    type: str
    data: dict[str, Any] = {}


class OpenEnv(msgspec.Struct, kw_only=True, dict=True):
    """Any OpenEnv server as an environment, over its WebSocket, with a connection per episode.

    url: URL of the server, http or https. field: Field of the action for the agent's text. "" if the text is the whole action
    as JSON. action: Further fields of every action. shown: Field of the observation for the agent. "" for the whole observation
    as JSON. read: Function "module:name" from the agent's text to an action, in place of `field`. write: Function "module:name"
    from an observation to text, in place of `shown`. token_env: Environment variable with a bearer token, which is never
    logged. token_file: File with the bearer token, as an absolute path, in place of the variable. retries: Further attempts
    while the server is full or unreachable.

    Example: OpenEnv(url="http://echo:8000", field="message", shown="echoed_message")
    """

    url: str
    field: str = ""
    action: Mapping[str, Any] = {}
    shown: str = ""
    read: str = ""
    write: str = ""
    token_env: str = ""
    token_file: str = ""
    retries: int = 5

    def __post_init__(self) -> None:
        self._url = f"ws{checked_url(self.url).removeprefix('http').rstrip('/')}/ws"
        self._read: Callable[[str], Any] | None = load(self.read, {}, "read") if self.read else None
        self._write: Callable[[Any], str] | None = load(self.write, {}, "write") if self.write else None
        self._headers = bearer(self.token_env, self.token_file)
        self._socket: ClientConnection | None = None

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        """Begin an episode in a world of its own. The task's meta may name its `seed`."""
        own = task.meta.get("seed")
        data = {"seed": own if isinstance(own, int) else seed, "episode_id": uuid.uuid4().hex}
        backoff_s = FIRST_BACKOFF_S
        for left in range(self.retries, -1, -1):
            try:
                self._socket = await self._connected()
                return self._outcome(await self._ask("reset", data))
            except (_Full, OSError, InvalidHandshake) as error:
                await self.close()
                if not left:
                    raise RuntimeError(f"{self._url}: {error}") from error
            await asyncio.sleep(backoff_s)
            backoff_s *= 2
        raise AssertionError("the last attempt returns or raises")

    async def step(self, action: str) -> Outcome:
        try:
            fields = self._read(action) if self._read is not None else self._fields(action)
            return self._outcome(await self._ask("step", fields))
        except (ValueError, _Unreadable) as error:
            return Outcome(observation=str(error))

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with contextlib.suppress(ConnectionClosed):  # it is gone already
            await socket.send('{"type": "close"}')
        await socket.close()

    async def _connected(self) -> ClientConnection:
        # A step may keep the server busy for long: the guard's timeout limits a step, not a ping.
        return await connect(
            self._url,
            additional_headers=self._headers,
            max_size=MAX_MESSAGE_BYTES,
            ping_interval=None,
            close_timeout=CLOSE_S,
            proxy=None,
        )

    def _fields(self, action: str) -> dict[str, Any]:
        if self.field:
            return {**self.action, self.field: action}
        try:
            said = json.loads(action)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise ValueError(f"got {action[:MAX_SHOWN_CHARS]!r}, expected a JSON object")
        return {**self.action, **said}

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> _OpenEnvReply:
        """Raises _Full, _Unreadable, RuntimeError for any other reply that is not an answer."""
        assert self._socket is not None, "reset comes first"
        try:
            with contextlib.suppress(ConnectionClosed):  # a server that is full says so unasked, and closes
                await self._socket.send(msgspec.json.encode({"type": kind, "data": data}).decode())
            content = await self._socket.recv()
        except ConnectionClosed as error:
            raise RuntimeError(f"{self._url}: {kind}: {error}") from error
        try:
            message = msgspec.json.decode(content, type=_Message)
            if message.type == "observation":
                return msgspec.convert(message.data, _OpenEnvReply)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RuntimeError(f"{self._url}: {kind}: {error}; expected an observation of OpenEnv") from error
        code, said = message.data.get("code"), str(message.data.get("message"))[:MAX_SHOWN_CHARS]
        if code == "CAPACITY_REACHED":
            raise _Full(said)
        if code in UNREADABLE and kind == "step":
            raise _Unreadable(_wrong(said, message.data.get("errors")))
        raise RuntimeError(f"{self._url}: {kind}: answered {message.type} {code}: {said}")

    def _outcome(self, answer: _OpenEnvReply) -> Outcome:
        return Outcome(
            observation=self._written(answer.observation), reward=answer.reward, end="terminal" if answer.done else None
        )

    def _written(self, observation: dict[str, Any]) -> str:
        if self._write is not None:
            return self._write(observation)
        if self.shown and self.shown not in observation:
            raise RuntimeError(f"shown: got an observation of {', '.join(observation)}, expected {self.shown}")
        value = observation[self.shown] if self.shown else observation
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _wrong(said: str, errors: object) -> str:
    found = [fault for fault in errors if isinstance(fault, dict)] if isinstance(errors, list) else []
    lines = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg', '')}" for fault in found]
    return "\n".join([f"{said}:", *lines] if lines else [said])[:MAX_SHOWN_CHARS]


class _Full(Exception):
    """The server has no room for another world."""


class _Unreadable(Exception):
    """The server cannot read an action; the message holds the server's reason."""
