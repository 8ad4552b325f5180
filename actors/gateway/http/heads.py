"""What of a request the server's parser bounds by itself neither in bytes nor in time: its head, its trailers, and a body that
continues after its answer.

A client needs no key to send one.

Guarantees: a connection holds at most MAX_HEAD_BYTES and what comes in one piece of a head that is not whole, and no longer
than its time; nothing of a trailer is kept, and a request with one is refused; bytes that are neither head nor body are at
most as many; a request that goes on behind its answer gets LEFT_BYTES and the time of a head to end; a client that is refused
gets an error object, if no answer has begun, and is counted; no answer is cut off for what comes behind its request.
"""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from actors.gateway.errors import ApiError, bad
from actors.gateway.gone import GONE, Gone
from infra.observe.metrics import Metrics

MAX_HEAD_BYTES = 64 * 1024
LEFT_BYTES = 4 * 1024 * 1024  # so that a client that sends more than it may can read its answer first


class BoundedHeads(HttpToolsProtocol):
    """One connection. head_s: for a head, from its first byte on, and for the first byte of all."""

    def __init__(self, *args: Any, metrics: Metrics, head_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics = metrics
        self._head_s = head_s
        self._head_bytes = 0
        self._at: Literal["head", "body", "end"] = "head"
        self._unused_bytes = 0  # of a body's frame, since the last byte of the body itself
        self._left_bytes = 0
        self._trailer = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._gone = Gone(self.flow.resume_reading)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)
        self._gone.happen()

    def data_received(self, data: bytes) -> None:
        before = self._at
        self._unused_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._trailer:
            self._refuse_trailer()
        elif self._at == "head":
            self._in_head(len(data))
        elif self._at == "body":
            self._in_body(len(data))
        elif before == "end" and self._timer is None:
            self._wait()  # line ends before a head begin none

    def on_message_begin(self) -> None:
        """Of the parser: a head begins."""
        self._at, self._head_bytes = "head", 0
        super().on_message_begin()
        self.scope["extensions"] = {GONE: {"gone": self._gone}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the parser: a field, of the head or behind the body."""
        if self._at == "head":
            super().on_header(name, value)
        else:
            self._trailer = True

    def on_headers_complete(self) -> None:
        """Of the parser: the head is whole."""
        self._at, self._unused_bytes, self._left_bytes = "body", 0, 0
        self._wait_no_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Of the parser: some of the body."""
        self._unused_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Of the parser: the request is whole."""
        self._at = "end"
        self._wait_no_more()
        if not self._is_answering:
            self._wait()  # it was answered before it ended: uvicorn no longer watches the connection
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Of the server: an answer is whole."""
        if self._trailer and not self.transport.is_closing():
            self.pipeline.clear()
            self._refuse_trailer()
            return
        super().on_response_complete()
        if self._at == "body" and not self._is_answering and self._timer is None:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Of the server: what came is not HTTP."""
        self._refuse(bad(msg, code="not_http"), mute=self._is_answering)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _in_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._timer is None:
            self._wait()
        if self._head_bytes > MAX_HEAD_BYTES and self._is_answering:
            self.flow.pause_reading()  # until it has answered
        elif self._head_bytes > MAX_HEAD_BYTES:
            message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, code="request_too_large"))

    def _in_body(self, num_bytes: int) -> None:
        if not self._is_answering:
            self._left_bytes += num_bytes
            if self._left_bytes > LEFT_BYTES:
                self._refuse(
                    ApiError(413, "the request goes on behind its answer", code="request_too_large"), mute=True
                )
        elif self._unused_bytes > MAX_HEAD_BYTES and not self.pipeline:
            message = f"more than {MAX_HEAD_BYTES} bytes around a piece of the body"
            self._refuse(ApiError(431, message, code="request_too_large"), mute=self._has_begun)

    def _refuse_trailer(self) -> None:
        if self.pipeline:
            self.flow.pause_reading()  # until the request before it is answered
        else:
            self._refuse(bad("got trailers behind the body, expected none", code="trailers"), mute=self._has_begun)

    @property
    def _has_begun(self) -> bool:
        """Whether the answer to the newest request has."""
        return self.cycle is not None and bool(self.cycle.response_started)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._head_s, self._too_slow)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._is_answering:
            self._wait()
        else:
            message = f"the head of the request took longer than {self._head_s:g} s"
            self._refuse(ApiError(408, message, code="timeout"), mute=self._at != "head")

    def _refuse(self, error: ApiError, *, mute: bool = False) -> None:
        """Let go of the connection. mute: without a word, since one would be taken for part of an answer."""
        self._metrics.counter("refused", route="", reason=error.reason).inc()
        body, status = error.body(), HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not mute:
            self.transport.write(head.encode() + body)
        if self._is_answering:
            self.cycle.disconnected = True  # at once: nothing more is written behind this
            self.cycle.message_event.set()
            self._gone.happen()
        self.transport.close()


def bounded_heads(metrics: Metrics, head_s: float) -> Any:
    """What the server makes for every connection."""
    return partial(BoundedHeads, metrics=metrics, head_s=head_s)
