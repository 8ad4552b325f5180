"""The stable channel follows from the events of `policies` alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from infra.policies.fold import MASTERS, PolicyFeed, Stable, fenced, is_overtaken, moved
from schemas import Directive, PolicyEvent
from schemas.fields import PolicyEventKind


def after(*moves: tuple[PolicyEventKind, int], policy: str = "main") -> Stable:
    stable = Stable()
    for kind, version in moves:
        stable = moved(stable, PolicyEvent(event=kind, policy=policy, version=version, channel="stable"), "main")
    return stable


def test_a_promotion_moves_the_channel() -> None:
    assert after(("promoted", 4), ("promoted", 7)).version == 7


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


def test_what_an_overtaken_master_decides_moves_nothing_in_a_log_without_the_leases() -> None:
    stable = Stable()
    for event in (decided(0, "promoted", 1), decided(3, "promoted", 7)):
        stable = moved(stable, event, "main")
    assert (stable.version, stable.lease) == (7, 3)
    for late in (decided(0, "promoted", 2), decided(2, "rolled_back", 1, "watch"), decided(0, "promoted", 2, "canary")):
        assert moved(stable, late, "main") == stable
    again = decided(3, "promoted", 8)
    assert not is_overtaken(stable, again) and moved(stable, again, "main").version == 8, "a master decides twice"


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


def test_a_channel_serves_the_newest_the_stable_or_the_version_on_trial() -> None:
    stable, tried = Stable(version=4, promoted=4), Stable(version=4, promoted=4, trial=0)
    assert [stable.served(channel) for channel in ("candidate", "canary", "stable")] == [-1, 4, 4]
    assert [tried.served(channel) for channel in ("candidate", "canary", "stable")] == [-1, 0, 4]


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


def published(version: int, token: int = 1, policy: str = "main") -> PolicyEvent:
    return PolicyEvent(event="published", policy=policy, version=version, token=token, manifest=f"manifests/{version}")


def trainer_lease() -> PolicyEvent:
    return PolicyEvent(event="lease", policy="main")


def test_lower_tokens_after_a_newer_lease_count_for_nothing() -> None:
    feed = PolicyFeed("main")
    feed.apply(trainer_lease(), 0)
    assert feed.apply(published(1, token=0), 1)
    feed.apply(trainer_lease(), 2)
    assert not feed.apply(published(2, token=0), 3)
    assert feed.apply(published(2, token=2), 4)
    assert feed.newest == 2


def test_a_trainer_that_was_overtaken_orphans_nothing() -> None:
    feed = PolicyFeed("main")
    feed.apply(trainer_lease(), 1)
    feed.apply(trainer_lease(), 2)
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
        published(2, policy="other"), trainer_lease(), said("orphaned", 9), said("published", 3),
        said("held", 3, manifest="m"),
    ):  # fmt: skip
        assert feed.apply(event, 0) is False
    assert not feed.events and feed.newest == 0
    assert feed.apply(said("rolled_back", 4, manifest="m"), 1) is True
    assert list(feed.events) == [4]


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
