"""Two processes of a role of which one is enough, started as two charts of one app would: the newer has it, the older ends."""

import asyncio
from pathlib import Path

import pytest

from infra.cli.exit_codes import FENCED_OUT
from tests.actors.rig import until
from tests.e2e.light_system import REPOSITORY, STARTS_S, Fleet, opened, prepare

pytestmark = pytest.mark.full


@pytest.mark.parametrize("role", ["master", "train"])
def test_a_role_that_is_taken_over_ends_with_a_line_and_a_code_of_its_own(
    role: str, kafka: str, app_name: str, tmp_path: Path
) -> None:
    key = prepare(tmp_path, kafka, app=app_name, dtype="float32")

    async def main(fleet: Fleet) -> None:
        async with opened(kafka, app_name, fleet, key) as system:
            older = await system.start(REPOSITORY, role)
            newer = await system.start(REPOSITORY, role)
            await until(lambda: older.watched.process.poll() is not None, seconds=STARTS_S)
            assert older.watched.process.returncode == FENCED_OUT
            assert older.said(r"^(headrace: .*(?:took lease|has taken over|took \d+).*)$"), older.log.read_text()[
                -2000:
            ]
            await fleet.kill(older)
            assert newer.watched.process.poll() is None
            assert await system.stop_all() == {}

    with Fleet(tmp_path) as fleet:
        made = fleet.call(REPOSITORY, "check", "--create")
        assert made.returncode == 0, made.stdout + made.stderr
        asyncio.run(main(fleet))
