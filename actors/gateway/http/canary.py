"""Requests to the canary: a second gateway that answers a sticky share of the sessions with the version on trial.

    request ─ checked here ─┬─ outside the share, or the canary is down ──────────────> this gateway's engine
                            └─ inside ──> canary ── 200 ──> passed on as it comes
                                            └── anything else, nothing, or silence ──> this gateway's engine

Guarantees: the assignment of a session depends on its name, the version on trial and the gateways' secret. So all gateways
assign a session alike for the whole trial, and a larger share adds sessions and removes none. A canary answers only with the
version that the session was assigned to, so gateways at different positions of the log show no user a version outside its
share. If the canary fails before the first token of its answer, this gateway answers the request. It polls the canary every
second; if the canary dies, an answer that it began ends with an error event. A canary must identify itself as a canary, so
gateways cannot send requests in circles. A canary that is down for MISSING_S raises an alarm (a warning, a metric, a line of
`headrace status`).
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

import httpx
import msgspec
from starlette.responses import Response

from actors.gateway.access.concurrency import ReleasingStream
from actors.gateway.answering.requests import SESSION_END_HEADER, SESSION_HEADER
from actors.gateway.apis.api import Api
from actors.gateway.config import CanaryShare
from actors.gateway.errors import unavailable
from infra.observe.metrics import Metrics
from infra.roles.process import Absence, unless
from schemas.fields import CANARY_MISSING

_log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
SILENT_S = 3.0  # a canary that does not answer the poll within this time is down
CONNECT_S = 1.0
EVENT_END, ERROR_EVENTS = b"\n\n", (b'data: {"error"', b"event: error\n")
VERSION_HEADER = "x-headrace-version"  # the only version that may answer
PASSED_ON = ("authorization", "x-api-key", "content-type", SESSION_HEADER, SESSION_END_HEADER, VERSION_HEADER)
T = TypeVar("T")


class CanaryUnavailable(Exception):
    """The canary did not answer."""


class Canary:
    """Asks the canary. transport: instead of the network. ask_every_s: how often to ask whether it is there."""

    def __init__(
        self,
        config: CanaryShare,
        metrics: Metrics,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        self._share = config.share
        self._absence = Absence()
        self._metrics = metrics
        self._ask_every_s = ask_every_s
        self._away = asyncio.Event()
        self._away.set()
        self._client = httpx.AsyncClient(
            base_url=config.url,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # an answer takes as long as it takes: see `watch`
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def watch(self) -> None:
        """Poll the canary until cancelled; release requests that wait for a canary that is down."""
        while True:
            there = await self._is_there()
            if there == self._away.is_set():
                _log.info("canary_%s", "there" if there else "away")
            (self._away.clear if there else self._away.set)()
            self._metrics.gauge("canary_there").set(float(there))
            if self._absence.look(asyncio.get_running_loop().time(), wanted=self._share > 0, there=there):
                _log.warning("canary_missing url=%s share=%g", self._client.base_url, self._share)
            self._metrics.gauge(CANARY_MISSING).set(self._absence.missing_s)
            await asyncio.sleep(self._ask_every_s)

    def takes(self, session: str, trial: int, secret: bytes) -> bool:
        return position_in_trial(session, trial, secret) < self._share

    async def answer(
        self, path: str, headers: Mapping[str, str], body: bytes, *, api: Api, stream: bool, choices: int = 1
    ) -> Response | None:
        """The canary's answer to a request, None where it gave none."""
        if self._away.is_set():
            self._count("away")
            return None
        try:
            if not stream:
                response = await self._unless_away(self._asked(path, headers, body, stream=False))
            else:
                response, pieces, begun = await self._unless_away(
                    self._begun(path, headers, body, api.openings(choices))
                )
        except (CanaryUnavailable, httpx.HTTPError) as error:
            _log.warning("canary_did_not_answer error=%s", type(error).__name__)
            self._count("not answered")
            return None
        if response.status_code != 200:
            self._count(f"status {response.status_code}")
            return None
        self._count("answered")
        if stream:
            passed_on = ReleasingStream(self._pieces(response, pieces, begun, api))
            passed_on.at_end.push_async_callback(response.aclose)
            return passed_on
        return Response(response.content, media_type="application/json")

    def _count(self, outcome: str) -> None:
        self._metrics.counter("canary", outcome=outcome).inc()

    async def _asked(self, path: str, headers: Mapping[str, str], body: bytes, *, stream: bool) -> httpx.Response:
        kept = {name.encode(): headers[name].encode("latin-1") for name in PASSED_ON if name in headers}
        request = self._client.build_request("POST", path, headers=kept, content=body)
        return await self._sent(request, stream=stream)

    async def _sent(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        """The response for the client. Raises httpx.HTTPError for every failure of the connection."""
        try:
            return await self._client.send(request, stream=stream)
        # Closed just as it was made, it has no socket that anyio on uvloop could ask.
        except (AttributeError, OSError) as error:
            raise httpx.ConnectError(str(error), request=request) from error

    async def _begun(
        self, path: str, headers: Mapping[str, str], body: bytes, openings: int
    ) -> tuple[httpx.Response, AsyncIterator[bytes], bytes]:
        """A stream up to its first word, or a response that is not a stream. Raises CanaryUnavailable if the stream ends
        earlier or begins with an error.
        """
        response = await self._asked(path, headers, body, stream=True)
        pieces, begun, first = response.aiter_bytes(), b"", b""
        try:
            while response.status_code == 200 and not first:
                if not (piece := await anext(pieces, b"")):
                    raise CanaryUnavailable
                begun += piece
                *whole, _ = begun.split(EVENT_END)
                first = b"".join(whole[openings : openings + 1])
            if first.startswith(ERROR_EVENTS):
                raise CanaryUnavailable
        except BaseException:
            await response.aclose()
            raise
        if response.status_code != 200:
            await response.aclose()
        return response, pieces, begun

    async def _pieces(
        self, response: httpx.Response, pieces: AsyncIterator[bytes], begun: bytes, api: Api
    ) -> AsyncGenerator[bytes, None]:
        try:
            yield begun
            while (piece := await self._unless_away(anext(pieces, b""))) != b"":
                yield piece
        except (CanaryUnavailable, httpx.HTTPError) as error:
            _log.warning("canary_broke_off error=%s", type(error).__name__)
            self._count("broken off")
            yield api.error_event(unavailable("the answer was broken off; ask again"))

    async def _unless_away(self, work: Awaitable[T]) -> T:
        return await unless(self._away.wait(), work, CanaryUnavailable)

    async def _is_there(self) -> bool:
        try:
            async with asyncio.timeout(SILENT_S):
                response = await self._sent(self._client.build_request("GET", "/healthz"))
            health = msgspec.json.decode(response.content, type=dict[str, Any])
        except (TimeoutError, httpx.HTTPError, msgspec.DecodeError, msgspec.ValidationError):
            return False
        if response.status_code == 200 and health.get("channel") != "canary":
            _log.warning("not_a_canary url=%s channel=%s", self._client.base_url, str(health.get("channel"))[:64])
        return response.status_code == 200 and health.get("channel") == "canary"


def position_in_trial(session: str, trial: int, secret: bytes) -> float:
    """The place of a session between 0 and 1 in a trial; every larger share takes the session in.

    secret: secret of the gateways; without it no client can predict the assignment. Each trial assigns sessions again, so
    different people try each version.

    >>> round(position_in_trial("acme/7", 44, b"secret"), 3)
    0.58
    """
    person = b"canary" + trial.to_bytes(8, "big", signed=True)
    digest = hashlib.blake2b(session.encode(), digest_size=7, key=secret[:64], person=person).digest()
    return int.from_bytes(digest, "big") / 2.0**56
