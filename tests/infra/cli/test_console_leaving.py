"""A console that gets a signal ends, at whatever moment of its start that comes."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from infra.cli.console.leaving import Leaving
from infra.ledger.archive import ABOUT, ArchiveHead, writing

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOMENTS = 20
HANGS_S = 120.0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_what_starts_though_its_cancellation_is_lost(number: signal.Signals) -> None:
    async def main() -> str:
        leaving = Leaving()
        answer = asyncio.get_running_loop().create_future()

        def both_at_once() -> None:  # the answer that is waited for, and the signal
            answer.set_result(None)
            os.kill(os.getpid(), number)

        asyncio.get_running_loop().call_soon(both_at_once)
        try:
            await answer
            while not leaving.is_asked:  # noqa: ASYNC110 (a signal sets no event)
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            pass  # as `asyncio.wait_for` does before Python 3.12
        try:
            leaving.check()
        except asyncio.CancelledError:
            return "ended"
        return "went on"

    assert asyncio.run(main()) == "ended"


def test_a_signal_that_came_before_there_were_pages_ends_the_server_at_once_and_a_later_one_what_comes_then() -> None:
    async def main() -> list[str]:
        ended: list[str] = []
        leaving = Leaving()
        with leaving.ending(lambda: ended.append("served")):
            assert not ended
            leaving.ask()
        assert ended == ["served"]
        with leaving.ending(lambda: ended.append("at once")):
            pass
        leaving.ask()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
        return ended

    assert asyncio.run(main()) == ["served", "at once", "cancelled"]


def archive_in(folder: Path) -> Path:
    file = folder / "run.archive"
    with writing(file) as archive:
        archive.add(
            ABOUT, msgspec.json.encode(ArchiveHead(settings={"app": "t", "policy": {"model": "x/y"}}, topics=()))
        )
        archive.close()
    return file


# Without the command's idle time, which a busy machine has none of.
PROGRAM = """
import asyncio, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as `main` does: a shell may have it ignored
print("began", file=sys.stderr, flush=True)
from infra.cli.console.serve import run_console
sys.exit(asyncio.run(run_console(pathlib.Path(sys.argv[1]), [], "127.0.0.1:0")))
"""


def started(file: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM, str(file)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.full
def test_a_console_ends_whenever_in_its_start_a_signal_comes(tmp_path: Path) -> None:
    file = archive_in(tmp_path)
    began_s = time.monotonic()
    with started(file) as console:
        assert console.stderr is not None
        link = next(line.split()[1] for line in console.stderr if line.startswith("console http"))
        assert httpx.get(link, follow_redirects=True, timeout=60).status_code == 200
        start_s = time.monotonic() - began_s
        console.send_signal(signal.SIGINT)
        console.communicate(timeout=HANGS_S)
    assert console.returncode == 0
    for moment in range(MOMENTS):
        number = SIGNALS[moment % 2]
        with started(file) as console:
            assert console.stderr is not None and console.stderr.readline() == "began\n"
            time.sleep(1.1 * start_s * moment / MOMENTS)
            console.send_signal(number)
            try:
                _, said = console.communicate(timeout=HANGS_S)
            finally:
                console.kill()
        # By the signal itself where it came before there was anything to end.
        assert console.returncode in (0, 130, -number), f"moment {moment}: {console.returncode}: {said}"
