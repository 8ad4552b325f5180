"""The events of `policies`: the channels that follow from them alone, and summaries that stand for all records below them."""

import logging
from collections.abc import Sequence
from typing import get_args

import msgspec
import pytest
from hypothesis import event as noted
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from infra.log.bus import Partition, Record
from infra.log.log import Log, LogMessage
from infra.policies.beginning import LOOK, folded, newest_summary, write_summary
from infra.policies.fold import (
    MASTERS,
    WINDOW,
    PoliciesFold,
    PolicyFeed,
    Stable,
    Summary,
    fenced,
    is_overtaken,
    moved,
    published,
)
from infra.store.memory import MemoryStore
from schemas import Directive, PolicyEvent
from schemas.fields import Channel, DirectiveKind, PolicyEventKind
from schemas.topics import POLICIES
from tests.infra.test_seal import AwayStore
from tests.starts import CountingBus, summarize
from trainer.loop.publication import SUMMARIZE_EVERY

NAMES = ("main", "reward")
Said = Directive | PolicyEvent


def message(offset: int, said: Said) -> LogMessage:
    return LogMessage(Record("t.policies", 0, offset, offset, b"", repr(said).encode()), value=said)


def fold_all(said: Sequence[Said], since: Summary | None = None, window: int = WINDOW) -> PoliciesFold:
    fold = PoliciesFold(since, window=window)
    for offset, one in enumerate(said):
        fold.take(message(offset, one))
    return fold


def feed_of(
    said: Sequence[Said], policy: str = "main", since: Summary | None = None, channel: Channel = "candidate"
) -> PolicyFeed:
    feed = PolicyFeed(policy, channel=channel, since=None if since is None else since.of(policy))
    for offset, one in enumerate(said):
        if since is not None and offset < since.below:
            continue
        if isinstance(one, Directive):
            feed.fence(one, offset)
        else:
            feed.apply(one, offset)
    return feed


# Also what no role would write: numbers used twice, tokens that nobody holds, moves to versions that are not there.
versions = st.integers(0, 9)
directives = st.sampled_from(get_args(DirectiveKind)).map(lambda order: Directive(order=order))
events = st.builds(
    PolicyEvent, event=st.sampled_from(get_args(PolicyEventKind) + ("published",) * 9),
    policy=st.sampled_from((*NAMES, "main", "main")), version=versions, token=st.sampled_from((0, 10, 20, 99, 99, 99)),
    manifest=st.sampled_from(("", "m", "n", "o")), channel=st.sampled_from(get_args(Channel)),
    owner=st.sampled_from(("gate", "ann", "train/1")),
)  # fmt: skip
histories = st.lists(events | events | events | directives, min_size=20, max_size=40)
thoroughly = settings(max_examples=200)


@thoroughly
@given(
    said=histories,
    cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    window=st.integers(1, 4),
    channel=st.sampled_from(get_args(Channel)),
    held=st.integers(-1, 9),
    pinned=st.frozensets(versions, max_size=2),
    refused=st.frozensets(versions, max_size=3),
)
def test_an_engine_that_begins_with_a_summary_loads_what_one_loads_that_read_everything(
    said: list[Said],
    cuts: tuple[int, int],
    window: int,
    channel: Channel,
    held: int,
    pinned: frozenset[int],
    refused: frozenset[int],
) -> None:
    first, second = sorted(cuts)
    summary = fold_all(said[:first], window=window).summary()
    stored = msgspec.msgpack.encode(fold_all(said[:second], summary, window).summary())
    summary = msgspec.msgpack.decode(stored, type=Summary)
    for policy in (*NAMES, "a policy of which nothing was said"):
        whole, short = feed_of(said, policy, None, channel), feed_of(said, policy, summary, channel)
        assert (short.stable, short.newest) == (whole.stable, whole.newest)
        assert not whole.lacks(held, pinned=pinned, refused=refused)
        if short.lacks(held, pinned=pinned, refused=refused):
            noted("reads everything")
            continue
        noted(f"known from {min(summary.of(policy).known_from, 1)}")
        wanted = whole.next(held, pinned=pinned, refused=refused)
        got = short.next(held, pinned=pinned, refused=refused)
        assert got == wanted


