"""Clients as they are: the requests that SDKs and frameworks send with their defaults are answered."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.actors.gateway.gateway_rig import RunningGateway, engine, serving

FOLDER = Path(__file__).parent / "clients"
AGENTS = Path(sys.prefix) / "agents" / "bin" / "python"
RECORDED = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))}


def says_hello(prompt: tuple[int, ...]) -> list[int]:
    return [*b"Hello.", 256]


@pytest.mark.parametrize("requests", RECORDED.values(), ids=RECORDED)
async def test_recorded_requests_of_a_client_are_answered(tmp_path: Path, requests: list[dict[str, Any]]) -> None:
    async with serving(tmp_path, engine(says_hello)) as served:
        key = await served.new_key()
        last = ""
        async with served.http(key) as http:
            for request in requests:
                body = request["body"]
                if body.get("previous_response_id"):
                    body["previous_response_id"] = last
                answer = await http.post(request["path"], json=body, headers=request["headers"])
                assert answer.status_code == 200, answer.text
                last = answer.json().get("id", "") if not body.get("stream") else last


def run(served: RunningGateway, key: str, python: Path) -> dict[str, str]:
    found = subprocess.run(
        [python, "-I", FOLDER / "calls.py", served.url, key], capture_output=True, text=True, timeout=300
    )
    assert found.stdout, found.stderr
    return dict(json.loads(found.stdout.splitlines()[-1]))


@pytest.mark.full
@pytest.mark.parametrize("python", [Path(sys.executable), AGENTS], ids=["clients", "frameworks"])
async def test_live_clients_are_answered(tmp_path: Path, python: Path) -> None:
    async with serving(tmp_path, engine(says_hello)) as served:
        key = await served.new_key()
        assert await asyncio.to_thread(run, served, key, python) == {}
