"""What comes with a request: its key, its body, and whether its client is still there."""

from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from actors.gateway.config import GatewayLimits
from actors.gateway.errors import ApiError
from infra.local.http_server import disconnect_guard
from infra.roles.unless import unless

T = TypeVar("T")


async def read_body(request: Request, limits: GatewayLimits) -> bytes:
    """The body, if it comes whole and within its bound; the server bounds its time. Raises ApiError."""
    limit = limits.body_bytes
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        raise _too_large(limit)
    body, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        more = message.get("more_body", False)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")


def presented(headers: Mapping[str, str]) -> str:
    """The credentials of a request as an Authorization header has them; Anthropic's clients send x-api-key."""
    key = headers.get("x-api-key", "")
    return headers.get("authorization", "") or (f"Bearer {key}" if key else "")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client goes away first; then the work is cancelled. Raises ClientDisconnect."""
    guard = disconnect_guard(request.scope)
    if guard is not None:
        return await guard.run(work, ClientDisconnect)
    return await unless(_disconnected(request), work, ClientDisconnect)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
