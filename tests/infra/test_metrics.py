"""Metrics: one registry per role, served with a health check; and failpoints, which a table names."""

import ast
import errno
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from infra.observe.failpoint import POINTS, VARIABLE, check, parse, reach, write
from infra.observe.measures import HELP, MEASURES
from infra.observe.metrics import MAX_CONNECTIONS, MAX_REASONS, Metrics
from infra.observe.release import release
from schemas.errors import StoreError
from schemas.fields import CANARY_MISSING
from tests.own_sources import ROOT
from trainer.health import THRESHOLDS


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_health_are_served_until_closed() -> None:
    metrics = Metrics("train")
    metrics.counter("steps").inc()
    state = {"fault": ""}
    metrics.check("loop", lambda: state["fault"])
    port = metrics.serve()
    with closing(metrics):
        status, text = fetch(port, "/metrics")
        assert status == 200
        assert "headrace_steps_total 1.0" in text
        assert fetch(port, "/healthz") == (200, "ok\n")
        state["fault"] = "no step for 120 s"
        assert fetch(port, "/healthz") == (503, "loop: no step for 120 s\n")
        assert fetch(port, "/else")[0] == 404
        with pytest.raises(ValueError, match="already served"):
            metrics.serve()
    with pytest.raises(urllib.error.URLError):
        fetch(port, "/metrics")


def test_a_scrape_tells_the_process_and_the_release_and_progress_records_do_not() -> None:
    metrics = Metrics("train")
    shown = metrics.exposition().decode()
    for name in ("process_resident_memory_bytes ", "process_open_fds ", "process_cpu_seconds_total "):
        assert f"\n{name}" in shown
    assert f'headrace_build_info{{release="{release()}",role="train"}} 1.0' in shown
    assert metrics.counters() | metrics.gauges() == {}


def test_every_sample_of_a_scrape_bears_the_app_and_reports_do_not() -> None:
    metrics = Metrics("train", "main")
    metrics.counter("dropped", reason="too short").inc()
    metrics.gauge("usual/ess").set(0.5)
    metrics.histogram("request_s", route="/v1/chat/completions").observe(0.2)
    samples = [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]
    assert len(samples) > 20 and all('app="main"' in line for line in samples)
    assert metrics.counters() | metrics.gauges() == {"dropped{reason=too short}": 1.0, "usual/ess": 0.5}


def test_reasons_beyond_a_bound_are_counted_together(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("process")
    for words in range(MAX_REASONS + 3):
        metrics.counter("dropped", reason=f"only {words} words").inc()
    counters = metrics.counters()
    assert len(counters) == MAX_REASONS + 1 and counters["dropped{reason=other}"] == 3.0
    assert caplog.text.count("reasons_together metric=dropped") == 1


def test_half_requests_hold_a_bounded_number_of_threads_and_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("train")
    port = metrics.serve()
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5 * MAX_CONNECTIONS)]
    with closing(metrics):
        for connection in silent:
            connection.sendall(b"GET /metrics HT")
        with caplog.at_level(logging.INFO):
            assert fetch(port, "/healthz") == (200, "ok\n")
        assert [connection for connection in silent[:-MAX_CONNECTIONS] if connection.recv(1)] == [], (
            "the oldest were ended"
        )
        while (
            threading.active_count() - before > MAX_CONNECTIONS + 1
        ):  # threads whose connection was ended leave by and by
            time.sleep(0.01)
        for connection in silent:
            connection.close()
        assert not caplog.records


CALLS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "add": "counter", "set": "gauge"}
NAMES = {"CANARY_MISSING": CANARY_MISSING}
# Names that are put together: the values of a step, their worst so far, and the quantiles of reloads.
MADE = re.compile(r"\w+/\w+|mismatch_\w+_run|\w+_ms_p\d+")
INFRA = ("infra/chain", "infra/ledger", "infra/log", "infra/model", "infra/policies", "infra/roles", "infra/store")
ROLES = {"master", "explore", "process", "train", "serve"}


