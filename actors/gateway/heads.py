"""The head of a request: how long it may be, how long a client may take to send it, and what one is told that cannot be read.

The server's fast parser bounds neither, and a client needs no key to send one.

Guarantees: a connection holds at most MAX_HEAD_BYTES and what comes in one piece of a head that is not whole, and no longer
than its time; whoever is refused gets an error object and is counted; no answer is cut off for the length or the slowness of
the head behind it.
"""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actors.gateway.errors import ApiError, bad
from infra.metrics import Metrics

MAX_HEAD_BYTES = 64 * 1024


class BoundedHeads(HttpToolsProtocol):
    """One connection. head_s: for a head, from its first byte on, and for the first byte of all."""

    def __init__(self, *args: Any, metrics: Metrics, head_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = metrics
        self._head_s = head_s
        self._head_bytes = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._timer is None:
            self._wait()
        if self._head_bytes > MAX_HEAD_BYTES and self._is_answering:
            self.flow.pause_reading()  # until it has answered
        elif self._head_bytes > MAX_HEAD_BYTES:
            message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, code="request_too_large"))

    def on_message_begin(self) -> None:
        """Of the parser: a head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Of the parser: it is whole."""
        self._in_head = False
        self._wait_no_more()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Of the server: what came is not HTTP."""
        self._refuse(bad(msg, code="not_http"))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._head_s, self._too_slow)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._is_answering:
            self._wait()
        else:
            message = f"the head of the request took longer than {self._head_s:g} s"
            self._refuse(ApiError(408, message, code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        self._metrics.counter("refused", route="", reason=error.reason).inc()
        body, status = error.body(), HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self._is_answering:
            self.transport.write(head.encode() + body)
        self.transport.close()


def bounded_heads(metrics: Metrics, head_s: float) -> Any:
    """What the server makes for every connection."""
    return partial(BoundedHeads, metrics=metrics, head_s=head_s)
