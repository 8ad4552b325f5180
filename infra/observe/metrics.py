"""Metrics of one role: a Prometheus registry of its own, served over HTTP with a health check.

Guarantees: names and labels are created on first use and never clash between roles in one process; `/healthz` answers
200 only while every registered check passes, and names the failing checks. `infra.observe.measures` has the names in Prometheus
and their meanings. Every sample has the label `app`, so that rules and dashboards distinguish the apps of one Prometheus.
"""

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from infra.observe.measures import HELP, PREFIX, Exposed, exposed
from infra.observe.release import release
from schemas.errors import ConfigError

# In the environment of one role: host:port, before metrics.listen of the file.
LISTEN_VARIABLE = "HEADRACE_METRICS_LISTEN"
REQUEST_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 16
MAX_REASONS, OTHER = 256, "other"  # a plugin may put numbers into its reasons
DEFAULT_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
Made = TypeVar("Made", Counter, Gauge, Histogram)

_log = logging.getLogger(__name__)


class Metrics:
    """Counters, gauges and histograms of one role.

    A name always takes the same label names. Safe to use from any thread. app: label of every sample that is served, ""
    for none.
    """

    def __init__(self, role: str, app: str = "") -> None:
        self.role = role
        self._app = {"app": app} if app else {}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, CPU, descriptors, under Prometheus' own names
        build = Gauge(f"{PREFIX}build_info", "1; which headrace runs", ["role", "release"], registry=self.registry)
        build.labels(role, release()).set(1)
        self._lock = threading.Lock()
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._known: dict[tuple[Any, ...], Counter | Gauge | Histogram] = {}  # by name and labels
        self._checks: dict[str, Callable[[], str]] = {}
        self._server: ThreadingHTTPServer | None = None

    def counter(self, name: str, **labels: str) -> Counter:
        """The counter `name` under these labels; `.inc(amount)` it."""
        return self._under(Counter, name, labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """The gauge `name` under these labels; `.set(value)` it."""
        return self._under(Gauge, name, labels)

    def histogram(self, name: str, *, buckets: Sequence[float] = DEFAULT_BUCKETS, **labels: str) -> Histogram:
        """The histogram `name` under these labels; `.observe(value)` it. The first call decides the buckets."""
        return self._under(Histogram, name, labels, buckets=buckets)

    def check(self, name: str, state: Callable[[], str]) -> None:
        """Have `/healthz` ask `state`: "" is healthy, any other text is the fault."""
        with self._lock:
            self._checks[name] = state

    def faults(self) -> dict[str, str]:
        """Present faults, by check; a check that raises is a fault."""
        with self._lock:
            checks = dict(self._checks)
        states: dict[str, str] = {}
        for name, state in checks.items():
            try:
                states[name] = state()
            except Exception as error:
                states[name] = f"check raised {type(error).__name__}: {error}"
        return {name: state for name, state in states.items() if state}

    def counters(self) -> dict[str, float]:
        """Value of every counter, as `name` or `name{label=value,…}`, for Progress records."""
        return self._values(Counter)

    def gauges(self) -> dict[str, float]:
        """Value of every gauge, named as `counters` are."""
        return self._values(Gauge)

    def exposition(self) -> bytes:
        text: bytes = generate_latest(_Renamed(self.registry, self._app))  # type: ignore[arg-type]
        return text

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve /metrics and /healthz from a daemon thread; returns the port (0 picks a free one). Raises ConfigError."""
        if self._server is not None:
            raise ValueError(f"already served on port {self._server.server_port}")
        try:
            self._server = _MetricsServer((host, port), _handler(self))
        except OSError as error:
            raise ConfigError(
                f"metrics.listen ({LISTEN_VARIABLE}): cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        threading.Thread(target=self._server.serve_forever, name="headrace-metrics", daemon=True).start()
        return self._server.server_port

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def _under(self, kind: type[Made], name: str, labels: dict[str, str], **more: Any) -> Made:
        """Metric with these labels, cached because the lookup is slow. more: further arguments of the family."""
        place = (name, *labels.items())
        made = self._known.get(place)
        if made is None:
            with self._lock:
                family = self._families.get(name)
                if family is None:
                    family = kind(PREFIX + name, name, list(labels), registry=self.registry, **more)
                    self._families[name] = family
            if labels.get("reason", OTHER) != OTHER and len(family._metrics) >= MAX_REASONS:
                if len(family._metrics) == MAX_REASONS:
                    _log.warning("reasons_together metric=%s: further reasons are counted as %s", name, OTHER)
                return self._under(kind, name, labels | {"reason": OTHER}, **more)
            made = self._known[place] = family.labels(**labels) if labels else family
        assert isinstance(made, kind)
        return made

    def _values(self, kind: type[Counter | Gauge]) -> dict[str, float]:
        values: dict[str, float] = {}
        for (name, *labels), made in list(self._known.items()):
            if isinstance(made, kind):
                shown = ",".join(f"{key}={value}" for key, value in sorted(labels))
                values[f"{name}{{{shown}}}" if shown else name] = made._value.get()
        return values


class _Renamed(Collector):
    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for family in self._registry.collect():
            is_own = family.name.startswith(PREFIX)  # those of the process keep their names
            shown = exposed(family.name.removeprefix(PREFIX)) if is_own else Exposed(family.name, {})
            help = HELP.get(shown.name, family.documentation)
            into = found.setdefault(shown.name, Metric(shown.name, help, family.type))
            for sample in family.samples:
                name = shown.name + sample.name.removeprefix(family.name)
                labels = {**self._labels, **sample.labels, **shown.labels}
                into.add_sample(name, labels, sample.value * shown.scale, sample.timestamp, sample.exemplar)
        yield from found.values()


class _MetricsServer(ThreadingHTTPServer):
    """At most MAX_CONNECTIONS threads: a new connection ends the oldest, so that silent clients keep nobody out."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[id(request)] = request
            oldest = self._open.pop(next(iter(self._open))) if len(self._open) > MAX_CONNECTIONS else None
        if oldest is not None:
            with suppress(OSError):  # it has ended
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):  # a client that left or was too slow is not news
            _log.warning("metrics_request_failed error=%r", error)


def _handler(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class MetricsHandler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, metrics.exposition())
            elif path == "/healthz":
                faults = metrics.faults()
                lines = [f"{name}: {fault}" for name, fault in sorted(faults.items())] or ["ok"]
                self._answer(503 if faults else 200, "text/plain; charset=utf-8", "\n".join(lines).encode() + b"\n")
            else:
                self._answer(404, "text/plain; charset=utf-8", b"expected /metrics or /healthz\n")

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not news."""

    return MetricsHandler
