"""A process that cannot end by itself is ended."""

import subprocess
import sys
import threading

from infra.roles.deadline import EXIT_STUCK, ends_within

HELD_LOOP = """
import asyncio
from infra.roles.deadline import ends_within

async def deaf():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main():
    with ends_within("the stop of it all", 0.2):
        async with asyncio.timeout(0.05):
            await deaf()

asyncio.run(main())
"""


def test_what_is_deaf_to_cancellation_is_ended_with_its_name_and_its_stacks() -> None:
    done = subprocess.run([sys.executable, "-c", HELD_LOOP], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_STUCK
    assert "the stop of it all did not end within 0.2 s" in done.stderr
    assert "in run_forever" in done.stderr


def test_a_block_that_ends_in_time_ends_nothing() -> None:
    expired: list[str] = []
    with ends_within("quick", 3600.0, lambda what, _: expired.append(what)):
        (timer,) = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    timer.join(10.0)
    assert not timer.is_alive() and expired == []
