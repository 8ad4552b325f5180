"""The release before, from git, is replaced role by role under traffic; and what it says when it is to come back."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.light_system import REPOSITORY, Fleet, LightSystem, Users, opened, prepare

pytestmark = pytest.mark.slow

# Where no release is tagged: the commit that began to keep what release 0.1.0 writes.
FIRST_RELEASE = "dc39883d7d27baae2f126a26dbe41f4e33063c99"
# Readers before writers, as `infra/docs/explanation/compatibility.md` says.
ORDER = ("process", "train", "explore", "serve", "serve", "master")
ALONE = ("train", "master")  # one of each writes: a newer one would fence the older out
PER_S = 4.0
BESIDE_S = 2.0  # old and new work side by side for so long at least


def git(*arguments: str) -> bytes:
    """What git says; empty where it cannot."""
    done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True)
    return done.stdout if done.returncode == 0 else b""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout of the newest tag behind this commit, else of FIRST_RELEASE."""
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD~1").decode().strip()
    archive = git("archive", tag or FIRST_RELEASE)
    if not archive:
        pytest.skip(f"git has no {tag or FIRST_RELEASE[:7]} here: a shallow clone, or no repository")
    folder = tmp_path_factory.mktemp("before")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    yield folder


async def upgraded(system: LightSystem, before: Path) -> list[str]:
    """Every role of the release before, then one after the other of this one; the exit codes that were not 0."""
    unclean: list[str] = []
    running = await asyncio.gather(*(system.start(before, role) for role in ORDER))
    users = asyncio.create_task(system.users.come(PER_S))
    rows = str(system.fleet.folder / "tasks.jsonl")
    loaded = await asyncio.to_thread(system.fleet.call, before, "load", "tasks", rows)
    assert loaded.returncode == 0, loaded.stderr
    await system.learned(2)
    for role, old in zip(ORDER, running, strict=True):
        if role in ALONE:
            code = await system.stop(old)
            await system.start(REPOSITORY, role)
        else:
            await system.start(REPOSITORY, role)
            await asyncio.sleep(BESIDE_S)
            code = await system.stop(old)
        if code:
            unclean.append(f"{role} of the release before ended with {code}")
    await system.learned(2)
    system.users.gone = True
    await users
    return unclean


def test_the_release_before_is_replaced_role_by_role_under_traffic_and_no_request_fails(
    kafka: str, before: Path, tmp_path: Path
) -> None:
    key = prepare(tmp_path, kafka, app="rolling")

    async def main(fleet: Fleet) -> tuple[list[str], dict[str, object]]:
        async with opened(tmp_path, kafka, "rolling", fleet, Users(key=key)) as system:
            unclean = await upgraded(system, before)
            await system.stop_all()
            return unclean, await system.judged()

    with Fleet(tmp_path) as fleet:
        made = fleet.call(before, "check", "--create")
        assert made.returncode == 0, made.stdout + made.stderr
        unclean, judged = asyncio.run(main(fleet))
        back = refused_back(fleet, before, tmp_path)
    assert unclean == []
    assert judged["failed"] == [] and judged["asked"], judged
    assert (judged["answers_lost"], judged["lost"], judged["trained_twice"]) == (0, 0, 0), judged
    assert judged["audit_clean"] and judged["trained"], judged
    assert back == "kafka.replication: unknown key"


def refused_back(fleet: Fleet, before: Path, folder: Path) -> str:
    """What the release before says of a setting that it does not know, without where it stands."""
    config = folder / "headrace.toml"
    config.write_text(config.read_text().replace("partitions = 2", "partitions = 2\nreplication = 1"))
    done = fleet.call(before, "check")
    assert done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    return said if "kafka.replication: unknown key" not in said else "kafka.replication: unknown key"
