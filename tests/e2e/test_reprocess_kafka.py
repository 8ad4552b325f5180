"""reprocess on a real broker: what Faust workers recorded, killed once, comes out the same to the bit."""

import asyncio
import json
import random
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.log.log import Log
from infra.settings.config import Floor
from schemas.topics import EXPERIENCES
from streams.reprocess.ranges import until_committed
from streams.reprocess.run import ReprocessOrder, plan, reprocess
from tests.e2e.stream_worker import worker_config
from tests.e2e.test_streams_kill import all_closed, crew, feed, opened, traffic

pytestmark = pytest.mark.full

SETTINGS = """
app = "{app}"
[kafka]
bootstrap_servers = "{kafka}"
partitions = 6
[[score]]
name = "exact"
use = "streams.scores.exact:exact"
[verify.filter]
min_tokens = {min_tokens}
[collect]
deadline_s = 3600
difficulty = {{ on = false }}
"""


def command(config: Path, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["reprocess", *arguments, "--json", "-c", str(config)])
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


async def all_committed(log: Log) -> None:
    """Until the workers have committed all that they were given."""
    for stage in ("verify", "collect"):
        behind = 1
        while behind:
            await asyncio.sleep(0.2)
            _, behind = await until_committed(log, stage, await plan(log, ReprocessOrder(stage=stage)))  # type: ignore[arg-type]


def test_what_workers_recorded_on_a_broker_comes_out_the_same_and_another_config_otherwise(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with opened(kafka, app_name, tmp_path / "work") as log:
            with crew(kafka, app_name, tmp_path / "work", 2) as workers:
                await feed(log, traffic(seed=7), 0.003)
                await asyncio.to_thread(workers.replace, random.Random(1).randrange(2), signal.SIGKILL, 1.0)
                await all_closed(log, workers)
                async with asyncio.timeout(60):  # what is delivered twice comes behind the last closure
                    await all_committed(log)
                workers.stop()
            stamp = next(iter((await log.bus.end_offsets(log.name(EXPERIENCES))).items()))
            assert stamp[1] > 0
            for stage, start in (
                ("verify", "beginning"),
                ("verify", "40"),
                ("collect", "beginning"),
                ("collect", "60"),
            ):
                order = ReprocessOrder(stage=stage, start=start, diff=True)  # type: ignore[arg-type]
                found = await reprocess(
                    log, order, await plan(log, order), Floor(app=app_name), worker_config(), lambda count: None
                )
                assert found.is_same and found.unrecorded == found.behind == 0, (stage, start, found)
                assert found.compared > 300

    asyncio.run(main())
    same, other = tmp_path / "same.toml", tmp_path / "other.toml"
    same.write_text(SETTINGS.format(app=app_name, kafka=kafka, min_tokens=2))
    other.write_text(SETTINGS.format(app=app_name, kafka=kafka, min_tokens=0))
    assert command(same, "verify", "--diff")["same"] is True
    changed = command(same, "verify", "--diff", "--with", str(other))
    (change,) = changed["changes"]  # type: ignore[misc]
    assert (change["kind"], change["reason"]) == ("no longer dropped", "too short")
    assert change["examples"][0]["new"] == "kept"
    letters = CliRunner().invoke(app, ["reprocess", "dead-letters", "--json", "-c", str(same)])
    assert letters.exit_code == 1 and json.loads(letters.stdout)["delivered"] == {}
