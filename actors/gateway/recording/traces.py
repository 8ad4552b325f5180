"""One span for each answer, by the semantic conventions of OpenTelemetry for generative AI, sent over OTLP/HTTP.

    answer ─> Spans.tell ─> queue, bounded ─> [thread] ─> OTLP exporter ─> collector

Guarantees: an answer waits for nothing here; a span that cannot be queued or delivered is counted (`spans_dropped`); no span
says what was asked or answered. Without `[gateway.traces]` nothing of OpenTelemetry is imported.
"""

import contextlib
import hashlib
import logging
import queue
import threading
import time
from typing import Any

import msgspec

from actors.gateway.answering.in_flight import InFlight
from actors.gateway.config import TracesConfig
from infra.observe.metrics import Metrics
from schemas.errors import ConfigError

BATCH = 256
LINGER_S = 1.0
TIMEOUT_S = 10.0  # of one delivery, its repetitions included
END_S = 5.0
_log = logging.getLogger(__name__)


class AnswerSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One answer as a trace shows it.

    answer: its id. trace: of the request. began_ns, ended_ns: since the epoch. model: that was asked for. finish: ""
    for one that was broken off. failed: by the engine. chat: whether it was a conversation. input_tokens,
    output_tokens: of the prompt and the answer. versions: that sampled it. session: "" for none. max_tokens: as asked
    for, 0 for none. temperature, top_p: of the sampling.

    Example: AnswerSpan(answer="hr-a1b2.0-3-0", trace="a1b2.0-3", began_ns=1, ended_ns=2, model="main", finish="stop",
                        failed=False, chat=True, input_tokens=9, output_tokens=3, versions=(7, 8))
    """

    answer: str
    trace: str
    began_ns: int
    ended_ns: int
    model: str
    finish: str
    failed: bool
    chat: bool
    input_tokens: int
    output_tokens: int
    versions: tuple[int, ...]
    session: str = ""
    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0


def spans_of(in_flight: InFlight) -> list[AnswerSpan]:
    """One for each answer of a request that has ended."""
    request, now_ns = in_flight.request, time.time_ns()
    return [
        AnswerSpan(
            answer=named,
            trace=in_flight.group,
            began_ns=in_flight.began_ns,
            ended_ns=now_ns,
            model=request.model,
            finish=answer.finish,
            failed=in_flight.failed,
            chat=request.prompt.chat is not None,
            input_tokens=len(in_flight.tokens),
            output_tokens=len(answer.tokens),
            versions=tuple(dict.fromkeys(start.version for start in answer.starts)),
            session=in_flight.session,
            max_tokens=in_flight.sampling.max_tokens,
            temperature=in_flight.sampling.temperature,
            top_p=in_flight.sampling.top_p,
        )
        for named, answer in zip(in_flight.answer_ids, in_flight.answers, strict=False)
    ]


def open_spans(config: TracesConfig | None, metrics: Metrics) -> "Spans | None":
    """Where spans go, None for nowhere. Raises ConfigError where OpenTelemetry is not installed."""
    if config is None:
        return None
    try:
        return Spans(config, metrics)
    except ModuleNotFoundError as error:
        raise ConfigError(f"gateway.traces: needs {error.name}; install headrace[traces]") from error


class Spans:
    """Sends spans from a thread of its own."""

    def __init__(self, config: TracesConfig, metrics: Metrics) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._exporter: Any = OTLPSpanExporter(endpoint=config.endpoint, timeout=TIMEOUT_S)
        self._resource = Resource.create({"service.name": config.service})
        self._metrics = metrics
        self._queue: queue.Queue[AnswerSpan | None] = queue.Queue(config.queue)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send, name="traces", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Spans that are not on their way yet."""
        return self._queue.qsize()

    def tell(self, in_flight: InFlight) -> None:
        """Queue the spans of a request that has ended."""
        for span in spans_of(in_flight):
            try:
                self._queue.put_nowait(span)
            except queue.Full:
                self._metrics.counter("spans_dropped", reason="queue is full").inc()

    def close(self) -> None:
        """Send what is queued, for END_S at most; the rest is dropped."""
        self._ending.set()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)  # wakes it
        self._thread.join(END_S)
        self._exporter.shutdown()  # what it still tries to deliver, or has not tried, it gives up and counts
        self._thread.join(END_S)

    def _send(self) -> None:
        while not (self._ending.is_set() and self._queue.empty()):
            batch = self._batch()
            if not batch:
                continue
            try:
                delivered = self._exporter.export([as_otel(one, self._resource) for one in batch]).name == "SUCCESS"
            except Exception:  # its thread must outlive whatever an answer or a collector brings
                _log.exception("spans_not_sent")
                delivered = False
            if delivered:
                self._metrics.counter("spans").inc(len(batch))
            else:
                self._metrics.counter("spans_dropped", reason="not delivered").inc(len(batch))

    def _batch(self) -> list[AnswerSpan]:
        """What came within LINGER_S, BATCH at most."""
        batch: list[AnswerSpan] = []
        until_s = time.monotonic() + LINGER_S
        while len(batch) < BATCH and (left_s := until_s - time.monotonic()) > 0:
            try:
                span = self._queue.get(timeout=left_s)
            except queue.Empty:
                break
            if span is None:
                break
            batch.append(span)
        return batch


def as_otel(span: AnswerSpan, resource: Any) -> Any:
    """As OpenTelemetry's own span. Trace and span have ids that follow from those of the request and the answer."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    operation = "chat" if span.chat else "text_completion"
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": span.model,
        "gen_ai.request.max_tokens": span.max_tokens,
        "gen_ai.request.temperature": span.temperature,
        "gen_ai.request.top_p": span.top_p,
        "gen_ai.response.model": span.model,
        "gen_ai.response.id": span.answer,
        "gen_ai.usage.input_tokens": span.input_tokens,
        "gen_ai.usage.output_tokens": span.output_tokens,
        "headrace.policy.versions": span.versions,
    }
    if span.finish:
        attributes["gen_ai.response.finish_reasons"] = (span.finish,)
    else:
        attributes["error.type"] = "engine" if span.failed else "client_gone"
    if span.versions:
        attributes["headrace.policy.version"] = span.versions[0]
    if span.session:
        attributes["gen_ai.conversation.id"] = span.session
    return ReadableSpan(
        name=f"{operation} {span.model}",
        context=SpanContext(_id(span.trace, 16), _id(span.answer, 8), False, TraceFlags(TraceFlags.SAMPLED)),
        resource=resource,
        attributes=attributes,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.began_ns,
        end_time=span.ended_ns,
    )


def _id(name: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=size).digest(), "big")
