"""Limits against raters and tenants."""

from collections import Counter
from collections.abc import Iterable

import pytest

from infra.chain.processor import Memory
from schemas import Feedback
from schemas.ids import request_group
from streams.collect.limits import (
    DAY_MS,
    MOVED_BY_RATERS,
    MOVED_BY_TENANTS,
    RATER_LIMIT,
    SIZES,
    TENANT_LIMIT,
    beyond,
    charge,
)
from streams.collect.state import State
from streams.config import LimitsConfig
from tests.names import session_name
from tests.streams.collect.collecting import FakePartition, answer, block, decisions, drops, folded, rules, said
from tests.streams.collect.test_fold_turns import ref as turn_ref
from tests.streams.collect.test_fold_turns import turn

NOON_MS = 20_000 * DAY_MS + DAY_MS // 2


def moved(
    words: Iterable[tuple[str, str]], limits: LimitsConfig, time_ms: int = NOON_MS, **kept: Memory
) -> Counter[str]:
    memories, found = dict(kept), Counter[str]()
    for tenant, rater in words:
        reason = beyond(memories, limits, tenant, rater, time_ms)
        found[reason or f"{tenant}/{rater}"] += 1
        if not reason:
            charge(memories, tenant, rater, time_ms, 1)
    return found


def test_one_rater_moves_a_bounded_number_of_answers_in_a_day() -> None:
    found = moved([("acme", "ann")] * 100, LimitsConfig(rater_answers=30, rater_share=0.1))
    assert found == {"acme/ann": 30, RATER_LIMIT: 70}


def test_one_rater_moves_a_bounded_share_of_what_is_moved_in_a_day() -> None:
    busy = [("acme", f"r{number % 500}") for number in range(5_000)]
    flood = [pair for item in busy for pair in (item, ("acme", "bot"))]
    found = moved(flood, LimitsConfig(rater_answers=30, rater_share=0.1))
    assert found["acme/bot"] <= 0.1 * sum(count for name, count in found.items() if name.startswith("acme")) + 1
    assert found[RATER_LIMIT] == 5_000 - found["acme/bot"]


def test_one_tenant_moves_a_bounded_share_once_there_is_another() -> None:
    words = [("big", ""), ("big", "key 7"), ("small", "")] * 3_000
    found = moved(words, LimitsConfig(tenant_answers=100, tenant_share=0.5))
    big = found["big/"] + found["big/key 7"]
    assert 2_900 < big <= found["small/"] + 2 and found[TENANT_LIMIT] == 6_000 - big


def test_a_tenant_that_is_alone_has_no_bound_and_one_whose_neighbours_rest_for_a_day_has() -> None:
    limits = LimitsConfig(tenant_answers=10)
    assert moved([("acme", "")] * 1_000, limits) == {"acme/": 1_000}
    memories: dict[str, Memory] = {}
    charge(memories, "other", "", NOON_MS, 1)
    assert moved([("acme", "")] * 30, limits, NOON_MS + DAY_MS, **memories) == {"acme/": 10, TENANT_LIMIT: 20}
    memories.clear()
    charge(memories, "other", "", NOON_MS, 1)
    assert moved([("acme", "")] * 30, limits, NOON_MS + 2 * DAY_MS, **memories) == {"acme/": 30}


def test_a_day_is_one_of_log_time() -> None:
    memories: dict[str, Memory] = {}
    limits = LimitsConfig(rater_answers=1)
    charge(memories, "acme", "ann", NOON_MS, 1)
    assert beyond(memories, limits, "acme", "ann", NOON_MS + DAY_MS // 2 - 1) == RATER_LIMIT
    assert beyond(memories, limits, "acme", "ann", NOON_MS + DAY_MS // 2) == ""


def test_what_is_remembered_of_raters_and_tenants_is_bounded() -> None:
    memories: dict[str, Memory] = {}
    for number in range(SIZES[MOVED_BY_RATERS] + 10):
        charge(memories, f"t{number % (SIZES[MOVED_BY_TENANTS] + 10)}", f"r{number}", NOON_MS, 1)
    assert all(len(memories[name]) == SIZES[name] for name in (MOVED_BY_RATERS, MOVED_BY_TENANTS))


@pytest.mark.parametrize(
    "moves",
    [
        [("acme", f"user-{number % 300}") for number in range(9_000)],
        [("acme", f"annotator-{number % 4}") for number in range(1_600)],
        [("acme", "key 7")] * 30_000,
        [("acme", f"user-{number % 300}") for number in range(9_000)]
        + [("other", f"user-{number % 50}") for number in range(1_000)],
    ],
    ids=["users", "annotators", "nobody named", "a small neighbour"],
)
def test_honest_traffic_is_not_touched_by_the_limits_that_are_set(moves: list[tuple[str, str]]) -> None:
    assert not {RATER_LIMIT, TENANT_LIMIT} & moved(moves, LimitsConfig()).keys()


# Through the fold.


def group(number: int, tenant: str = "acme") -> str:
    return request_group(session_name(tenant, f"chat-{number}"), 7, 0)


def praise(number: int, rater: str, tenant: str = "acme") -> Feedback:
    return said(f"{group(number, tenant)}.0-0-0", 1.0, id=f"{number}", rater=rater)


def test_what_is_beyond_a_raters_day_trains_nothing_and_is_no_rating() -> None:
    inbox = FakePartition().extend(block(answer(group(number), 0, size=1, lane="live")) for number in range(6))
    inbox.extend(praise(number, "bot") for number in range(5)).append(praise(5, "ann"))
    results = folded(inbox, rules(limits=LimitsConfig(rater_answers=2, rater_share=0.0)))
    raters = [rating.rater for decision in decisions(results) for rating in decision.closure.ratings or ()]
    assert (raters, drops(results)) == (["bot", "bot", "ann"], {RATER_LIMIT: 3})


def test_what_turns_hear_of_a_word_is_moved_by_it_too() -> None:
    inbox = FakePartition().extend([*(turn(number) for number in range(4)), said(turn_ref(3), 1.0, rater="ann")])
    inbox.extend([said(turn_ref(0), 1.0, rater="bob"), said(turn_ref(1), 1.0, rater="ann")])
    assert drops(folded(inbox, rules(discount=0.5, limits=LimitsConfig(rater_answers=4)))) == {RATER_LIMIT: 1}, (
        "ann moved four turns"
    )


def test_what_changes_nothing_uses_up_nobodys_limit() -> None:
    lanes = ("live", "usual", "live")
    blocks = [block(answer(group(number), 0, size=1, lane=lane)) for number, lane in enumerate(lanes)]
    words = [said(f"{group(at)}.0-0-0", 1.0, id=str(number), rater="ann") for at in (0, 1) for number in range(3)]
    limited = rules(sources=("csat", "user"), limits=LimitsConfig(rater_answers=3, rater_share=0.0))
    assert not drops(folded(FakePartition().extend([*blocks, *words, praise(2, "ann")]), limited))


def test_what_is_taken_back_is_taken_back_beyond_any_limit() -> None:
    inbox = FakePartition().extend([block(answer(group(0), 0, size=1, lane="live")), praise(0, "ann")])
    inbox.append(said(f"{group(0)}.0-0-0", 0.0, id="back", rater="ann", type="retraction"))
    state = State()
    results = folded(inbox, rules(limits=LimitsConfig(rater_answers=1)), state)
    assert [len(decision.closure.ratings or ()) for decision in decisions(results)] == [1, 0] and not drops(results)