def weights(kind: PolicyEventKind, number: int) -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=number, manifest="m")


@thoroughly
@example(said=[weights("published", 0), weights("rolled_back", 1)], cuts=(0, 2), window=1)
@given(said=histories, cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)), window=st.integers(1, 4))
def test_a_trainer_that_begins_with_a_summary_knows_what_one_knows_that_read_everything(
    said: list[Said], cuts: tuple[int, int], window: int
) -> None:
    first, second = sorted(cuts)
    summary = fold_all(said[:first], window=window).summary()
    summary = fold_all(said[:second], summary, window).summary()
    numbered = [(offset, one) for offset, one in enumerate(said) if isinstance(one, PolicyEvent)]
    for policy in NAMES:
        since = summary.of(policy)
        whole = published(numbered, policy)
        short = published([(offset, one) for offset, one in numbered if offset >= summary.below], policy, since)
        assert {version: one for version, one in short.items() if version >= since.known_from} == {
            version: one for version, one in whole.items() if version >= since.known_from
        }
        assert max(short, default=-1) == max(whole, default=-1), "no number is given out again"
    orders = [one.order for one in said if isinstance(one, Directive) and one.is_of_learning]
    assert fold_all(said, summary).learning == (orders[-1] if orders else "")


def version(number: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="main", version=number, manifest=f"m/{number}")


def test_a_summary_holds_the_newest_versions_and_those_that_are_served_and_no_others() -> None:
    said: list[Said] = [version(number) for number in range(1000)]
    for kind, number, channel in (("promoted", 7, "stable"), ("promoted", 40, "canary")):
        said.append(PolicyEvent(event=kind, policy="main", version=number, channel=channel, owner="ann"))  # type: ignore[arg-type]
    summary = fold_all([*said[:7], *said[-2:], *said[7:1000]]).summary().of("main")
    assert summary.known_from == 1000 - WINDOW
    summary = fold_all(said[:40]).summary().of("main")
    assert (summary.known_from, len(summary.events)) == (0, 40)
    fold = fold_all(said)
    assert list(fold.summary().of("main").events) == list(range(1000 - WINDOW, 1000))
    feed = feed_of(said, since=fold.summary(), channel="stable")
    assert feed.lacks(999, pinned=(), refused=()), "version 7 was promoted long after it was published"
    early = [*said[:50], said[1000], said[1001], *said[50:1000]]
    kept = fold_all(early).summary()
    assert list(kept.of("main").events)[:2] == [7, 40]
    channels: tuple[tuple[Channel, int], ...] = (("stable", 7), ("canary", 40))
    for channel, number in channels:
        feed = feed_of(early, since=kept, channel=channel)
        assert not feed.lacks(999, pinned=(), refused=())
        event = feed.next(999, pinned=(), refused=())
        assert event is not None and (event.version, event.manifest) == (number, f"m/{number}")


