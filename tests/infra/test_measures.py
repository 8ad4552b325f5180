"""The table of metrics is what the code counts, and what Prometheus reads of it is named as Prometheus asks."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from infra.observe.measures import HELP, MEASURES, Measure, exposed
from infra.observe.metrics import Metrics
from schemas.fields import CANARY_MISSING
from tests.own_sources import ROOT
from trainer.health import THRESHOLDS

CALLS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram", "add": "counter", "set": "gauge"}
NAMES = {"CANARY_MISSING": CANARY_MISSING}
# Names that are put together: the values of a step, their worst so far, and the quantiles of reloads.
MADE = re.compile(r"\w+/\w+|mismatch_\w+_run|\w+_ms_p\d+")
INFRA = ("infra/chain", "infra/ledger", "infra/log", "infra/model", "infra/policies", "infra/roles", "infra/store")
ROLES = {"master", "explore", "process", "train", "serve"}
BASE_UNITS = ("seconds", "bytes", "ratio", "info")


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
    code: dict[tuple[str, str, tuple[str, ...]], str] = {}
    for kind, name, labels, place in counted():
        code[kind, name, labels] = place
    assert {one: place for one, place in code.items() if one not in table} == {}
    assert table - code.keys() == set()


def test_a_name_and_a_meaning_stand_once_in_the_table() -> None:
    names = Counter((one.shown, one.shown_labels, exposed(one.name).labels.get("percentile")) for one in MEASURES)
    assert [name for name, count in names.items() if count > 1] == []
    families = Counter(exposed(one.name).name for one in MEASURES)
    assert [name for name, count in families.items() if count > 1] == [], "two kinds under one name"
    meanings = Counter((one.meaning, one.roles) for one in MEASURES if one.meaning not in ("of the newest step",))
    assert [one for one, count in meanings.items() if count > 1 and one[0] != "their size"] == []


@pytest.mark.parametrize("one", MEASURES, ids=lambda one: one.name)
def test_a_name_is_as_prometheus_asks(one: Measure) -> None:
    """https://prometheus.io/docs/practices/naming"""
    assert re.fullmatch(r"headrace_[a-z][a-z0-9_]*", one.shown)
    assert one.shown.endswith("_total") == (one.kind == "counter")
    bare = one.shown.removesuffix("_total")
    assert not re.search(r"_(s|ms|us|mib|mb|kb|gb|minutes|hours|percent|counter|gauge|total)(_|$)", bare)
    for unit in ("seconds", "bytes"):
        assert unit not in bare or bare.endswith((f"_{unit}", f"_{unit}_run")), "the unit ends the name"
    assert one.roles == "all" or {*one.roles.split(", ")} <= ROLES
    assert one.meaning and not one.meaning.endswith(".")
    assert {"job", "instance", "le", "quantile"}.isdisjoint(one.labels)


def test_a_scrape_has_the_names_the_units_and_the_meanings_of_the_table() -> None:
    metrics = Metrics("train")
    metrics.gauge("usual/ess").set(0.5)
    metrics.gauge("live/ess").set(0.25)
    metrics.gauge("tokens_per_s").set(7)
    metrics.gauge("reload_pause_ms_p50").set(30)
    metrics.gauge("reload_pause_ms_p95").set(40)
    metrics.counter("dropped", reason="too short").inc(2)
    metrics.histogram("reload_pause_s").observe(0.2)
    lines = metrics.exposition().decode().splitlines()
    for line in (
        'headrace_step_ess{lane="usual"} 0.5',
        'headrace_step_ess{lane="live"} 0.25',
        "headrace_tokens_per_second 7.0",
        'headrace_recent_reload_pause_seconds{percentile="50"} 0.03',
        'headrace_recent_reload_pause_seconds{percentile="95"} 0.04',
        'headrace_dropped_total{reason="too short"} 2.0',
        'headrace_reload_pause_seconds_bucket{le="0.2"} 1.0',
        f"# HELP headrace_dropped_total {HELP['headrace_dropped']}",
    ):
        assert line in lines
    assert len([line for line in lines if line == "# TYPE headrace_step_ess gauge"]) == 1
    # Reports keep the short names: they lie in the log.
    assert metrics.gauges()["usual/ess"] == 0.5 and metrics.gauges()["tokens_per_s"] == 7.0


def test_every_value_with_a_threshold_is_in_the_table() -> None:
    assert {f"usual/{name}" for name in THRESHOLDS} <= {one.name for one in MEASURES}
