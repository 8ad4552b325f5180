"""Limits against raters and tenants."""

from collections import Counter
from collections.abc import Iterable

from infra.chain.processor import Memory
from schemas import Feedback, Tick
from schemas.ids import request_group
from streams.collect.feedback import FeedbackRules
from streams.collect.fold import wanted
from streams.collect.group import Attempt, BlockPlace, Group
from streams.collect.limits import (
    BURST,
    DAY_MS,
    MOVED_BY_RATERS,
    MOVED_BY_TENANTS,
    RATER_CAP,
    RATER_LIMIT,
    SIZES,
    TENANT_LIMIT,
    beyond,
    charge,
    held_back,
    limit_memories,
)
from streams.collect.rules import Arrival, Rules
from streams.collect.state import State
from streams.config import LimitsConfig
from tests.names import session_name
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    FakePartition,
    answer,
    block,
    decisions,
    drops,
    folded,
    rules,
    said,
    stub,
)
from tests.streams.collect.test_fold_turns import ref as turn_ref
from tests.streams.collect.test_fold_turns import turn

WITHIN_MS = 1_000
WORDS = "The answer was rude and did not help me with my order at all, please fix it."


def source(**limits: int) -> FeedbackRules:
    return FeedbackRules(window_ms=100_000, late="amend", within_ms=WITHIN_MS, **limits)  # type: ignore[arg-type]


def held_rules(**limits: int) -> Rules:
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source(**limits)})


def ref(number: int) -> str:
    return f"a{number}.0.0-0-0"


def rated(number: int, rater: str = "bot") -> FakePartition:
    """So many answers, each rated once by the same rater."""
    inbox = FakePartition().extend(block(answer(f"a{index}.0", 0, size=1, lane="live")) for index in range(number))
    return inbox.extend(said(ref(index), 1.0, id=str(index), rater=rater) for index in range(number))


def label(number: int, text: str, rater: str = "") -> Feedback:
    return Feedback(ref=ref(number), id=f"{number}-{rater}", source="csat", type="label", text=text, rater=rater)


def reasons(words: list[Feedback], step_ms: int = 1, **limits: int) -> list[str]:
    memories: dict = {}
    return [held_back(memories, word, source(**limits), number * step_ms) for number, word in enumerate(words)]


def test_what_one_rater_says_beyond_the_cap_counts_for_nothing_and_is_counted() -> None:
    results = folded(rated(5), held_rules(per_rater=3))
    assert len(decisions(results)) == 3
    assert drops(results) == {RATER_CAP: 2}


def test_raters_do_not_share_a_cap_and_all_that_nobody_is_named_for_is_one_raters() -> None:
    assert drops(folded(rated(5, rater=""), held_rules(per_rater=3))) == {RATER_CAP: 2}
    others = [said(ref(number), 1.0, rater=f"r{number}") for number in range(5)]
    assert reasons(others, per_rater=1) == [""] * 5


