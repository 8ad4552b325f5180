"""Metrics: one registry per role, served with a health check."""

import logging
import socket
import threading
import urllib.error
import urllib.request

import pytest

from infra.observe.metrics import MAX_CONNECTIONS, Metrics
from infra.observe.release import release
from schemas.errors import ConfigError


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_two_roles_in_one_process_do_not_share_values() -> None:
    one, other = Metrics("explore"), Metrics("explore")
    one.counter("tokens").inc(3)
    other.counter("tokens").inc(5)
    assert one.counters() == {"tokens": 3.0}
    assert other.counters() == {"tokens": 5.0}


def test_the_same_name_and_labels_are_the_same_series() -> None:
    metrics = Metrics("process")
    metrics.counter("dropped", reason="too short").inc()
    metrics.counter("dropped", reason="too short").inc(2)
    metrics.counter("dropped", reason="duplicate").inc()
    metrics.gauge("lag").set(7)
    metrics.histogram("step_s").observe(0.3)
    assert metrics.counters() == {"dropped{reason=too short}": 3.0, "dropped{reason=duplicate}": 1.0}
    assert metrics.gauges() == {"lag": 7.0}
    assert metrics.snapshot() == {**metrics.counters(), **metrics.gauges()}


def test_metrics_and_health_are_served_until_closed() -> None:
    metrics = Metrics("train")
    metrics.counter("steps").inc()
    state = {"fault": ""}
    metrics.check("loop", lambda: state["fault"])
    port = metrics.serve()
    try:
        status, text = fetch(port, "/metrics")
        assert status == 200
        assert "headrace_steps_total 1.0" in text
        assert fetch(port, "/healthz") == (200, "ok\n")
        state["fault"] = "no step for 120 s"
        assert fetch(port, "/healthz") == (503, "loop: no step for 120 s\n")
        assert fetch(port, "/else")[0] == 404
        with pytest.raises(ValueError, match="already served"):
            metrics.serve()
    finally:
        metrics.close()
    with pytest.raises(urllib.error.URLError):
        fetch(port, "/metrics")


def test_a_check_that_raises_is_a_fault() -> None:
    metrics = Metrics("train")
    metrics.check("disk", lambda: str(1 // 0))
    assert metrics.faults() == {"disk": "check raised ZeroDivisionError: integer division or modulo by zero"}


def test_an_address_that_is_taken_is_one_line_with_the_setting() -> None:
    first, second = Metrics("train"), Metrics("master")
    port = first.serve()
    try:
        with pytest.raises(
            ConfigError, match=rf"metrics.listen .* cannot listen on 127\.0\.0\.1:{port}: Address already in use"
        ):
            second.serve(port)
    finally:
        first.close()


def test_a_scrape_tells_the_process_and_the_release_and_progress_records_do_not() -> None:
    metrics = Metrics("train")
    shown = metrics.exposition().decode()
    for name in ("process_resident_memory_bytes ", "process_open_fds ", "process_cpu_seconds_total "):
        assert f"\n{name}" in shown
    assert f'headrace_build_info{{release="{release()}",role="train"}} 1.0' in shown
    assert metrics.snapshot() == {}


def test_every_sample_of_a_scrape_bears_the_app_and_reports_do_not() -> None:
    metrics = Metrics("train", "main")
    metrics.counter("dropped", reason="too short").inc()
    metrics.gauge("usual/ess").set(0.5)
    metrics.histogram("reload_pause_s").observe(0.2)
    samples = [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]
    assert len(samples) > 20 and all('app="main"' in line for line in samples)
    assert metrics.snapshot() == {"dropped{reason=too short}": 1.0, "usual/ess": 0.5}


def test_half_requests_hold_a_bounded_number_of_threads_and_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("train")
    port = metrics.serve()
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5 * MAX_CONNECTIONS)]
    try:
        for connection in silent:
            connection.sendall(b"GET /metrics HT")
        with caplog.at_level(logging.INFO):
            assert fetch(port, "/healthz") == (200, "ok\n")
        assert [connection for connection in silent[:-MAX_CONNECTIONS] if connection.recv(1)] == [], (
            "the oldest were ended"
        )
        assert threading.active_count() - before <= MAX_CONNECTIONS + 1
        for connection in silent:
            connection.close()
        assert not caplog.records
    finally:
        metrics.close()
