"""A real Prometheus scrapes a real run, with the rules that are deployed: what dashboards and rules name is there, and a role
that is killed is an alert.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.observe.alarms import ALARMS
from infra.observe.measures import MEASURES
from tests.e2e.light_system import REPOSITORY, Fleet, LightSystem, opened, prepare
from tests.e2e.prometheus import Prometheus, program, scraping
from tests.e2e.users import BODY

pytestmark = pytest.mark.full

ROLES = ("master", "train", "process", "explore", "serve")
RULES = REPOSITORY / "infra" / "deploy" / "alerts.yml"
JOB = "pods"  # nothing of headrace in its name, as where pods are found by their annotations
PER_S = 4.0
WAITS_S = 120.0
QUERIES = [
    target["expr"]
    for path in sorted((REPOSITORY / "infra" / "deploy" / "dashboards").glob("*.json"))
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
]
NAMED = {
    name
    for text in (*QUERIES, *(entry.rule for entry in ALARMS))
    for name in re.findall(r"\b(?:headrace|process)_[a-z0-9_]+\b(?!\()", text)
}
# What a run of a minute, without an eval, without a fault and without anybody who waits, does not have.
NOT_YET = {
    "headrace_accuracy", "headrace_alarms_total", "headrace_canary_missing_seconds", "headrace_dead_letters_total",
    "headrace_episodes_cancelled_total", "headrace_episodes_failed_total", "headrace_evals_missed",
    "headrace_feedback_polls_failed_total", "headrace_feedback_topic_missing", "headrace_feedback_unread_total",
    "headrace_gate_decisions_total", "headrace_publication_waits_total",
    "headrace_gpu_memory_bytes", "headrace_gpu_memory_capacity_bytes", "headrace_mfu", "headrace_not_recorded_total",
    "headrace_policies_refused_total", "headrace_policy_fetch_failed_total", "headrace_policy_fetch_slow_total",
    "headrace_refused_total", "headrace_requests_failed_total", "headrace_rollbacks_total", "headrace_scores_absent_total",
    "headrace_shed_total", "headrace_spans_dropped_total", "headrace_step_failed_total", "headrace_steps_skipped_total",
}  # fmt: skip
assert NOT_YET <= NAMED
PARTS = ("", "_bucket", "_count", "_sum")  # of a histogram


async def settled(look: Any, wanted: Any) -> None:
    """Until `look` finds what is wanted; what it found last is in the error."""
    found = None
    try:
        async with asyncio.timeout(WAITS_S):
            while (found := await look()) != wanted:  # noqa: ASYNC110 (another process is looked at)
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"found {found}, expected {wanted}") from None


async def looked_at(prometheus: Prometheus, app: str) -> None:
    """That what is shown is there, and what is there is known and bears the app."""

    async def missing() -> set[str]:
        return {name for name in NAMED - NOT_YET if not await prometheus.query(f'{name}{{app="{app}"}}')}

    await settled(missing, set())
    for query in QUERIES:
        await prometheus.query(query.replace("$app", app))
    known = {f"{item.shown}{part}" for item in MEASURES for part in (PARTS if item.kind == "histogram" else ("",))}
    names: set[str] = set(await prometheus.get("label/__name__/values"))
    ours = {name.removesuffix("_created") for name in names if name.startswith("headrace_")}
    assert ours - known - {name.removesuffix("_total") for name in known} == {"headrace_build_info"}
    assert await prometheus.query(f'count({{job="{JOB}",app!="{app}",__name__=~"(headrace|process)_.*"}})') == []


async def streamed(gateway: str, key: str) -> None:
    """One answer in pieces: its first token is timed."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60) as http:
        answer = await http.post(f"{gateway}/v1/chat/completions", json={**BODY, "stream": True})
        assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text


async def killed(system: LightSystem, prometheus: Prometheus, role: str) -> None:
    """That a role's end is an alert for itself and for its role, and for no other."""
    (one,) = (item for item in system.fleet.running if item.role == role)
    target = address(one.log)
    await system.kill(one)
    health = {address(other.log): "up" for other in system.fleet.running} | {target: "down"}
    await settled(prometheus.up, health)

    async def about_roles() -> dict[tuple[str, str], str]:
        alerts = await prometheus.alerts()
        return {key: "raised" for key in alerts if key[0] in ("HeadraceRoleMissing", "HeadraceRoleSilent")}

    await settled(about_roles, {("HeadraceRoleMissing", role): "raised", ("HeadraceRoleSilent", role): "raised"})


def address(log: Path) -> str:
    """Where a role serves its metrics."""
    found = re.search(r"metrics_port=(\d+)", log.read_text())
    assert found is not None, log.read_text()
    return f"127.0.0.1:{found[1]}"


def test_prometheus_finds_every_metric_that_is_shown_and_raises_an_alert_where_a_role_is_killed(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    program()
    key = prepare(tmp_path, kafka, app=app_name, dtype="float32")

    async def main(fleet: Fleet) -> None:
        tasks = str(fleet.folder / "tasks.jsonl")
        async with opened(kafka, app_name, fleet, key) as system:
            loading = asyncio.create_task(asyncio.to_thread(fleet.call, REPOSITORY, "load", "tasks", tasks))
            running = await asyncio.gather(*(system.start(REPOSITORY, role) for role in ROLES))
            loaded = await loading
            assert loaded.returncode == 0, loaded.stderr
            targets = [address(item.log) for item in running]
            async with (
                scraping(tmp_path / "prometheus", RULES, JOB, targets) as prometheus,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(system.users.come(PER_S))
                await settled(prometheus.up, dict.fromkeys(targets, "up"))
                await streamed(system.users.gateways[0], key)
                await system.learned(2)
                await looked_at(prometheus, app_name)
                alerts = await prometheus.alerts()
                assert not [key for key in alerts if key[0] in ("HeadraceRoleMissing", "HeadraceRoleSilent")], alerts
                system.users.leave()
                await killed(system, prometheus, "process")
            assert await system.stop_all() == {}

    with Fleet(tmp_path) as fleet:
        made = fleet.call(REPOSITORY, "check", "--create")
        assert made.returncode == 0, made.stdout + made.stderr
        asyncio.run(main(fleet))