def test_the_cap_is_lifted_when_its_time_is_over() -> None:
    words = [said(ref(number), 1.0, rater="bot") for number in range(4)]
    assert reasons(words, step_ms=WITHIN_MS // 2, per_rater=1) == ["", RATER_CAP, "", RATER_CAP]


def test_raters_of_two_tenants_that_have_one_name_do_not_share_a_cap() -> None:
    memories: dict = {}
    words = [said(ref(number), 1.0, id=str(number), rater="ann") for number in range(4)]
    tenants = ("acme", "acme", "other", "other")
    held = [
        held_back(memories, word, source(per_rater=1), 0, tenant) for word, tenant in zip(words, tenants, strict=True)
    ]
    assert held == ["", RATER_CAP, "", RATER_CAP]


def test_a_retraction_is_never_held_back() -> None:
    back = [said(ref(0), 0.0, id=str(number), rater="bot", type="retraction") for number in range(5)]
    assert reasons(back, per_rater=1, alike=1) == [""] * 5


def test_the_same_words_with_small_changes_are_a_burst_whoever_says_them() -> None:
    said_so = [label(number, f"{WORDS} {'!' * number}", rater=f"r{number}") for number in range(4)]
    said_so.insert(2, label(9, "It is fine, though the second paragraph could name the price.", "ann"))
    assert reasons(said_so, alike=2) == ["", "", "", BURST, BURST]


def test_feedback_without_words_is_no_burst() -> None:
    assert reasons([said(ref(number), 1.0) for number in range(9)], alike=1) == [""] * 9


def test_repeated_delivery_does_not_use_up_a_cap() -> None:
    once = said(ref(0), 1.0, id="x", rater="bot")
    inbox = FakePartition().extend([block(answer("a0.0", 0, size=1, lane="live")), once, once, once])
    assert not drops(folded(inbox, held_rules(per_rater=1)))


def test_what_is_held_back_leaves_no_group_open() -> None:
    inbox = FakePartition().extend([said("gone.0.0-0-0", 1.0, id=str(number), rater="bot") for number in range(3)])
    assert drops(folded(inbox, held_rules(per_rater=1))) == {RATER_CAP: 2}


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


def test_honest_traffic_is_not_touched_by_the_limits_that_are_set() -> None:
    config = LimitsConfig()
    limits = LimitsConfig(config.rater_answers, config.rater_share, config.tenant_answers, config.tenant_share)
    assert limits == LimitsConfig()
    users = [("acme", f"user-{number % 300}") for number in range(9_000)]
    annotators = [("acme", f"annotator-{number % 4}") for number in range(1_600)]
    nobody_named = [("acme", "key 7")] * 30_000
    neighbour = [("other", f"user-{number % 50}") for number in range(1_000)]
    for words in (users, annotators, nobody_named, [*users, *neighbour]):
        assert not {RATER_LIMIT, TENANT_LIMIT} & moved(words, limits).keys()


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


def test_what_is_taken_back_is_taken_back_beyond_any_limit() -> None:
    inbox = FakePartition().extend([block(answer(group(0), 0, size=1, lane="live")), praise(0, "ann")])
    inbox.append(said(f"{group(0)}.0-0-0", 0.0, id="back", rater="ann", type="retraction"))
    state = State()
    results = folded(inbox, rules(limits=LimitsConfig(rater_answers=1)), state)
    assert [len(decision.closure.ratings or ()) for decision in decisions(results)] == [1, 0] and not drops(results)


def closed(revision: int = 0, closed_ms: int = 5, due_ms: int = 0) -> State:
    group = Group("a.0", winner=0, revision=revision, closed_ms=closed_ms, due_ms=due_ms)
    group.attempts[0] = Attempt(0, 2, "usual", 412, 1_000)
    for episode in range(2):
        group.attempts[0].add(answer("a.0", episode), BlockPlace(episode, 0))
    state = State()
    state.now_ms = 50
    state.add(group)
    return state


def arrival(value: object, time_ms: int = 60) -> Arrival:
    return Arrival(partition=0, offset=9, timestamp_ms=time_ms, value=value)  # type: ignore[arg-type]


def late_rules(late: str = "amend", **more: object) -> Rules:
    return Rules(deadline_ms=10, keep_ms=1_000, sources={"csat": FeedbackRules(5, late=late)}, revisions=2, **more)  # type: ignore[arg-type]


def test_late_words_need_the_blocks_of_the_group_they_reopen_and_nothing_else_needs_any() -> None:
    word = arrival(said("a.0.0-0-0", 1.0))
    assert wanted(closed(), word, late_rules()) == {0, 1}
    for state, record, given in (
        (closed(), arrival(word.value, 5_000), late_rules("drop")),
        (closed(), arrival(said("a.0.0-0-0", 1.0, source="other")), late_rules()),
        (closed(), arrival(said("b.0.0-0-0", 1.0)), late_rules()), (closed(), arrival(said("x", 1.0)), late_rules()),
        (closed(), arrival(stub("a.0", 0)), late_rules()), (closed(), arrival(block(answer("a.0", 0))), late_rules()),
        (closed(), arrival(Tick(partition=0, due_ms=1)), late_rules()), (closed(), arrival(None), late_rules()),
        (closed(closed_ms=0), word, late_rules()), (closed(closed_ms=0, due_ms=61), word, late_rules()),
        (closed(revision=2), word, late_rules()),
    ):  # fmt: skip
        assert wanted(state, record, given) == set()


def test_a_group_that_the_records_own_time_closes_is_reopened_too() -> None:
    assert wanted(closed(closed_ms=0, due_ms=60), arrival(said("a.0.0-0-0", 1.0)), late_rules()) == {0, 1}
    assert wanted(closed(closed_ms=0, due_ms=50), arrival(said("a.0.0-0-0", 1.0), 7), late_rules()) == {0, 1}
    assert wanted(closed(closed_ms=0, due_ms=51), arrival(said("a.0.0-0-0", 1.0), 7), late_rules()) == set()
    assert wanted(closed(closed_ms=0, due_ms=1), arrival(said("a.0.0-0-0", 1.0), 7), late_rules()) == {0, 1}


def test_what_takes_a_word_back_reopens_a_group_however_often_it_was_revised() -> None:
    back = arrival(said("a.0.0-0-0", 0.0, type="retraction"))
    assert wanted(closed(revision=2), back, late_rules()) == {0, 1}
    assert wanted(closed(revision=1), arrival(said("a.0.0-0-0", 1.0)), late_rules()) == {0, 1}


def test_a_share_is_of_all_that_is_moved_with_this_word() -> None:
    limits, memories = LimitsConfig(rater_answers=1, rater_share=0.5), limit_memories({})
    charge(memories, "acme", "bob", 0, 4)
    charge(memories, "acme", "ann", 0, 4)
    assert beyond(memories, limits, "acme", "ann", 0) == "", "4 of 9"
    charge(memories, "acme", "bob", 0, 1)
    charge(memories, "acme", "ann", 0, 2)
    assert beyond(memories, limits, "acme", "ann", 0) == RATER_LIMIT, "6 of 12"
    assert beyond(memories, limits, "other", "ann", 0) == "", "another tenant's rater of that name"


def test_of_a_tenant_that_is_not_alone_the_share_is_bounded_with_this_word() -> None:
    limits, memories = LimitsConfig(tenant_answers=1, tenant_share=0.5), limit_memories({})
    charge(memories, "acme", "", 0, 5)
    assert beyond(memories, limits, "acme", "", 0) == "", "alone"
    charge(memories, "other", "", 0, 4)
    assert beyond(memories, limits, "acme", "", 0) == TENANT_LIMIT, "5 of 10"
    charge(memories, "other", "", 0, 1)
    assert beyond(memories, limits, "acme", "", 0) == "", "5 of 11"
    assert beyond(memories, limits, "acme", "", DAY_MS) == "", "a new day"


def test_texts_that_share_words_but_say_something_else_are_no_burst() -> None:
    memories: dict[str, Memory] = {}
    source = FeedbackRules(1, alike=1, within_ms=10)
    texts = (
        "The answer was rude and did not help me with my order at all, please fix it.",
        "The answer was rude and did not help me with my order at all, and tell me when the",
    )
    words = [
        Feedback(ref="x", id=str(number), source="csat", type="label", text=text) for number, text in enumerate(texts)
    ]
    assert [held_back(memories, word, source, 0) for word in (*words, words[0])] == ["", "", BURST]
    assert BURST == "burst of near duplicates"
