"""A real Prometheus for tests, from PATH; HEADRACE_REQUIRE_PROMETHEUS=1 turns its absence into a failure."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

STARTS_S = 60.0
SCRAPE_S = 1


def program() -> str:
    """Where `prometheus` lies; the test is skipped, or fails, where it is not."""
    found = shutil.which("prometheus")
    if found is None:
        if os.environ.get("HEADRACE_REQUIRE_PROMETHEUS") == "1":
            pytest.fail("HEADRACE_REQUIRE_PROMETHEUS=1, and there is none on PATH: apt-get install prometheus")
        pytest.skip("prometheus is not on PATH: apt-get install prometheus")
    return found


class Prometheus:
    """One that runs, by its HTTP API."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def get(self, path: str, **arguments: str) -> Any:
        """What it says under /api/v1; an error of its own is an assertion."""
        answer = (await self._http.get(f"/api/v1/{path}", params=arguments)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now: `metric` has the labels, `value` time and value."""
        found: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return found

    async def up(self) -> dict[str, str]:
        """Health of every target, by its address."""
        return {item["labels"]["instance"]: item["health"] for item in (await self.get("targets"))["activeTargets"]}

    async def alerts(self) -> dict[tuple[str, str], str]:
        """State of every alert that is not inactive, by its name and its label `role`."""
        found = (await self.get("alerts"))["alerts"]
        return {(item["labels"]["alertname"], item["labels"].get("role", "")): item["state"] for item in found}


def _written(folder: Path, rules: Path, job: str, targets: Sequence[str]) -> None:
    folder.mkdir()
    shutil.copy(rules, folder)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [rules.name],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
