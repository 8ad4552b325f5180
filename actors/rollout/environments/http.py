"""Environment services over HTTP.

    POST <url>/reset  {"episode": "<32 hex digits>", "seed": 7, "task": {…}}           ─> {"observation": "…"}
    POST <url>/step   {"episode": "…", "turn": 0, "action": "…"}                       ─> {"observation": "…", "reward":
    POST <url>/close  {"episode": "…"}  (where `closes` is set)                            0.5, "end": "terminal"}

Every field of an answer is optional. The explorer repeats a request only if it could not connect. Answers are bounded in size;
redirects are not followed.
"""

import uuid
from typing import Any

import httpx
import msgspec

from actors.rollout.environment import EnvironmentEnd, Outcome
from infra.settings.outside import AnswerRefused, bounded_answer, checked_url, shared_tls
from infra.settings.secret import bearer
from schemas import Task

MAX_ANSWER_BYTES = 1024 * 1024


class _HttpReply(msgspec.Struct, frozen=True):
    observation: str = ""
    reward: float | None = None
    end: EnvironmentEnd | None = None


class HttpEnvironment:
    """Environment service with reset and step as JSON over HTTP.

    url: Base URL of the service. timeout_s: Maximum seconds of a request. retries: Further attempts to connect. token_env:
    Environment variable with a bearer token, which is never logged. token_file: File with the bearer token, as an absolute
    path, in place of the variable. closes: Whether the service expects a call at the end of an episode.

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
        self._url = checked_url(url).rstrip("/")
        self._closes = closes
        self._timeout_s = timeout_s
        self._headers = bearer(token_env, token_file)
        self._transport = transport or httpx.AsyncHTTPTransport(verify=shared_tls(), retries=retries)
        self._client: httpx.AsyncClient | None = None
        self._episode = ""
        self._turn = 0

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        """Begin an episode under a fresh name."""
        self._client = httpx.AsyncClient(timeout=self._timeout_s, headers=self._headers, transport=self._transport)
        self._episode, self._turn = uuid.uuid4().hex, 0
        body = {"episode": self._episode, "seed": seed, "task": msgspec.to_builtins(task)}
        return await self._ask("reset", body)

    async def step(self, action: str) -> Outcome:
        body = {"episode": self._episode, "turn": self._turn, "action": action}
        self._turn += 1
        return await self._ask("step", body)

    async def close(self) -> None:
        """Call the service, where it wants that, and close the connection."""
        if self._client is None:
            return
        try:
            if self._closes:
                await self._ask("close", {"episode": self._episode})
        finally:
            await self._client.aclose()

    async def _ask(self, what: str, body: dict[str, Any]) -> Outcome:
        assert self._client is not None, "reset comes first"
        where = f"{self._url}/{what}"
        try:
            response, content = await bounded_answer(self._client, "POST", where, MAX_ANSWER_BYTES, json=body)
        except (AnswerRefused, httpx.TransportError) as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise RuntimeError(f"{where}: answered {response.status_code}, expected 200: {content[:200]!r}")
        try:
            answer = msgspec.json.decode(content, type=_HttpReply)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RuntimeError(f"{where}: {error}; expected observation, reward and end as JSON") from error
        return Outcome(observation=answer.observation, reward=answer.reward, end=answer.end)
