"""Which versions count, and which one is loaded next."""

from msgspec.structs import replace

from infra.policies.policy_feed import PolicyFeed
from schemas import Directive, PolicyEvent


def published(version: int, token: int = 1, policy: str = "main") -> PolicyEvent:
    return PolicyEvent(event="published", policy=policy, version=version, token=token, manifest=f"manifests/{version}")


def lease() -> PolicyEvent:
    return PolicyEvent(event="lease", policy="main")


def test_the_newest_version_is_next() -> None:
    feed = PolicyFeed("main")
    for offset, version in enumerate((1, 2, 3)):
        assert feed.apply(published(version), offset)
    event = feed.next(0, pinned=(), refused=())
    assert event is not None and event.version == 3


def test_an_engine_never_goes_back() -> None:
    feed = PolicyFeed("main")
    feed.apply(published(3), 0)
    assert feed.next(3, pinned=(), refused=()) is None
    assert feed.next(5, pinned=(3,), refused=()) is None


def test_what_an_eval_waits_for_is_not_skipped() -> None:
    feed = PolicyFeed("main")
    for offset, version in enumerate((1, 2, 3)):
        feed.apply(published(version), offset)
    event = feed.next(0, pinned=(2, 9), refused=())
    assert event is not None and event.version == 2


def test_a_refused_version_is_passed_over() -> None:
    feed = PolicyFeed("main")
    feed.apply(published(1), 0)
    feed.apply(published(2), 1)
    event = feed.next(0, pinned=(), refused=(2,))
    assert event is not None and event.version == 1


def test_lower_tokens_after_a_newer_lease_count_for_nothing() -> None:
    feed = PolicyFeed("main")
    feed.apply(lease(), 0)
    assert feed.apply(published(1, token=0), 1)
    feed.apply(lease(), 2)
    assert not feed.apply(published(2, token=0), 3)
    assert feed.apply(published(2, token=2), 4)
    assert feed.newest == 2


def test_orphaned_versions_and_other_policies_are_not_candidates() -> None:
    feed = PolicyFeed("main")
    feed.apply(published(1), 0)
    feed.apply(PolicyEvent(event="orphaned", policy="main", version=1), 1)
    assert not feed.apply(published(2, policy="reward-model"), 2)
    assert feed.next(0, pinned=(), refused=()) is None


def test_a_trainer_that_was_overtaken_orphans_nothing() -> None:
    feed = PolicyFeed("main")
    feed.apply(lease(), 1)
    feed.apply(lease(), 2)
    feed.apply(published(3, token=2), 3)
    orphan = PolicyEvent(event="orphaned", policy="main", version=3, token=1)
    feed.apply(orphan, 4)
    assert feed.next(0, pinned=(), refused=()) == published(3, token=2)
    feed.apply(replace(orphan, token=2), 5)
    assert feed.next(0, pinned=(), refused=()) is None


def said(event: str, version: int, channel: str = "candidate", manifest: str = "") -> PolicyEvent:
    return PolicyEvent(  # type: ignore[arg-type]
        event=event, policy="main", version=version, token=1, channel=channel, manifest=manifest, owner="ann"
    )


def feed_of(*versions: int, channel: str = "candidate") -> PolicyFeed:
    feed = PolicyFeed("main", channel=channel)  # type: ignore[arg-type]
    for offset, version in enumerate(versions):
        feed.apply(published(version), offset)
    return feed


def test_only_an_event_with_weights_of_the_followed_policy_announces_any() -> None:
    feed = PolicyFeed("main")
    assert feed.newest == 0
    for event in (
        published(2, policy="other"), lease(), said("orphaned", 9), said("published", 3), said("refused", 3, manifest="m")
    ):  # fmt: skip
        assert feed.apply(event, 0) is False
    assert not feed.events and feed.newest == 0
    assert feed.apply(said("rolled_back", 4, manifest="m"), 1) is True
    assert list(feed.events) == [4]


def test_the_newest_is_the_highest_that_was_published_not_the_last() -> None:
    assert feed_of(5, 3).newest == 5


def test_an_engine_forgets_what_is_older_than_it_holds_and_nothing_else() -> None:
    feed = PolicyFeed("main")
    for version in (1, 2, 3):
        feed.apply(published(version), version)
    feed.forget_below(2)
    assert list(feed.events) == [2, 3]


def test_who_follows_a_served_channel_forgets_nothing() -> None:
    feed = feed_of(1, 2, 3, channel="stable")
    feed.forget_below(3)
    assert list(feed.events) == [1, 2, 3]


def test_the_oldest_that_an_evaluation_waits_for_comes_first() -> None:
    event = feed_of(1, 2, 3, 4).next(1, pinned=(1, 2, 3), refused=())
    assert event is not None and event.version == 2


def test_a_served_channel_wants_its_version_and_nothing_else_also_the_first_and_backwards() -> None:
    feed = feed_of(0, 1, 2, channel="stable")
    assert feed.next(0, pinned=(), refused=()) == published(2), "before the first promotion the newest"
    feed.apply(said("promoted", 0, "stable"), 3)
    assert feed.next(2, pinned=(1,), refused=()) == published(0)
    assert feed.next(0, pinned=(1,), refused=()) is None
    assert feed.next(2, pinned=(), refused=(0,)) is None
    feed.apply(said("promoted", 9, "stable"), 4)
    assert feed.next(2, pinned=(), refused=()) is None, "it waits for weights it has not heard of"


def test_who_follows_the_canary_channel_loads_the_version_on_trial() -> None:
    feed = feed_of(1, 2, channel="canary")
    feed.apply(said("promoted", 1, "stable"), 2)
    assert feed.next(2, pinned=(), refused=()) == published(1)
    feed.apply(said("promoted", 2, "canary"), 3)
    assert feed.next(1, pinned=(), refused=()) == published(2)


def test_a_gateway_goes_on_with_what_is_stable_when_an_overtaken_master_promotes() -> None:
    def promoted(version: int, token: int) -> PolicyEvent:
        return PolicyEvent(
            event="promoted", policy="main", version=version, token=token, channel="stable", owner="gate"
        )

    feed = PolicyFeed("main", channel="stable")
    for version in (1, 2):
        feed.apply(published(version), version)
    feed.fence(Directive(order="lease"), 3)
    feed.apply(promoted(1, token=3), 4)
    feed.fence(Directive(order="lease"), 5)
    feed.apply(promoted(2, token=3), 6)
    assert feed.stable.version == 1 and feed.next(1, pinned=(), refused=()) is None
    feed.apply(promoted(2, token=5), 7)
    event = feed.next(1, pinned=(), refused=())
    assert event is not None and event.version == 2