def test_who_begins_with_a_summary_reads_everything_only_for_what_is_not_in_it() -> None:
    said: list[Said] = [version(number) for number in range(200)]
    feed = feed_of(said, since=fold_all(said).summary())
    assert not feed.lacks(-1, pinned=(), refused=())
    assert not feed.lacks(-1, pinned=(199 - WINDOW // 2,), refused=(199,))
    assert feed.lacks(-1, pinned=(3,), refused=())
    assert not feed.lacks(3, pinned=(3,), refused=())
    assert not feed.lacks(-1, pinned=(3,), refused=(3,))
    assert feed.lacks(-1, pinned=(), refused=range(200 - WINDOW, 200))


LONG = 3 * LOOK


class Rig:
    """A log in memory, of which is counted what is read."""

    def __init__(self) -> None:
        self.bus = CountingBus()
        self.store = MemoryStore()
        self.log = Log(self.bus, "t", store=self.store)
        self.name = self.log.name(POLICIES)

    @property
    def records(self) -> list[Record]:
        return self.bus.log(Partition(self.name, 0)).records

    async def says(self, count: int) -> None:
        """So many versions more, each followed by a word of a person, and the summaries of a trainer."""
        first = len(self.records) // 2
        for number in range(first, first + count // 2):
            await self.log.publish(POLICIES, version(number))
            held = PolicyEvent(event="held", policy="main", version=number, channel="stable", owner="ann")
            await self.log.publish(POLICIES, held)
        summarize(self.log)

    async def reads(self) -> int:
        """Records that a start reads."""
        self.bus.read.clear()
        await folded(self.log)
        return self.bus.read.get(self.name, 0)

    def summaries(self, kind: str = "parts") -> list[str]:
        """Keys in the store, oldest first."""
        return sorted(self.store.keys(f"snapshots/t/policies/{kind}/"))


async def new_rig() -> Rig:
    rig = Rig()
    await rig.log.create_topics(partitions=1, keep_ms=-1)
    return rig


async def whole(log: Log) -> Summary:
    fold = PoliciesFold()
    async for message in log.scan(POLICIES):
        fold.take(message)
    return fold.summary()


async def test_a_start_reads_no_more_of_policies_however_long_the_app_has_lived() -> None:
    rig = await new_rig()
    read = []
    for _ in range(6):
        await rig.says(LONG)
        assert (await folded(rig.log)).summary() == await whole(rig.log)
        read.append(await rig.reads())
    assert max(read) <= LOOK + 1 + SUMMARIZE_EVERY + 2


async def test_a_damaged_summary_is_said_and_the_one_before_it_taken(caplog: pytest.LogCaptureFixture) -> None:
    rig = await new_rig()
    await rig.says(LONG)
    newest = await newest_summary(rig.log)
    rig.store.put(rig.summaries()[-1], b"damaged")
    before = await newest_summary(rig.log)
    assert newest is not None and before is not None and before.below < newest.below
    assert (await folded(rig.log)).summary() == await whole(rig.log)
    assert "policies_summary_not_used" in caplog.text and "damaged" in caplog.text


@pytest.mark.parametrize("store", [None, MemoryStore(), AwayStore(away=True)])
async def test_where_the_store_has_no_summary_all_is_read(
    store: MemoryStore | None, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await new_rig()
    await rig.says(LONG)
    log = Log(rig.bus, "t", store=store)
    with caplog.at_level(logging.INFO):
        assert (await folded(log)).summary() == await whole(rig.log)
    assert ("policies_read_whole" in caplog.text) == (store is not None)


def lost(records: Sequence[Record], at: int) -> list[Record]:
    """The log without its records from there on, and with others in their places."""
    kept = list(records[:at])
    lease = msgspec.structs.replace(records[at], timestamp_ms=records[at].timestamp_ms + 1)
    return [*kept, *(msgspec.structs.replace(lease, offset=at + number) for number in range(LOOK))]


async def test_a_summary_of_records_that_the_log_lost_counts_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = await new_rig()
    await rig.says(LONG)
    ahead = (await folded(rig.log)).summary()
    write_summary(rig.store, "t", ahead)
    for key in rig.summaries("manifests")[:-1]:
        rig.store.delete(key)
    rig.bus.restore(rig.name, lost(rig.records, ahead.below - 100))
    assert await newest_summary(rig.log) is None
    assert "made of another log" in caplog.text
    rig.bus.restore(rig.name, rig.records[: ahead.below - 50])
    assert await newest_summary(rig.log) is None
    now = (await folded(rig.log)).summary()
    assert now == await whole(rig.log)
    write_summary(rig.store, "t", now)
    assert await newest_summary(rig.log) == now, "the summary ahead of the log is gone"


async def test_records_below_a_place_are_folded_up_to_it() -> None:
    rig = await new_rig()
    await rig.says(LONG)
    await rig.log.publish(POLICIES, Directive(order="pause"))
    stop = LONG - 300
    fold = await folded(rig.log, stop=stop)
    assert (fold.next_offset, fold.of("main").newest, fold.learning) == (stop, (stop - 1) // 2, "")
    assert (await folded(rig.log)).learning == "pause"


async def test_a_reader_that_needs_an_older_version_begins_with_an_older_summary() -> None:
    rig = await new_rig()
    await rig.says(4 * LONG)
    wanted = 3 * LONG // 2
    found = await newest_summary(rig.log, fits=lambda summary: summary.of("main").known_from <= wanted)
    newest = await newest_summary(rig.log)
    assert found is not None and newest is not None
    assert found.of("main").known_from <= wanted < newest.of("main").known_from
    assert found.below > wanted


def after(*moves: tuple[PolicyEventKind, int], policy: str = "main") -> Stable:
    stable = Stable()
    for kind, version in moves:
        stable = moved(stable, PolicyEvent(event=kind, policy=policy, version=version, channel="stable"), "main")
    return stable


def test_a_pin_holds_against_promotions_and_its_end_goes_to_the_newest_promoted() -> None:
    pinned = after(("promoted", 4), ("pinned", 3), ("promoted", 7))
    assert (pinned.version, pinned.pinned) == (3, True)
    free = after(("promoted", 4), ("pinned", 3), ("promoted", 7), ("pinned", -1))
    assert (free.version, free.pinned) == (7, False)


def test_a_rollback_ends_a_pin_and_forgets_what_was_promoted_above_it() -> None:
    assert after(("promoted", 4), ("promoted", 7), ("rolled_back", 4)) == Stable(4, 4)
    assert after(("promoted", 7), ("pinned", 7), ("rolled_back", 4), ("pinned", -1)).version == 4
    assert not after(("promoted", 7), ("pinned", 7), ("rolled_back", 4)).pinned


def decided(token: int, kind: PolicyEventKind, version: int, owner: str = "gate") -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=version, channel="stable", owner=owner, token=token)


def lease(stable: Stable, offset: int) -> Stable:
    return fenced(stable, Directive(order="lease", owner="master"), offset)


@pytest.mark.parametrize("owner", sorted(MASTERS))
def test_what_an_overtaken_master_decides_moves_nothing_also_before_a_later_one_has_decided(owner: str) -> None:
    stable = moved(lease(Stable(), 0), decided(0, "promoted", 7, owner), "main")
    assert stable.version == 7
    twice = lease(lease(stable, 5), 9)
    for token in (0, 5):
        for late in (decided(token, "promoted", 8, owner), decided(token, "rolled_back", 2, owner)):
            assert is_overtaken(twice, late)
            assert moved(twice, late, "main") == twice
    assert moved(twice, decided(9, "promoted", 8, owner), "main").version == 8
    assert moved(twice, decided(0, "rolled_back", 2, "ann"), "main").version == 2, "what a person says always holds"


@given(
    st.lists(
        st.tuples(st.sampled_from(["published", "lease", "orphaned", "held", "promoted"]), st.integers(-1, 50)),
        max_size=30,
    )
)
def test_other_policies_and_the_candidate_channel_move_nothing(moves: list[tuple[PolicyEventKind, int]]) -> None:
    assert after(*moves, policy="other") == Stable()
    stable = Stable()
    for kind, version in moves:
        stable = moved(stable, PolicyEvent(event=kind, policy="main", version=version), "main")
    assert stable == Stable()


def canary(kind: PolicyEventKind, version: int) -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=version, channel="canary", owner="canary", token=1)


def test_only_a_promotion_in_the_canary_channel_begins_a_trial_and_it_moves_nothing_else() -> None:
    stable = Stable(version=4, promoted=4, lease=1)
    assert moved(stable, canary("promoted", 7), "main") == Stable(version=4, promoted=4, trial=7, lease=1)
    for kind in ("pinned", "rolled_back", "held"):
        assert moved(stable, canary(kind, 7), "main") == stable


@pytest.mark.parametrize(
    ("kind", "version", "serves"), [("promoted", 8, 8), ("pinned", 0, 0), ("pinned", -1, 4), ("rolled_back", 3, 3)]
)
def test_every_move_of_the_stable_channel_ends_the_trial(kind: PolicyEventKind, version: int, serves: int) -> None:
    event = PolicyEvent(event=kind, policy="main", version=version, channel="stable", owner="ann")
    after_it = moved(Stable(version=4, promoted=4, trial=7), event, "main")
    assert (after_it.version, after_it.trial, after_it.pinned) == (serves, -1, kind == "pinned" and version >= 0)


def test_a_trial_ends_when_its_own_version_is_held_and_not_another() -> None:
    tried = Stable(version=4, promoted=4, trial=7)
    for version, trial in ((7, -1), (6, 7), (8, 7)):
        event = PolicyEvent(event="held", policy="main", version=version, channel="stable", owner="canary", token=1)
        assert moved(tried, event, "main").trial == trial


def weights_event(version: int, token: int = 1, policy: str = "main") -> PolicyEvent:
    return PolicyEvent(event="published", policy=policy, version=version, token=token, manifest=f"manifests/{version}")


def trainer_lease() -> PolicyEvent:
    return PolicyEvent(event="lease", policy="main")


def test_lower_tokens_after_a_newer_lease_count_for_nothing() -> None:
    feed = PolicyFeed("main")
    feed.apply(trainer_lease(), 0)
    assert feed.apply(weights_event(1, token=0), 1)
    feed.apply(trainer_lease(), 2)
    assert not feed.apply(weights_event(2, token=0), 3)
    assert feed.apply(weights_event(2, token=2), 4)
    assert feed.newest == 2


def test_a_trainer_that_was_overtaken_orphans_nothing() -> None:
    feed = PolicyFeed("main")
    feed.apply(trainer_lease(), 1)
    feed.apply(trainer_lease(), 2)
    feed.apply(weights_event(3, token=2), 3)
    orphan = PolicyEvent(event="orphaned", policy="main", version=3, token=1)
    feed.apply(orphan, 4)
    assert feed.next(0, pinned=(), refused=()) == weights_event(3, token=2)
    feed.apply(replace(orphan, token=2), 5)
    assert feed.next(0, pinned=(), refused=()) is None


def said(event: str, version: int, channel: str = "candidate", manifest: str = "") -> PolicyEvent:
    return PolicyEvent(  # type: ignore[arg-type]
        event=event, policy="main", version=version, token=1, channel=channel, manifest=manifest, owner="ann"
    )


def feed_about(*versions: int, channel: str = "candidate") -> PolicyFeed:
    feed = PolicyFeed("main", channel=channel)  # type: ignore[arg-type]
    for offset, version in enumerate(versions):
        feed.apply(weights_event(version), offset)
    return feed


def test_only_an_event_with_weights_of_the_followed_policy_announces_any() -> None:
    feed = PolicyFeed("main")
    assert feed.newest == 0
    for event in (
        weights_event(2, policy="other"), trainer_lease(), said("orphaned", 9), said("published", 3),
        said("held", 3, manifest="m"),
    ):  # fmt: skip
        assert feed.apply(event, 0) is False
    assert not feed.events and feed.newest == 0
    assert feed.apply(said("rolled_back", 4, manifest="m"), 1) is True
    assert list(feed.events) == [4]


def test_the_oldest_that_an_evaluation_waits_for_comes_first() -> None:
    event = feed_about(1, 2, 3, 4).next(1, pinned=(1, 2, 3), refused=())
    assert event is not None and event.version == 2


def test_a_served_channel_wants_its_version_and_nothing_else_also_the_first_and_backwards() -> None:
    feed = feed_about(0, 1, 2, channel="stable")
    assert feed.next(0, pinned=(), refused=()) == weights_event(2), "before the first promotion the newest"
    feed.apply(said("promoted", 0, "stable"), 3)
    assert feed.next(2, pinned=(1,), refused=()) == weights_event(0)
    assert feed.next(0, pinned=(1,), refused=()) is None
    assert feed.next(2, pinned=(), refused=(0,)) is None
    feed.apply(said("promoted", 9, "stable"), 4)
    assert feed.next(2, pinned=(), refused=()) is None, "it waits for weights it has not heard of"


def test_who_follows_the_canary_channel_loads_the_version_on_trial() -> None:
    feed = feed_about(1, 2, channel="canary")
    feed.apply(said("promoted", 1, "stable"), 2)
    assert feed.next(2, pinned=(), refused=()) == weights_event(1)
    feed.apply(said("promoted", 2, "canary"), 3)
    assert feed.next(1, pinned=(), refused=()) == weights_event(2)
