"""The process that keeps a console's indexes up, over a real broker."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from infra.cli.connect import connected
from infra.cli.console.access import ConsoleAccess
from infra.cli.console.keeping import IndexState, keep_apart, keeper_of
from infra.cli.console.serve import command_of, made
from infra.cli.settings import Settings, load_settings
from infra.local.idle_time import SMALL_SHARE
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.store.memory import MemoryStore
from schemas import Block, topics
from tests.infra.cli.console_rig import BROKER_TOML, LINK, live

pytestmark = pytest.mark.full


def keepers() -> dict[int, int]:
    """Processes of this one that keep indexes up, each with its scheduling policy."""
    found = {}
    for pid in Path("/proc/self/task").glob("*/children"):
        for child in map(int, pid.read_text().split()):
            if "infra.cli.console.keeping" in Path(f"/proc/{child}/cmdline").read_text():
                found[child] = os.sched_getscheduler(child)
    return found


def session_nice(pid: int) -> int | None:
    """How nice the session of a process is to others; None where the kernel does not share among sessions."""
    path = Path(f"/proc/{pid}/autogroup")
    return int(path.read_text().split()[-1]) if path.exists() else None


def test_a_session_with_another_process_in_it_keeps_its_place(tmp_path: Path) -> None:
    """As that of a shell, from which roles may have been started too."""
    program = "from infra.local.idle_time import take_idle_time as t; t(); print('done', flush=True); input()"
    both = f'sleep 60 | {sys.executable} -c "{program}"'
    with subprocess.Popen(["sh", "-c", both], stdout=subprocess.PIPE, text=True, start_new_session=True) as shell:
        try:
            assert shell.stdout is not None and shell.stdout.readline() == "done\n"
            assert session_nice(shell.pid) in (0, None)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_a_process_that_no_role_notices_keeps_the_index_up_and_one_that_dies_is_started_again(
    kafka: str, tmp_path: Path
) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(BROKER_TOML.format(app=uuid4().hex[:12], kafka=kafka))
    settings = load_settings(config)

    async def main() -> None:
        async with connected(settings, create=True) as log:
            await log.create_topics(partitions=1, keep_ms=-1)
            await log.publish(topics.EXPERIENCES, Block((live(0, "where is it", "here"),)))
            async with (
                made(
                    settings,
                    log,
                    tmp_path,
                    access=ConsoleAccess(MemoryStore(), LINK),
                    command=command_of(config, []),
                    address="127.0.0.1:1",
                    keeper=partial(keeper_of, command=command_of(config, [])),
                ) as (app, reading),
                httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client,
            ):
                await client.get("/enter", params={"link": LINK})

                async def found(text: str) -> bool:
                    return text in (await client.get("/answers", params={"text": text})).text.replace(
                        f'value="{text}"', ""
                    )

                async with asyncio.timeout(60):
                    while not await found("where is it"):  # noqa: ASYNC110 (a page tells no one)
                        await asyncio.sleep(0.1)
                ((pid, policy),) = keepers().items()
                assert policy == os.SCHED_IDLE and session_nice(pid) in (19, None)
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(60):
                    while "has ended with code -9" not in reading.kept.fault:  # noqa: ASYNC110 (as above)
                        await asyncio.sleep(0.01)
                await log.publish(topics.EXPERIENCES, Block((live(1, "and now", "no"),)))
                async with asyncio.timeout(60):
                    while not await found("and now") or reading.kept.fault:  # noqa: ASYNC110 (as above)
                        await asyncio.sleep(0.1)
                assert keepers().keys().isdisjoint({pid})
        assert not keepers()

    asyncio.run(main())


def test_what_breaks_in_the_keeping_of_the_index_ends_the_console_by_that_very_error(tmp_path: Path) -> None:
    async def main() -> None:
        log = Log(MemoryBus(), "t", store=MemoryStore())  # its topics were never made, which no page can wait for
        settings = Settings(app="t", folder=tmp_path)
        access = ConsoleAccess(MemoryStore(), LINK)
        async with asyncio.timeout(30):
            async with made(settings, log, tmp_path, access=access, command=(), address="127.0.0.1:1"):
                await asyncio.Event().wait()

    with pytest.raises(ValueError, match="create it first"):
        asyncio.run(main())


def test_a_keeper_that_says_what_nobody_understands_is_ended_said_and_started_again(tmp_path: Path) -> None:
    said = tmp_path / "said"
    keeper = tmp_path / "keeper.py"
    keeper.write_text(
        "import pathlib, sys\n"
        f"with pathlib.Path({str(said)!r}).open('a') as file: file.write('x')\n"
        "print('what?', flush=True)\nsys.stdin.read()\n"
    )

    async def main() -> None:
        kept = IndexState()
        keeping = asyncio.create_task(keep_apart((sys.executable, str(keeper)), kept, asyncio.Event()))
        async with asyncio.timeout(60):
            while not (said.exists() and len(said.read_text()) > 1):
                assert not keeping.done()
                await asyncio.sleep(0.05)
        assert "has ended with code 0" in kept.fault
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping

    asyncio.run(main())


def test_every_thread_of_the_pages_takes_a_small_share_of_a_busy_machine_and_is_not_starved(
    kafka: str, tmp_path: Path
) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(BROKER_TOML.format(app=uuid4().hex[:12], kafka=kafka))

    async def publish() -> None:
        async with connected(load_settings(config), create=True) as log:
            await log.create_topics(partitions=1, keep_ms=-1)
            await log.publish(topics.EXPERIENCES, Block((live(0, "where is it", "here"),)))

    asyncio.run(publish())
    command = [sys.executable, "-m", "infra.cli.main", "console", "-c", str(config), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as console:
        try:
            assert console.stderr is not None
            link = next(line.split()[1] for line in console.stderr if line.startswith("console http"))
            with httpx.Client(follow_redirects=True, timeout=60) as client:
                assert client.get(link).status_code == 200
                assert client.get(link.partition("/enter")[0] + "/answers?text=where").status_code == 200
            threads = [int(task.name) for task in Path(f"/proc/{console.pid}/task").iterdir()]
            assert len(threads) > 1 and {os.sched_getscheduler(one) for one in threads} == {os.SCHED_OTHER}
            assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {SMALL_SHARE}
            assert session_nice(console.pid) in (SMALL_SHARE, None)
        finally:
            console.send_signal(signal.SIGINT)
            console.communicate(timeout=60)
