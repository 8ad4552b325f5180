"""Requests and responses: the key and the body of a request, whether its client is still there, and error objects."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from actors.gateway.apis.api import Api
from actors.gateway.errors import ApiError, overloaded, server_error
from infra.roles.process import unless

_log = logging.getLogger(__name__)

T = TypeVar("T")


class BodyBudget:
    """Bounds bodies that have not come whole. each: bytes of one key, address or episode. in_all: of all together. bodies: of
    one key, address or episode, and so its connections that wait for the rest of one.
    """

    def __init__(self, each: int, in_all: int, bodies: int) -> None:
        self._each = each
        self._in_all = in_all
        self._bodies = bodies
        self._unfinished: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._num_bytes = 0

    @contextmanager
    def body(self, name: str) -> Iterator[Callable[[int], None]]:
        """Count a body while it comes; call with the number of bytes of each piece. Raises ApiError beyond the bounds."""
        if self._unfinished[name] >= self._bodies:
            raise overloaded(f"{self._bodies} requests whose bodies are unfinished, expected no more; retry after 1 s")
        taken = 0

        def take(num_bytes: int) -> None:
            nonlocal taken
            if self._held[name] + num_bytes > self._each or self._num_bytes + num_bytes > self._in_all:
                raise overloaded(
                    f"too many bytes in unfinished bodies ({self._held[name]} of {self._each} here, {self._num_bytes} "
                    f"of {self._in_all} in all); retry after 1 s"
                )
            taken += num_bytes
            self._held[name] += num_bytes
            self._num_bytes += num_bytes

        self._unfinished[name] += 1
        try:
            yield take
        finally:
            self._num_bytes -= taken
            self._held[name] -= taken
            self._unfinished[name] -= 1
            if not self._unfinished[name]:
                del self._unfinished[name], self._held[name]


async def read_body(request: Request, limit: int, budget: BodyBudget, name: str) -> bytes:
    """The body, if it comes whole and within its bounds; the server bounds its time. Raises ApiError, ClientDisconnect.

    name: the key, address or episode that it counts for.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        raise _too_large(limit)
    body, more = bytearray(), True
    with budget.body(name) as take:
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            take(len(piece))
            body += piece
            more = message.get("more_body", False)
    return bytes(body)


async def replied(
    work: Awaitable[Response], api: Api, route: str, refused: Callable[[ApiError], None] = lambda error: None
) -> Response:
    """The response to a request; an error becomes the API's error object. refused: called with each ApiError."""
    try:
        return await work
    except ApiError as error:
        refused(error)
        return error_response(error, api)
    except ClientDisconnect:
        return Response(status_code=499)
    except asyncio.CancelledError:  # the server stops and has waited for it as long as it may
        return error_response(ApiError(503, "the server is stopping: retry the request", kind="server_error"), api)
    except Exception:
        _log.exception("request_failed route=%s", route)  # names the error, never the text of a request
        return error_response(server_error(), api)


def error_response(error: ApiError, api: Api) -> Response:
    return Response(api.error(error), error.status, dict(error.headers), media_type="application/json")


def json_response(body: bytes | dict[str, Any], status: int = 200) -> Response:
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(encoded, status, media_type="application/json")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def presented(headers: Mapping[str, str]) -> str:
    """The credentials of a request as an Authorization header has them; Anthropic's clients send x-api-key."""
    key = headers.get("x-api-key", "")
    return headers.get("authorization", "") or (f"Bearer {key}" if key else "")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client goes away first; then the work is cancelled. Raises ClientDisconnect."""
    return await unless(_disconnected(request), work, ClientDisconnect)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
