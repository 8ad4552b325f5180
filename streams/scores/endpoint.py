"""Questions to an OpenAI-compatible endpoint: within a deadline and a number of tries.

Guarantees: every failure becomes a reason, never an exception or a number. The key comes from the environment and goes into
the request's header only.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Annotated, Any

import httpx
import msgspec

from infra.log.retry import doubling, retry
from infra.settings.config import Section
from infra.settings.outside import AnswerRefused, bounded_answer, checked_url, shared_tls
from schemas.errors import ConfigError

logger = logging.getLogger(__name__)

UNREADABLE = "judge reply unreadable"
MAX_REPLY_BYTES = 1024 * 1024
FIRST_BACKOFF_S = 0.25
Above = Annotated[float, msgspec.Meta(gt=0, description="a number above 0")]
Count = Annotated[int, msgspec.Meta(ge=1, description="1 or more")]


class EndpointConfig(Section, frozen=True):
    """An OpenAI-compatible endpoint.

    url: Base URL, including /v1. model: Model name at the endpoint. api_key_env: Environment variable with the key. "" for no
    key. deadline_s: Maximum seconds of a verdict, over all requests and waits. Set it below the step's timeout_s, after which
    the experience is dropped. attempts: Maximum requests per verdict. max_tokens: Maximum tokens of a reply. schema: Whether
    requests ask for JSON by a schema, which some servers do not support.

    Example: EndpointConfig(url="http://judge:8000/v1", model="judge-70b")
    """

    url: str
    model: str
    api_key_env: str = ""
    deadline_s: Above = 8.0
    attempts: Count = 4
    max_tokens: Count = 256
    schema: bool = True

    def __post_init__(self) -> None:
        checked_url(self.url)


class ModelReply(msgspec.Struct, frozen=True):
    """The result of a question. reply: the text, None without one. reason: why there is no reply."""

    reply: str | None
    reason: str = ""


class _Busy(Exception):
    """A status that may pass."""


class Posted(msgspec.Struct, frozen=True):
    """The result of a request. content: the body of status 200, None without one. reason: why there is none."""

    content: bytes | None
    reason: str = ""


class Connection:
    """Posts requests to an endpoint, each with retries within a deadline; one event loop at a time.

    who: kind of the endpoint, for reasons and the log. key_env: environment variable with the key, "" for none.
    """

    def __init__(
        self,
        who: str,
        url: str,
        model: str,
        *,
        key_env: str,
        deadline_s: float,
        attempts: int,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._who, self._url, self._model = who, url, model
        self._deadline_s, self._attempts = deadline_s, attempts
        self._jitter = jitter
        self._headers = {"Authorization": f"Bearer {_key(key_env)}"} if key_env else {}
        self._client: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None

    async def post(self, path: str, body: Mapping[str, Any], max_bytes: int) -> Posted:
        """The answer to a JSON body; never raises but CancelledError."""

        async def once() -> Posted:
            try:
                response, content = await bounded_answer(self._session(), "POST", path, max_bytes, json=body)
            except AnswerRefused as error:
                logger.warning("%s_reply_refused model=%s error=%s", self._who, self._model, error)
                return Posted(None, f"{self._who} reply unreadable")
            if response.status_code == 200:
                return Posted(content)
            logger.warning("%s_status model=%s status=%d", self._who, self._model, response.status_code)
            if response.status_code not in (408, 409, 429) and response.status_code < 500:
                return Posted(None, f"{self._who} refused")
            raise _Busy

        def again(error: Exception) -> bool:
            if isinstance(error, httpx.HTTPError):
                logger.warning("%s_unreachable model=%s error=%s", self._who, self._model, type(error).__name__)
            return isinstance(error, httpx.HTTPError | _Busy)

        unavailable = f"{self._who} unavailable"
        pauses = (pause_s * (0.5 + self._jitter()) for pause_s in doubling(FIRST_BACKOFF_S))
        try:
            async with asyncio.timeout(self._deadline_s):
                return await retry(once, islice(pauses, self._attempts - 1), again)
        except (TimeoutError, httpx.HTTPError, _Busy):
            return Posted(None, unavailable)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client[1].aclose()

    def _session(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            client = httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=None, verify=shared_tls())
            self._client = (loop, client)
        return self._client[1]


class Endpoint:
    """Asks one model; one event loop at a time."""

    def __init__(self, config: EndpointConfig, *, jitter: Callable[[], float] = random.random) -> None:
        self.config = config
        self._connection = Connection(
            "judge", config.url, config.model,
            key_env=config.api_key_env, deadline_s=config.deadline_s, attempts=config.attempts, jitter=jitter,
        )  # fmt: skip

    async def ask(self, system: str, user: str, schema: Mapping[str, Any], accept: Callable[[str], bool]) -> ModelReply:
        """The model's reply to `user` under `system`, if `accept` takes it; never raises but CancelledError."""
        posted = await self._connection.post("/chat/completions", self._body(system, user, schema), MAX_REPLY_BYTES)
        if posted.content is None:
            return ModelReply(None, posted.reason)
        try:
            reply = msgspec.json.decode(posted.content, type=ChatCompletion).choices[0].message.content
        except (msgspec.MsgspecError, ValueError, IndexError, RecursionError):
            reply = None
        return ModelReply(reply) if reply and accept(reply) else ModelReply(None, UNREADABLE)

    async def aclose(self) -> None:
        await self._connection.aclose()

    def _body(self, system: str, user: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body: dict[str, Any] = {
            "model": self.config.model, "messages": messages, "temperature": 0, "max_tokens": self.config.max_tokens,
        }  # fmt: skip
        if self.config.schema:
            named = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body


class _CompletionMessage(msgspec.Struct):
    content: str | None = None  # None where the model refused or called a tool


class _CompletionChoice(msgspec.Struct):
    message: _CompletionMessage


class ChatCompletion(msgspec.Struct):
    """The fields that the score reads from a reply of an OpenAI-compatible endpoint. choices: one for each requested answer."""

    choices: list[_CompletionChoice]


def _key(name: str) -> str:
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"endpoint.api_key_env: the environment has no {name}, expected the key in it")
    return key
