"""A role that is started before what it needs is there."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.cli.run.early import BEGIN_VARIABLE, early, until_begun
from infra.local.supervisor import Child

LIMIT_S = 60.0


def begun(load: object, stop: asyncio.Event) -> "asyncio.Task[None]":
    assert callable(load)
    return asyncio.create_task(until_begun(load, stop))


def test_a_role_that_is_not_started_early_begins_at_once_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BEGIN_VARIABLE, raising=False)
    loaded: list[int] = []
    asyncio.run(until_begun(lambda: loaded.append(1), asyncio.Event()))
    assert not loaded


def test_a_role_loads_while_it_waits_and_begins_once_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, loaded = tmp_path / "begin", threading.Event()
    child = early(Child(name="explore", argv=("explore",), log=tmp_path / "log", env={"A": "b"}), begin)
    assert child.env == {"A": "b", BEGIN_VARIABLE: str(begin)}
    monkeypatch.setenv(BEGIN_VARIABLE, child.env[BEGIN_VARIABLE])

    async def main() -> None:
        waiting = begun(loaded.set, asyncio.Event())
        assert await asyncio.to_thread(loaded.wait, LIMIT_S), "nothing is loaded before the file is there"
        assert not waiting.done()
        begin.touch()
        async with asyncio.timeout(LIMIT_S):
            await waiting

    asyncio.run(main())


def test_a_stop_ends_the_wait_and_what_cannot_be_loaded_is_left_to_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = tmp_path / "begin"
    monkeypatch.setenv(BEGIN_VARIABLE, str(begin))

    def fails() -> None:
        raise ImportError("no module vllm")

    async def main() -> None:
        stop = asyncio.Event()
        waiting = begun(fails, stop)
        stop.set()
        async with asyncio.timeout(LIMIT_S):
            await waiting
        begin.touch()
        await until_begun(fails, asyncio.Event())

    asyncio.run(main())


@pytest.mark.full
def test_a_role_that_waits_asks_for_nothing_and_ends_with_a_stop(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text('app = "a"\n[policy]\nmodel = "not there yet"\n[store]\nurl = "store"\n')
    command = [sys.executable, "-m", "infra.cli.main", "explore", "-c", str(config)]
    environment = {**os.environ, BEGIN_VARIABLE: str(tmp_path / "begin")}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "started role=explore" not in (line := process.stderr.readline()):
            assert line, "it ended before it waited"
        process.terminate()
        assert process.wait(LIMIT_S) == 0, "there is no model and no broker: one that begins ends with another code"
