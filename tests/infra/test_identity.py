"""A log and a store know each other: what belongs to another, or was lost, is one line that says what helps."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.roles.identity import Fit, claim, fault, fit_of, require_fit
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


def check(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(body())  # type: ignore[arg-type]


def test_what_was_claimed_fits_whatever_comes_behind_it_and_is_claimed_once() -> None:
    async def body() -> None:
        log, store = await log_of(lease()), MemoryStore()
        assert (await fit_of(log, store, FLOOR)).verdict == "unclaimed"
        await claim(log, store, FLOOR)
        await log.publish(topics.POLICIES, published(0))
        await claim(log, store, FLOOR)
        assert (await fit_of(log, store, FLOOR)).verdict == "fits"
        await require_fit(log, store, FLOOR)
        assert (await fit_of(await log_of(lease()), store, Floor(app="other"))).verdict == "unclaimed"

    check(body)


def test_two_empty_ones_are_new() -> None:
    async def body() -> None:
        assert (await fit_of(await log_of(), MemoryStore(), FLOOR)).verdict == "new"
        assert (await fit_of(Log(MemoryBus(), "bot"), MemoryStore(), FLOOR)).verdict == "new", "no topics yet"

    check(body)


def test_a_log_that_lost_its_data_is_told_also_where_it_was_never_claimed() -> None:
    async def body() -> None:
        store = MemoryStore()
        await claim(await log_of(lease()), store, FLOOR)
        with pytest.raises(
            ConfigError, match=r'belongs to the log .*, and the log of app "bot" is empty: .*headrace recover'
        ):
            await require_fit(await log_of(), store, FLOOR)
        older = MemoryStore()
        older.put("checkpoints/bot/000000000001-0/manifest.json", b"{}")
        assert (await fit_of(await log_of(), older, FLOOR)).verdict == "log lost"

    check(body)


def test_a_store_of_another_log_is_told_also_where_that_has_outgrown_it() -> None:
    async def body() -> None:
        store = MemoryStore()
        await claim(await log_of(lease()), store, FLOOR)
        other = await log_of(lease("train/2"), *(published(version) for version in range(50)))
        with pytest.raises(ConfigError, match=r"belongs to the log .* is .*begun .*: "):
            await require_fit(other, store, FLOOR)

    check(body)


def test_a_store_that_lost_what_the_log_names_is_told() -> None:
    async def body() -> None:
        log, store = await log_of(lease(), published(3), published(4)), MemoryStore()
        with pytest.raises(ConfigError, match=r"names policies/main/0/manifests/4\.json, which is not in"):
            await require_fit(log, store, FLOOR)
        store.put("policies/main/0/manifests/4.json", b"{}")
        assert (await fit_of(log, store, FLOOR)).verdict == "unclaimed", "an app of an earlier release"

    check(body)


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

    check(body)


def test_what_fits_has_no_fault() -> None:
    assert [fault(Fit(one), "bot", "store") for one in ("new", "unclaimed", "fits")] == ["", "", ""]  # type: ignore[arg-type]
