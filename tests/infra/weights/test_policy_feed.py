"""Which versions count, and which one is loaded next."""

from msgspec.structs import replace

from infra.weights.policy_feed import PolicyFeed
from schemas import PolicyEvent


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
