"""The release before, from git, is replaced role by role under traffic; and what it says when it is to come back."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.rig import until
from tests.e2e.light_system import REPOSITORY, STARTS_S, Fleet, LightSystem, Running, opened, prepare

pytestmark = pytest.mark.full

# Where no release is tagged: the last commit whose policy manifests are of formats 1 and 2 only.
BEFORE = "6c50b93aaf19340e476526fddfa771c7f8d650f0"
# As the changelog says: who reads reports and versions before who writes them.
ORDER = ("master", "process", "explore", "serve", "train")
ALONE = ("train", "master")  # one of each writes: a newer one would fence the older out
PER_S = 4.0
BESIDE = 4  # answers that users get while old and new work side by side


def git(*arguments: str) -> bytes:
    """What git says; empty where it cannot."""
    done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True)
    return done.stdout if done.returncode == 0 else b""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the newest tag behind this commit, else of BEFORE."""
    wanted = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD~1").decode().strip() or BEFORE
    archive = git("archive", wanted)
    if not archive:
        pytest.skip(f"git has no {wanted} here: a shallow clone, or no repository")
    folder = tmp_path_factory.mktemp("before")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    yield folder


async def upgraded(system: LightSystem, before: Path) -> list[str]:
    """Every role of the release before, then one after the other of this one; what ended otherwise than it was asked to."""
    unclean: list[str] = []

    async def end(old: Running) -> None:
        if code := await system.stop(old):
            unclean.append(f"{old.role} of the release before ended with {code}: {old.log.read_text()[-1000:]}")

    tasks = str(system.fleet.folder / "tasks.jsonl")
    loading = asyncio.create_task(asyncio.to_thread(system.fleet.call, before, "load", "tasks", tasks))
    running = await asyncio.gather(*(system.start(before, role) for role in ORDER))
    loaded = await loading
    assert loaded.returncode == 0, loaded.stderr
    async with asyncio.TaskGroup() as group:
        group.create_task(system.users.come(PER_S))
        await system.learned(1)
        for old in running:
            if old.role in ALONE:
                await end(old)
                await system.start(REPOSITORY, old.role)
            else:
                await system.start(REPOSITORY, old.role)
                await system.users.answered(BESIDE)
                await end(old)
        # The first version of a lease is an anchor, in the format of before: only those after it are in the new one.
        await system.taken(await system.learned(2))
        system.users.leave()
    return unclean


async def refused_version(system: LightSystem, before: Path) -> str:
    """What an explorer of the release before says of the versions of this one."""
    old = system.fleet.start(before, "explore")
    await until(lambda: bool(old.said("(policy_refused)")) or old.watched.process.poll() is not None, seconds=STARTS_S)
    await system.fleet.kill(old)
    return old.said("(policy_refused .*)")


async def refused_setting(system: LightSystem, before: Path) -> str:
    """What the release before says of a setting that it does not know."""
    config = system.fleet.config.with_name("newer.toml")
    config.write_text(system.fleet.config.read_text().replace("partitions = 2", "partitions = 2\nreplication = 1"))
    done = await asyncio.to_thread(system.fleet.call, before, "check", config=config)
    assert done.returncode == 2
    return " ".join((done.stdout + done.stderr).split())


def test_the_release_before_is_replaced_role_by_role_under_traffic_and_no_request_fails(
    kafka: str, before: Path, app_name: str, tmp_path: Path
) -> None:
    # In float32 each version would be stored whole, in the format of before.
    key = prepare(tmp_path, kafka, app=app_name, dtype="bfloat16")

    async def main(fleet: Fleet) -> None:
        async with opened(kafka, app_name, fleet, key) as system:
            assert await upgraded(system, before) == []
            assert await system.stop_all() == {}
            judged, version, setting = await asyncio.gather(
                system.judged(), refused_version(system, before), refused_setting(system, before)
            )
            published = system.published
        assert (judged["failed"], judged["cut_off"]) == ([], 0) and judged["asked"], judged
        assert (judged["answers_lost"], judged["answers_stored_twice"]) == (0, 0), judged
        assert (judged["lost"], judged["trained_twice"], judged["audit_clean"]) == (0, 0, True), judged
        assert judged["trained"] and published == list(range(len(published))), "one run: the new trainer went on"
        assert "manifest: got format 4, expected 1 or 2: upgrade headrace here first" in version
        assert "kafka.replication: unknown key" in setting

    with Fleet(tmp_path) as fleet:
        for tree in (before, REPOSITORY):
            made = fleet.call(tree, "check", "--create")
            assert made.returncode == 0, made.stdout + made.stderr
        asyncio.run(main(fleet))
