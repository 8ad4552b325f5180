"""One span for each answer, by OpenTelemetry's semantic conventions for generative AI, sent over OTLP/HTTP.

Guarantees: an answer waits for nothing here; a span that cannot be queued or delivered is counted (`spans_dropped`); no span
says what was asked or answered. Without `[gateway.traces]` nothing of OpenTelemetry is imported.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from actors.gateway.answering.in_flight import InFlight, SampledAnswer
from actors.gateway.config import TracesConfig
from infra.observe.metrics import Metrics
from schemas.errors import ConfigError

BATCH = 256
LINGER_S = 1.0
TIMEOUT_S = 5.0  # for one delivery, its repetitions included
END_S = 5.0  # at a stop, for what is queued


def open_spans(config: TracesConfig | None, metrics: Metrics) -> "Spans | None":
    """The sender of spans, None without a collector. Raises ConfigError if OpenTelemetry is not installed."""
    if config is None:
        return None
    try:
        return Spans(config, metrics)
    except ModuleNotFoundError as error:
        raise ConfigError(f"gateway.traces: needs {error.name}; install headrace[traces]") from error


class Spans:
    """Sends spans from the SDK's thread. It is the SDK's exporter, too, so that what is delivered is counted."""

    def __init__(self, config: TracesConfig, metrics: Metrics) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

        self._failure = SpanExportResult.FAILURE
        self._exporter: Any = OTLPSpanExporter(endpoint=config.endpoint, timeout=TIMEOUT_S)
        self._resource = Resource.create({"service.name": config.service})
        self._metrics = metrics
        self._limit = config.queue
        self._told = self._ended = 0  # each is written by one thread
        self._until_s = float("inf")
        batch = min(BATCH, config.queue)
        processor: Any = BatchSpanProcessor(self, config.queue, 1000 * LINGER_S, batch)  # type: ignore[arg-type]
        self._processor = processor

    @property
    def num_waiting(self) -> int:
        """Spans that are not delivered yet."""
        return self._told - self._ended

    def tell(self, in_flight: InFlight) -> None:
        for name, answer in zip(in_flight.answer_ids, in_flight.answers, strict=False):
            if self.num_waiting >= self._limit:
                self._metrics.counter("spans_dropped", reason="queue is full").inc()
                continue
            self._told += 1
            self._processor.on_end(make_span(in_flight, name, answer, self._resource))

    def close(self) -> None:
        """Send what is queued, for END_S; the rest is dropped."""
        self._until_s = time.monotonic() + END_S
        self._processor.shutdown()

    def export(self, spans: Sequence[Any]) -> Any:
        """Called by the SDK, in its thread."""
        result = self._exporter.export(spans) if time.monotonic() < self._until_s else self._failure
        if result is self._failure:
            self._metrics.counter("spans_dropped", reason="not delivered").inc(len(spans))
        else:
            self._metrics.counter("spans").inc(len(spans))
        self._ended += len(spans)
        return result

    def shutdown(self) -> None:
        """Called by the SDK once nothing more is to be sent."""
        self._exporter.shutdown()


def make_span(in_flight: InFlight, name: str, answer: SampledAnswer, resource: Any) -> Any:
    """The span of one answer. Its ids follow from those of the request and the answer."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    request, sampling = in_flight.request, in_flight.sampling
    operation = "text_completion" if request.prompt.chat is None else "chat"
    versions = tuple(dict.fromkeys(start.version for start in answer.starts))
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": name,
        "gen_ai.usage.input_tokens": len(in_flight.tokens),
        "gen_ai.usage.output_tokens": len(answer.tokens),
        "headrace.policy.versions": versions,
    }
    if answer.finish:
        attributes["gen_ai.response.finish_reasons"] = (answer.finish,)
    else:
        attributes["error.type"] = "engine" if in_flight.failed else "client_gone"
    if versions:
        attributes["headrace.policy.version"] = versions[0]
    if in_flight.session:
        attributes["gen_ai.conversation.id"] = in_flight.session
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return ReadableSpan(
        name=f"{operation} {request.model}",
        context=SpanContext(_id(in_flight.group, 16), _id(name, 8), is_remote=False, trace_flags=sampled),
        resource=resource,
        attributes=attributes,
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR if in_flight.failed else StatusCode.UNSET),
        start_time=in_flight.began_ns,
        end_time=time.time_ns(),
    )


def _id(name: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=size).digest(), "big")
