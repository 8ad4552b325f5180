"""What comes with a request: its key, its body, and whether its client is still there."""

from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from actors.gateway.errors import ApiError, overloaded
from infra.local.http_server import disconnect_guard
from infra.roles.process import unless

T = TypeVar("T")


class BodyBudget:
    """Bounds the bytes of bodies that have not come whole. each: of one key, address or episode. in_all: of all together."""

    def __init__(self, each: int, in_all: int) -> None:
        self._each = each
        self._in_all = in_all
        self._held: Counter[str] = Counter()
        self.num_bytes = 0

    def take(self, name: str, num_bytes: int) -> None:
        """Count bytes of a body. Raises ApiError where they are too many."""
        if self._held[name] + num_bytes > self._each or self.num_bytes + num_bytes > self._in_all:
            raise overloaded(
                f"too many bytes in unfinished bodies ({self._held[name]} of {self._each} here, {self.num_bytes} of "
                f"{self._in_all} in all); retry after 1 s"
            )
        self._held[name] += num_bytes
        self.num_bytes += num_bytes

    def give_back(self, name: str, num_bytes: int) -> None:
        """The body came whole, or never will."""
        self.num_bytes -= num_bytes
        self._held[name] -= num_bytes
        if not self._held[name]:
            del self._held[name]


async def read_body(request: Request, limit: int, budget: BodyBudget, name: str) -> bytes:
    """The body, if it comes whole and within its bounds; the server bounds its time. Raises ApiError, ClientDisconnect.

    name: whose budget it counts for.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        raise _too_large(limit)
    body, more = bytearray(), True
    try:
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            if len(body) + len(piece) > limit:
                raise _too_large(limit)
            budget.take(name, len(piece))
            body += piece
            more = message.get("more_body", False)
    finally:
        budget.give_back(name, len(body))
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
