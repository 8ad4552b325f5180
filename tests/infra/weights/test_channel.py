"""The stable channel follows from the events of `policies` alone."""

from hypothesis import given
from hypothesis import strategies as st

from infra.weights.channel import Stable, is_overtaken, moved
from schemas import PolicyEvent
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


def test_a_pin_without_any_promotion_stays_where_it_was_when_it_ends() -> None:
    assert after(("pinned", 3), ("pinned", -1)).version == 3


def test_a_rollback_ends_a_pin_and_forgets_what_was_promoted_above_it() -> None:
    assert after(("promoted", 4), ("promoted", 7), ("rolled_back", 4)) == Stable(4, 4)
    assert after(("promoted", 7), ("pinned", 7), ("rolled_back", 4), ("pinned", -1)).version == 4


def test_what_an_overtaken_master_decides_moves_nothing_once_a_later_one_has_decided() -> None:
    def decided(token: int, kind: PolicyEventKind, version: int, owner: str = "gate") -> PolicyEvent:
        return PolicyEvent(event=kind, policy="main", version=version, channel="stable", owner=owner, token=token)

    stable = Stable()
    for event in (decided(0, "promoted", 1), decided(3, "promoted", 7)):
        stable = moved(stable, event, "main")
    assert (stable.version, stable.lease) == (7, 3)
    for late in (decided(0, "promoted", 2), decided(2, "rolled_back", 1, "guard"), decided(0, "promoted", 2, "canary")):
        assert is_overtaken(stable, late)
        assert moved(stable, late, "main") == stable
    by_hand = decided(0, "rolled_back", 2, "ann")
    assert moved(stable, by_hand, "main").version == 2, "what a person says always holds"


def test_what_was_held_by_the_gate_moves_nothing() -> None:
    assert after(("promoted", 4), ("held", 9)).version == 4


@given(
    st.lists(
        st.tuples(st.sampled_from(["published", "lease", "orphaned", "refused", "promoted"]), st.integers(-1, 50)),
        max_size=30,
    )
)
def test_other_policies_and_the_candidate_channel_move_nothing(moves: list[tuple[PolicyEventKind, int]]) -> None:
    assert after(*moves, policy="other") == Stable()
    stable = Stable()
    for kind, version in moves:
        stable = moved(stable, PolicyEvent(event=kind, policy="main", version=version), "main")
    assert stable == Stable()
