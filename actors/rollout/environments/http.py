"""Environment services over HTTP.

    POST <url>/reset  {"episode": "<32 hex digits>", "seed": 7, "task": {…}}           ─> {"observation": "…"}
    POST <url>/step   {"episode": "…", "turn": 0, "action": "…"}                       ─> {"observation": "…", "reward":
    POST <url>/close  {"episode": "…"}  (where `closes` is set)                            0.5, "end": "terminal"}

Every field of an answer is optional. The explorer names the episode, so it may repeat a reset. It repeats a step only if the
connection was refused. Answers are bounded in size; redirects are not followed.
"""

import uuid
from itertools import islice
from typing import Any

import httpx
import msgspec

from actors.rollout.environment import EnvironmentEnd, Outcome
from infra.log.retry import doubling, retry
from infra.settings.outside import AnswerRefused, bounded_answer, shared_tls
from infra.settings.secret import bearer
from schemas import Task
from schemas.errors import ConfigError

MAX_ANSWER_BYTES = 1024 * 1024
FIRST_BACKOFF_S = 0.2
BUSY = (429, 502, 503, 504)  # nothing was done: the service, or something before it, is full or restarting


class _HttpReply(msgspec.Struct, frozen=True):
    observation: str = ""
    reward: float | None = None
    end: EnvironmentEnd | None = None


class HttpEnvironment:
    """Environment service with reset and step as JSON over HTTP.

    url: Base URL of the service. timeout_s: Maximum seconds of a request. retries: Further attempts of a request that is safe
    to repeat. token_env: Environment variable with a bearer token, which is never logged. token_file: File with the bearer
    token, as an absolute path, in place of the variable. closes: Whether the service expects a call at the end of an episode.

    Example: HttpEnvironment(url="http://shop-simulator:8080", timeout_s=20)
    """

    def __init__(
        self,
        *,
        url: str,
        timeout_s: float = 10.0,
        retries: int = 2,
        token_env: str = "",
        token_file: str = "",
        closes: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: got {url!r}, expected http://… or https://…")
        self._url = url.rstrip("/")
        self._retries = retries
        self._closes = closes
        self._timeout_s = timeout_s
        self._headers = bearer(token_env, token_file)
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._episode = ""
        self._turn = 0

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        """Begin an episode under a fresh name."""
        self._client = httpx.AsyncClient(
            timeout=self._timeout_s, headers=self._headers, transport=self._transport, verify=shared_tls()
        )
        self._episode, self._turn = uuid.uuid4().hex, 0
        body = {"episode": self._episode, "seed": seed, "task": msgspec.to_builtins(task)}
        return await self._ask("reset", body, twice=True)

    async def step(self, action: str) -> Outcome:
        body = {"episode": self._episode, "turn": self._turn, "action": action}
        self._turn += 1
        return await self._ask("step", body, twice=False)

    async def close(self) -> None:
        """Call the service, where it wants that, and close the connection."""
        if self._client is None:
            return
        try:
            if self._closes:
                await self._ask("close", {"episode": self._episode}, twice=False)
        finally:
            await self._client.aclose()

    async def _ask(self, what: str, body: dict[str, Any], *, twice: bool) -> Outcome:
        def again(error: Exception) -> bool:
            return isinstance(error, _Refused) and (twice or error.unsent)

        try:
            return await retry(lambda: self._once(what, body), islice(doubling(FIRST_BACKOFF_S), self._retries), again)
        except _Refused as error:
            raise RuntimeError(str(error)) from error

    async def _once(self, what: str, body: dict[str, Any]) -> Outcome:
        assert self._client is not None, "reset comes first"
        where = f"{self._url}/{what}"
        try:
            response, content = await bounded_answer(self._client, "POST", where, MAX_ANSWER_BYTES, json=body)
        except AnswerRefused as error:
            raise RuntimeError(f"{where}: {error}") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Refused(f"{where}: cannot be reached: {error}", unsent=True) from error
        except httpx.TransportError as error:
            raise _Refused(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code in BUSY:
            raise _Refused(f"{where}: answered {response.status_code}")
        if response.status_code != 200:
            raise RuntimeError(f"{where}: answered {response.status_code}, expected 200: {content[:200]!r}")
        try:
            answer = msgspec.json.decode(content, type=_HttpReply)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RuntimeError(f"{where}: {error}; expected observation, reward and end as JSON") from error
        return Outcome(observation=answer.observation, reward=answer.reward, end=answer.end)


class _Refused(Exception):
    """A request that may be tried again. unsent: certainly not even seen by the service."""

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent
