"""The frame of a role's loops: its identity, deadlines, abandoned work."""

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.roles.identity import claim, fit_of, require_fit
from infra.roles.process import EXIT_STUCK, unless
from infra.settings.config import Floor
from infra.store.memory import MemoryStore
from schemas import Directive, PolicyEvent, topics
from schemas.errors import ConfigError

FLOOR = Floor(app="bot")


async def log_of(*events: PolicyEvent | Directive) -> Log:
    log = Log(MemoryBus(), "bot")
    await log.create_topics(partitions=1, keep_ms=-1)
    for event in events:
        await log.publish(topics.POLICIES, event)
    return log


def lease(owner: str = "train/1") -> PolicyEvent:
    return PolicyEvent(event="lease", policy="main", owner=owner)


def published(version: int) -> PolicyEvent:
    return PolicyEvent(
        event="published", policy="main", version=version, manifest=f"policies/main/0/manifests/{version}.json"
    )


async def test_what_was_claimed_fits_whatever_comes_behind_it_and_is_claimed_once() -> None:
    log, store = await log_of(lease()), MemoryStore()
    assert (await fit_of(log, store, FLOOR)).verdict == "unclaimed"
    await claim(log, store, FLOOR)
    await log.publish(topics.POLICIES, published(0))
    await claim(log, store, FLOOR)
    assert (await fit_of(log, store, FLOOR)).verdict == "fits"
    await require_fit(log, store, FLOOR)
    assert (await fit_of(await log_of(lease()), store, Floor(app="other"))).verdict == "unclaimed"


async def test_a_log_that_lost_its_data_is_told_also_where_it_was_never_claimed() -> None:
    store = MemoryStore()
    await claim(await log_of(lease()), store, FLOOR)
    with pytest.raises(
        ConfigError, match=r'belongs to the log .*, and the log of app "bot" is empty: .*headrace recover'
    ):
        await require_fit(await log_of(), store, FLOOR)
    older = MemoryStore()
    older.put("checkpoints/bot/000000000001-0/manifest.json", b"{}")
    assert (await fit_of(await log_of(), older, FLOOR)).verdict == "log lost"


async def test_a_store_of_another_log_is_told_also_where_that_has_outgrown_it() -> None:
    store = MemoryStore()
    await claim(await log_of(lease()), store, FLOOR)
    other = await log_of(lease("train/2"), *(published(version) for version in range(50)))
    with pytest.raises(ConfigError, match=r"belongs to the log .* is .*begun .*: "):
        await require_fit(other, store, FLOOR)


async def test_a_store_that_lost_what_the_log_names_is_told() -> None:
    log, store = await log_of(lease(), published(3), published(4)), MemoryStore()
    with pytest.raises(ConfigError, match=r"names policies/main/0/manifests/4\.json, which is not in"):
        await require_fit(log, store, FLOOR)
    store.put("policies/main/0/manifests/4.json", b"{}")
    assert (await fit_of(log, store, FLOOR)).verdict == "unclaimed", "an app of an earlier release"


@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_altered_bytes_are_never_taken_for_another_log_and_a_broken_object_is_written_again(
    at: int, flip: int, lasting: bool
) -> None:
    class Altering(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.alters = False

        def get(self, key: str) -> bytes:
            data = bytearray(super().get(key))
            if self.alters:
                data[at % len(data)] ^= flip
            self.alters = self.alters and lasting
            return bytes(data)

    async def body() -> None:
        log, store = await log_of(lease()), Altering()
        await claim(log, store, FLOOR)
        store.alters = True
        assert (await fit_of(log, store, FLOOR)).verdict in (("fits", "unclaimed") if lasting else ("fits",))
        await claim(log, store, FLOOR)
        store.alters = False
        assert (await fit_of(log, store, FLOOR)).verdict == "fits"

    asyncio.run(body())


HELD_LOOP = """
import asyncio
from infra.roles.process import ends_within

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


class Ended(Exception):
    """The awaited event came before the work ended."""


async def worked(release: asyncio.Event, let_go: list[str], fails: bool = False) -> str:
    try:
        await release.wait()
        return "done"
    finally:
        await asyncio.sleep(0)
        let_go.append("let go")
        if fails:
            raise OSError("in the middle of letting go")


@pytest.mark.parametrize("fails", [False, True])
async def test_work_that_is_overtaken_has_let_go_before_anybody_is_told(fails: bool) -> None:
    let_go: list[str] = []
    with pytest.raises(Ended):
        await unless(asyncio.sleep(0), worked(asyncio.Event(), let_go, fails), Ended)
    assert let_go == ["let go"]


async def test_whoever_is_cancelled_meanwhile_takes_the_work_along() -> None:
    let_go: list[str] = []
    waiting = asyncio.create_task(unless(asyncio.Event().wait(), worked(asyncio.Event(), let_go), Ended))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert let_go == ["let go"]
