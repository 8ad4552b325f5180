"""The commands that decide what customers are served."""

import json
from pathlib import Path

import pytest

from infra.cli.console.versions import timeline
from infra.cli.govern.channel import check_move, check_stored, versions_and_stable
from infra.cli.govern.words import recent_words, words_about
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.beginning import LOOK
from infra.policies.fold import WINDOW
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import Directive, PolicyEvent, topics
from schemas.errors import ConfigError
from schemas.topics import POLICIES
from tests.infra.cli.test_commands_on_a_broker import call, config, printed, publish
from tests.infra.weights.test_publish import put_run
from tests.starts import CountingBus, store_records, summarize
from trainer.loop.prune import prune

__all__ = ["config"]  # a fixture


@pytest.mark.slow
def test_the_stable_channel_is_moved_by_hand_and_every_move_is_told(kafka: str, app_name: str, config: Path) -> None:
    store = DirectoryStore(config.parent / "store")
    events, _ = put_run(store, 6)
    publish(kafka, app_name, [(topics.POLICIES, events[version]) for version in (3, 5)])
    assert "nothing was promoted yet" in printed(config, "channel")
    result = call(config, "promote", "4")
    assert result.exit_code == 2 and "version 4: never published; the newest is 5" in result.stderr
    assert "nothing was promoted yet → version 5" in printed(config, "promote", "5", "--why", "looked at it")
    assert "version 5 → version 3 (pinned)" in printed(config, "pin", "3")
    assert "version 3 (pinned) → version 5" in printed(config, "unpin")
    result = call(config, "rollback", "5")
    assert result.exit_code == 2 and "below the stable version 5" in result.stderr
    assert "version 5 → version 3" in printed(config, "rollback", "3", "--why", "refuses too often")
    assert "learning is paused" in printed(config, "pause", "--why", "odd feedback")
    assert "odd feedback" in printed(config, "status")
    assert "learning continues" in printed(config, "resume")
    table = printed(config, "channel")
    assert [
        word in table
        for word in ("promoted", "pinned", "unpinned", "rolled back", "refuses too often", "pause", "odd feedback")
    ] == [True] * 7
    told = json.loads(printed(config, "channel", "--json"))
    assert (told["stable"], told["pinned"]) == (3, False)
    assert [item["event"] for item in told["decisions"]] == [
        "promoted", "pinned", "pinned", "rolled_back", "pause", "continue"
    ]  # fmt: skip
    store.delete(next(store.keys("policies/main/17/deltas/4-5/")))
    result = call(config, "promote", "5")
    assert result.exit_code == 2 and "version: 5 of main was published, but is not in the store" in result.stderr


async def test_a_version_that_an_overtaken_trainer_published_cannot_be_promoted() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    first = await log.publish(POLICIES, PolicyEvent(event="lease", policy="main"))
    await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=1, token=first.offset))
    second = await log.publish(POLICIES, PolicyEvent(event="lease", policy="main"))
    await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=2, token=first.offset))
    await log.publish(
        POLICIES, PolicyEvent(event="orphaned", policy="main", version=1, token=first.offset, reason="late")
    )
    versions, stable = await versions_and_stable(log, "main", 1)
    check_move(versions, stable, "promoted", 1)
    with pytest.raises(ConfigError, match="version 2: never published; the newest is 1"):
        check_move(versions, stable, "promoted", 2)
    await log.publish(POLICIES, PolicyEvent(event="published", policy="main", version=2, token=second.offset))
    check_move(*await versions_and_stable(log, "main", 2), "promoted", 2)


@pytest.mark.parametrize("tensors_only", [False, True])
def test_a_version_that_the_trainer_removed_cannot_be_served_and_one_that_it_kept_can(tensors_only: bool) -> None:
    store = MemoryStore()
    events, _ = put_run(store, 20)
    prune(store, "main", oldest=17, tensors_only=tensors_only)
    for event in events[:16]:
        with pytest.raises(ConfigError, match=f"version: {event.version} of main was .* not in the store any more"):
            check_stored(store, event)
    for event in events[16:]:
        check_stored(store, event)


async def test_the_stable_version_is_drawn_from_its_moves_and_not_from_decisions_that_moved_nothing() -> None:
    log = Log(MemoryBus(), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    orders = (("promoted", 1), ("pinned", 3), ("promoted", 5), ("promoted", 6), ("pinned", -1), ("rolled_back", 2))
    moves = [PolicyEvent(event=kind, policy="main", version=version, channel="stable") for kind, version in orders]
    late = PolicyEvent(event="promoted", policy="main", version=9, channel="stable", owner="gate", token=0)
    for record in (*moves, Directive(order="lease", owner="a later master"), late):
        await log.publish(POLICIES, record)
    assert [version for *_, version in timeline(await recent_words(log, "main"))["stable"]] == [1, 3, 6, 2]


LONG = 4 * LOOK
FEW = LOOK + WINDOW * 8


async def long_log(bus: CountingBus, versions: int = LONG) -> Log:
    """So many versions, of which ann promoted 7 at the end."""
    log = Log(bus, "t", store=MemoryStore())
    await log.create_topics(partitions=1, keep_ms=-1)
    events = [
        PolicyEvent(event="published", policy="main", version=version, manifest=f"m{version}", token=0)
        for version in range(versions)
    ]
    store_records(log, POLICIES, [PolicyEvent(event="lease", policy="main"), *events])
    await log.publish(POLICIES, PolicyEvent(event="promoted", policy="main", version=7, channel="stable", owner="ann"))
    summarize(log)
    return log


async def test_a_move_reads_policies_from_the_newest_summary_and_for_an_old_version_all_of_it() -> None:
    bus = CountingBus()
    log = await long_log(bus)
    for version, is_old in ((LONG - 1, False), (-1, False), (7, True), (LONG, False)):
        bus.read.clear()
        versions, stable = await versions_and_stable(log, "main", version)
        assert stable.version == 7 and (version in versions) == (0 <= version < LONG)
        assert (bus.read[log.name(POLICIES)] > LONG) == is_old
        assert is_old or bus.read[log.name(POLICIES)] <= 2 * FEW


async def test_what_is_said_of_late_versions_is_read_from_a_summary_before_them_and_is_the_end_of_the_whole() -> None:
    bus = CountingBus()
    log = await long_log(bus)
    whole = await recent_words(log, "main", at_least=None)
    bus.read.clear()
    late = await words_about(log, "main", LONG - 100)
    assert bus.read[log.name(POLICIES)] <= 2 * FEW
    recent = await recent_words(log, "main", at_least=2000)
    for words in (late, recent):
        assert not words.is_whole and whole.is_whole
        assert words.stable == whole.stable and words.events == whole.events[-len(words.events) :]
    assert LONG - 100 in {event.version for _, event in late.events}
    assert 2000 <= len(recent.events) < LONG
    assert (await words_about(log, "main", 7)).is_whole
