"""A summary of `policies`: who begins with it knows what one knows that read every record."""

from collections.abc import Sequence
from typing import get_args

import msgspec
from hypothesis import event as noted
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infra.log.bus import Record
from infra.log.log import LogMessage
from infra.policies.fold import WINDOW, PoliciesFold
from infra.policies.policy_feed import PolicyFeed
from infra.policies.summary import Summary, entries, published
from schemas import Directive, PolicyEvent
from schemas.fields import Channel, DirectiveKind, PolicyEventKind

POLICIES = ("main", "reward")
Said = Directive | PolicyEvent


def message(offset: int, said: Said) -> LogMessage:
    return LogMessage(Record("t.policies", 0, offset, offset, b"", repr(said).encode()), value=said)


def folded(said: Sequence[Said], since: Summary | None = None, window: int = WINDOW) -> PoliciesFold:
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
    PolicyEvent,
    event=st.sampled_from(get_args(PolicyEventKind) + ("published",) * 9),
    policy=st.sampled_from((*POLICIES, "main", "main")),
    version=versions,
    token=st.sampled_from((0, 10, 20, 99, 99, 99)),
    manifest=st.sampled_from(("", "m", "n", "o")),
    channel=st.sampled_from(get_args(Channel)),
    owner=st.sampled_from(("gate", "ann", "train/1")),
)
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
    summary = folded(said[:first], window=window).summary()
    stored = msgspec.msgpack.encode(folded(said[:second], summary, window).summary())
    summary = msgspec.msgpack.decode(stored, type=Summary)
    for policy in (*POLICIES, "a policy of which nothing was said"):
        whole, short = feed_of(said, policy, None, channel), feed_of(said, policy, summary, channel)
        assert (short.stable, short.newest) == (whole.stable, whole.newest)
        assert not whole.lacks(held, pinned=pinned, refused=refused)
        if short.lacks(held, pinned=pinned, refused=refused):
            noted("reads everything")
            continue
        noted(f"known from {min(summary.of(policy).known_from, 1)}")
        wanted = whole.next(held, pinned=pinned, refused=refused)
        got = short.next(held, pinned=pinned, refused=refused)
        assert entries([got] if got else []) == entries([wanted] if wanted else [])


def weights(kind: PolicyEventKind, number: int) -> PolicyEvent:
    return PolicyEvent(event=kind, policy="main", version=number, manifest="m")


@thoroughly
@example(said=[weights("published", 0), weights("rolled_back", 1)], cuts=(0, 2), window=1)
@given(said=histories, cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)), window=st.integers(1, 4))
def test_a_trainer_that_begins_with_a_summary_knows_what_one_knows_that_read_everything(
    said: list[Said], cuts: tuple[int, int], window: int
) -> None:
    first, second = sorted(cuts)
    summary = folded(said[:first], window=window).summary()
    summary = folded(said[:second], summary, window).summary()
    numbered = [(offset, one) for offset, one in enumerate(said) if isinstance(one, PolicyEvent)]
    for policy in POLICIES:
        since = summary.of(policy)
        whole = published(numbered, policy)
        short = published([(offset, one) for offset, one in numbered if offset >= summary.below], policy, since)
        assert {version: entries([one]) for version, one in short.items() if version >= since.known_from} == {
            version: entries([one]) for version, one in whole.items() if version >= since.known_from
        }
        assert max(short, default=-1) == max(whole, default=-1), "no number is given out again"
    orders = [one.order for one in said if isinstance(one, Directive) and one.is_of_learning]
    assert folded(said, summary).learning == (orders[-1] if orders else "")


@thoroughly
@given(said=histories, cut=st.integers(0, 40), window=st.integers(1, 4))
def test_a_summary_is_the_same_whoever_writes_it(said: list[Said], cut: int, window: int) -> None:
    """But for versions that only the one has that began earlier."""
    whole = folded(said, window=window).summary()
    short = folded(said, folded(said[:cut], window=window).summary(), window).summary()
    assert (short.below, short.lease, short.learning) == (whole.below, whole.lease, whole.learning)
    assert short.last == whole.last
    for policy in POLICIES:
        one, other = short.of(policy), whole.of(policy)
        assert (one.stable, one.token, one.newest) == (other.stable, other.token, other.newest)


def version(number: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="main", version=number, manifest=f"m/{number}")


def test_a_summary_holds_the_newest_versions_and_those_that_are_served_and_no_others() -> None:
    said: list[Said] = [version(number) for number in range(1000)]
    for kind, number, channel in (("promoted", 7, "stable"), ("promoted", 40, "canary")):
        said.append(PolicyEvent(event=kind, policy="main", version=number, channel=channel, owner="ann"))  # type: ignore[arg-type]
    summary = folded([*said[:7], *said[-2:], *said[7:1000]]).summary().of("main")
    assert summary.known_from == 1000 - WINDOW
    summary = folded(said[:40]).summary().of("main")
    assert (summary.known_from, len(summary.announced)) == (0, 40)
    fold = folded(said)
    assert [one.version for one in fold.summary().of("main").announced] == list(range(1000 - WINDOW, 1000))
    feed = feed_of(said, since=fold.summary(), channel="stable")
    assert feed.lacks(999, pinned=(), refused=()), "version 7 was promoted long after it was published"
    early = [*said[:50], said[1000], said[1001], *said[50:1000]]
    kept = folded(early).summary()
    assert [one.version for one in kept.of("main").announced[:2]] == [7, 40]
    channels: tuple[tuple[Channel, int], ...] = (("stable", 7), ("canary", 40))
    for channel, number in channels:
        feed = feed_of(early, since=kept, channel=channel)
        assert not feed.lacks(999, pinned=(), refused=())
        event = feed.next(999, pinned=(), refused=())
        assert event is not None and (event.version, event.manifest) == (number, f"m/{number}")


def test_who_begins_with_a_summary_reads_everything_only_for_what_is_not_in_it() -> None:
    said: list[Said] = [version(number) for number in range(200)]
    feed = feed_of(said, since=folded(said).summary())
    assert not feed.lacks(-1, pinned=(), refused=())
    assert not feed.lacks(-1, pinned=(199 - WINDOW // 2,), refused=(199,))
    assert feed.lacks(-1, pinned=(3,), refused=())
    assert not feed.lacks(3, pinned=(3,), refused=())
    assert not feed.lacks(-1, pinned=(3,), refused=(3,))
    assert feed.lacks(-1, pinned=(), refused=range(200 - WINDOW, 200))
