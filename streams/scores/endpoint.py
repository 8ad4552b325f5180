"""Questions to an OpenAI-compatible endpoint: within a deadline, a budget and a number of tries.

Guarantees: a question that was answered is not asked again; the budget of a day is reserved before a request and settled
after, so it is never passed; whatever goes wrong is a reason, never an exception or a number. The key comes from the
environment and goes into the request's header only.

The ledger of a judge, in SQLite: a bounded cache of replies by content, and the spending of each day. Guarantees: the
oldest entries go first; a reservation is one transaction, so workers that share a file never pass the budget together; a
process that dies between reserving and settling has spent what it reserved.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import random
import sqlite3
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec

from infra.log.retry import doubling, retry
from infra.settings.config import Section
from infra.settings.outside import AnswerRefused, bounded_answer, checked_url, shared_tls
from schemas.errors import ConfigError

logger = logging.getLogger(__name__)

UNREADABLE = "judge reply unreadable"
OVER_BUDGET = "judge budget spent"
MAX_REPLY_BYTES = 1024 * 1024
FIRST_BACKOFF_S = 0.25
Price = Annotated[float, msgspec.Meta(ge=0, description="US dollars, 0 or more")]
Above = Annotated[float, msgspec.Meta(gt=0, description="a number above 0")]
Count = Annotated[int, msgspec.Meta(ge=1, description="1 or more")]


class EndpointConfig(Section, frozen=True):
    """An OpenAI-compatible endpoint.

    url: up to and with /v1. model: as the endpoint names it. api_key_env: name of the environment variable with the key, ""
    without a key. deadline_s: of one verdict, all tries and waits included; below the step's own timeout_s, after which the
    experience is dropped. attempts: requests for one verdict at most. max_tokens: of one reply. usd_per_day: 0 is no limit; it
    needs prices. usd_per_million_input, usd_per_million_output: prices of a million tokens. cache: SQLite file of verdicts and
    spending, shared by the workers of one machine; "" keeps both in this process. cache_entries: verdicts kept. schema:
    whether to ask for JSON by schema, which not every server knows.

    Example: EndpointConfig(url="http://judge:8000/v1", model="judge-70b")
    """

    url: str
    model: str
    api_key_env: str = ""
    deadline_s: Above = 8.0
    attempts: Count = 4
    max_tokens: Count = 256
    usd_per_day: Price = 0.0
    usd_per_million_input: Price = 0.0
    usd_per_million_output: Price = 0.0
    cache: str = ""
    cache_entries: Count = 100_000
    schema: bool = True

    def __post_init__(self) -> None:
        checked_url(self.url)
        if self.usd_per_day and not self.usd_per_million_input + self.usd_per_million_output:
            raise ValueError(
                "got usd_per_day without prices, expected usd_per_million_input and usd_per_million_output"
            )


class ModelReply(msgspec.Struct, frozen=True):
    """The result of a question.

    reply: the text, None without one. reason: why there is no reply. cost_usd: 0.0 from the cache.
    """

    reply: str | None
    reason: str = ""
    cost_usd: float = 0.0


class _Busy(Exception):
    """A status that may pass."""


class Posted(msgspec.Struct, frozen=True):
    """The result of a request. content: the body of status 200, None without one. reason: why there is none. is_charged:
    whether the endpoint may have worked for it.
    """

    content: bytes | None
    reason: str = ""
    is_charged: bool = True


class Connection:
    """Posts requests to an endpoint, each with retries within a deadline; one event loop at a time.

    who: what the endpoint is, for reasons and the log. key_env: environment variable with the key, "" for none.
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
                return Posted(None, f"{self._who} refused", is_charged=False)
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
        except TimeoutError:  # what was under way may be charged
            return Posted(None, unavailable)
        except (httpx.HTTPError, _Busy):
            return Posted(None, unavailable, is_charged=False)

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
    """Asks one model; one event loop at a time. now: seconds since 1970, for the budget's days. sleep: between tries."""

    def __init__(
        self,
        config: EndpointConfig,
        *,
        now: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self._now = now
        self._connection = Connection(
            "judge", config.url, config.model,
            key_env=config.api_key_env, deadline_s=config.deadline_s, attempts=config.attempts, jitter=jitter,
        )  # fmt: skip
        self._ledger = JudgeLedger(config.cache or ":memory:", config.cache_entries)

    async def ask(self, system: str, user: str, schema: Mapping[str, Any], accept: Callable[[str], bool]) -> ModelReply:
        """The model's reply to `user` under `system`, once `accept` takes it; never raises but CancelledError."""
        body = self._body(system, user, schema)
        inputs = hashlib.sha256(json.dumps([self.config.url, body], sort_keys=True).encode()).hexdigest()[:32]
        if (known := self._ledger.get(inputs)) is not None:
            return ModelReply(known)
        reserved = self._cost(len(json.dumps(body)), self.config.max_tokens)
        day = int(self._now() // 86_400)
        if not self._ledger.reserve(day, reserved, self.config.usd_per_day or math.inf):
            return ModelReply(None, OVER_BUDGET)
        spent = 0.0
        try:
            posted = await self._connection.post("/chat/completions", body, MAX_REPLY_BYTES)
            spent = reserved if posted.is_charged else 0.0
            reply, reason = None, posted.reason
            if posted.content is not None:
                reply, spent, reason = self._read(posted.content, reserved)
        except asyncio.CancelledError:  # it may have been answered, and charged
            spent = reserved
            raise
        finally:
            self._ledger.settle(day, spent - reserved)
        if reply is not None and not accept(reply):
            reply, reason = None, UNREADABLE
        if reply is not None:
            self._ledger.put(inputs, reply)
        return ModelReply(reply, reason, spent)

    async def aclose(self) -> None:
        await self._connection.aclose()
        self._ledger.close()

    def _body(self, system: str, user: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        body: dict[str, Any] = {
            "model": self.config.model, "messages": messages, "temperature": 0, "max_tokens": self.config.max_tokens,
        }  # fmt: skip
        if self.config.schema:
            named = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    def _cost(self, input_tokens: int, output_tokens: int) -> float:
        prices = self.config.usd_per_million_input, self.config.usd_per_million_output
        return (input_tokens * prices[0] + output_tokens * prices[1]) / 1e6

    def _read(self, body: bytes, reserved: float) -> tuple[str | None, float, str]:
        try:
            found = msgspec.json.decode(body, type=ChatCompletion)
            content = found.choices[0].message.content
        except (msgspec.MsgspecError, ValueError, IndexError, RecursionError):
            return None, reserved, UNREADABLE
        usage = found.usage
        cost_usd = reserved if usage is None else self._cost(usage.prompt_tokens, usage.completion_tokens)
        return (content, cost_usd, "") if content else (None, cost_usd, UNREADABLE)


class _CompletionMessage(msgspec.Struct):
    content: str | None = None  # None where the model refused or called a tool


class _CompletionChoice(msgspec.Struct):
    message: _CompletionMessage


class _CompletionUsage(msgspec.Struct):
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)]
    completion_tokens: Annotated[int, msgspec.Meta(ge=0)]


class ChatCompletion(msgspec.Struct):
    """The answer of an OpenAI-compatible endpoint, as far as it is read here.

    choices: one for each answer asked for. usage: None from a server that counts nothing.
    """

    choices: list[_CompletionChoice]
    usage: _CompletionUsage | None = None


def _key(name: str) -> str:
    key = os.environ.get(name)
    if not key:
        raise ConfigError(f"endpoint.api_key_env: the environment has no {name}, expected the key in it")
    return key


BUSY_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS replies (place INTEGER PRIMARY KEY AUTOINCREMENT, inputs TEXT UNIQUE, reply TEXT);
CREATE TABLE IF NOT EXISTS spending (day INTEGER PRIMARY KEY, usd REAL NOT NULL);
"""


class JudgeLedger:
    """One SQLite file, or ":memory:"."""

    def __init__(self, path: str, max_entries: int) -> None:
        if path != ":memory:":
            Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
            path = str(Path(path).expanduser())
        self._max_entries = max_entries
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.executescript(_TABLES)

    def get(self, inputs: str) -> str | None:
        row = self._database.execute("SELECT reply FROM replies WHERE inputs = ?", (inputs,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, inputs: str, reply: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO replies (inputs, reply) VALUES (?, ?)", (inputs, reply))
        self._database.execute(
            "DELETE FROM replies WHERE place <= (SELECT max(place) FROM replies) - ?", (self._max_entries,)
        )

    def reserve(self, day: int, usd: float, budget_usd: float) -> bool:
        self._database.execute("INSERT OR IGNORE INTO spending VALUES (?, 0.0)", (day,))
        changed = self._database.execute(
            "UPDATE spending SET usd = usd + ? WHERE day = ? AND usd + ? <= ?", (usd, day, usd, budget_usd)
        )
        return changed.rowcount == 1

    def settle(self, day: int, difference_usd: float) -> None:
        self._database.execute("UPDATE spending SET usd = max(0, usd + ?) WHERE day = ?", (difference_usd, day))

    def close(self) -> None:
        self._database.close()