def counted() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Kind, name, labels and place of every metric that is named where it is counted."""
    for wing in ("actors", "streams", "trainer", *INFRA):
        for path in sorted((ROOT / wing).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                found = of_call(node)
                if found is not None:
                    yield *found, f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]


def of_call(node: ast.AST) -> tuple[str, str, tuple[str, ...]] | None:
    if not isinstance(node, ast.Call) or not node.args:
        return None
    first = next((one for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)), None)
    labels = tuple(sorted(one.arg for one in node.keywords if one.arg and one.arg not in ("buckets", "amount")))
    if isinstance(node.func, ast.Name) and node.func.id == "Stopwatch" and first is not None:
        return "counter", first.value, labels
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in CALLS:
        return None
    holder = ast.unparse(node.func.value)
    if node.func.attr in ("add", "set") and holder not in ("run.report", "self._report", "self.report", "self"):
        return None
    if isinstance(node.args[0], ast.Name) and node.args[0].id in NAMES:
        return CALLS[node.func.attr], NAMES[node.args[0].id], labels
    if first is None or first is not node.args[0] or not re.fullmatch(r"[a-z0-9_]+", first.value):
        return None
    return CALLS[node.func.attr], first.value, labels


def test_every_metric_of_the_code_is_in_the_table_and_no_other_is() -> None:
    table = {(one.kind, one.name, tuple(sorted(one.labels))) for one in MEASURES if not MADE.fullmatch(one.name)}
    code = {(kind, name, labels): place for kind, name, labels, place in counted()}
    assert {one: place for one, place in code.items() if one not in table} == {}
    assert table - code.keys() == set()


def test_names_are_as_prometheus_asks() -> None:
    """https://prometheus.io/docs/practices/naming"""
    for one in MEASURES:
        assert re.fullmatch(r"headrace_[a-z][a-z0-9_]*", one.shown)
        assert one.shown.endswith("_total") == (one.kind == "counter"), one.shown
        bare = one.shown.removesuffix("_total")
        assert not re.search(r"_(s|ms|us|mib|mb|kb|gb|minutes|hours|percent|counter|gauge|total)(_|$)", bare), bare
        for unit in ("seconds", "bytes"):
            assert unit not in bare or bare.endswith((f"_{unit}", f"_{unit}_run")), f"{bare}: the unit ends the name"
        assert one.roles == "all" or {*one.roles.split(", ")} <= ROLES, one
        assert one.meaning and not one.meaning.endswith("."), one
        assert {"job", "instance", "le", "quantile"}.isdisjoint(one.labels), one


def test_a_scrape_has_the_names_the_units_and_the_meanings_of_the_table() -> None:
    metrics = Metrics("train")
    metrics.gauge("usual/ess").set(0.5)
    metrics.gauge("live/ess").set(0.25)
    metrics.gauge("tokens_per_s").set(7)
    metrics.gauge("reload_pause_ms_p50").set(30)
    metrics.gauge("reload_pause_ms_p95").set(40)
    metrics.counter("dropped", reason="too short").inc(2)
    metrics.histogram("request_s", route="/v1/chat/completions").observe(0.2)
    lines = metrics.exposition().decode().splitlines()
    for line in (
        'headrace_step_ess{lane="usual"} 0.5',
        'headrace_step_ess{lane="live"} 0.25',
        "headrace_tokens_per_second 7.0",
        'headrace_recent_reload_pause_seconds{percentile="50"} 0.03',
        'headrace_recent_reload_pause_seconds{percentile="95"} 0.04',
        'headrace_dropped_total{reason="too short"} 2.0',
        'headrace_request_seconds_bucket{le="0.2",route="/v1/chat/completions"} 1.0',
        f"# HELP headrace_dropped_total {HELP['headrace_dropped']}",
    ):
        assert line in lines
    assert len([line for line in lines if line == "# TYPE headrace_step_ess gauge"]) == 1
    # Reports keep the short names: they lie in the log.
    assert metrics.gauges()["usual/ess"] == 0.5 and metrics.gauges()["tokens_per_s"] == 7.0


def test_every_value_with_a_threshold_is_in_the_table() -> None:
    assert {f"usual/{name}" for name in THRESHOLDS} <= {one.name for one in MEASURES}


CHECKOUT = Path(__file__).parents[2]
WINGS = ("infra", "streams", "actors", "trainer")


def test_every_name_in_the_table_stands_in_the_code_and_every_name_in_the_code_in_the_table() -> None:
    named = set()
    for path in [path for wing in WINGS for path in (CHECKOUT / wing).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("reach", "write_all") and isinstance(node.args[0], ast.Constant):
                named.add(node.args[0].value)
    assert named == {name for name in POINTS if not name.endswith("_send")}


def test_a_count_says_which_time_and_each_entry_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("store.write=kill@3") == ("store.write", "kill", 3)
    monkeypatch.setenv(VARIABLE, "store.before_rename=raise@2")
    check()
    reach("store.before_rename")
    with pytest.raises(StoreError, match=r"store\.before_rename"):
        reach("store.before_rename")
    reach("store.before_rename")
    monkeypatch.delenv(VARIABLE)
    check()


def test_a_full_disk_keeps_half_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "store.write=full")
    check()
    written: list[bytes | memoryview] = []
    with pytest.raises(OSError) as caught:
        write("store.write", b"12345678", written.append)
    assert caught.value.errno == errno.ENOSPC and written == [b"1234"]
    write("store.write", b"12345678", written.append)
    assert written[1:] == [b"12345678"]
    monkeypatch.delenv(VARIABLE)
    check()
