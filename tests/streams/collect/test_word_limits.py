"""What each record needs of the log, and the limits on words, at their edges."""

from infra.chain.processor import Memory
from schemas import Feedback, Tick
from streams.collect.feedback import FeedbackRules
from streams.collect.fold import wanted
from streams.collect.group import Attempt, BlockPlace, Group
from streams.collect.limits import (
    BURST,
    DAY_MS,
    RATER_LIMIT,
    TENANT_LIMIT,
    DayLimits,
    beyond,
    charge,
    held_back,
    limit_memories,
)
from streams.collect.rules import Arrival, Rules
from streams.collect.state import State
from tests.streams.collect.collecting import answer, block, said, stub


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


def rules(late: str = "amend", **more: object) -> Rules:
    return Rules(deadline_ms=10, keep_ms=1_000, sources={"csat": FeedbackRules(5, late=late)}, revisions=2, **more)  # type: ignore[arg-type]


def test_late_words_need_the_blocks_of_the_group_they_reopen_and_nothing_else_needs_any() -> None:
    word = arrival(said("a.0.0-0-0", 1.0))
    assert wanted(closed(), word, rules()) == {0, 1}
    for state, record, given in (
        (closed(), arrival(word.value, 5_000), rules("drop")),
        (closed(), arrival(said("a.0.0-0-0", 1.0, source="other")), rules()),
        (closed(), arrival(said("b.0.0-0-0", 1.0)), rules()), (closed(), arrival(said("x", 1.0)), rules()),
        (closed(), arrival(stub("a.0", 0)), rules()), (closed(), arrival(block(answer("a.0", 0))), rules()),
        (closed(), arrival(Tick(partition=0, due_ms=1)), rules()), (closed(), arrival(None), rules()),
        (closed(closed_ms=0), word, rules()), (closed(closed_ms=0, due_ms=61), word, rules()),
        (closed(revision=2), word, rules()),
    ):  # fmt: skip
        assert wanted(state, record, given) == set()


def test_a_group_that_the_records_own_time_closes_is_reopened_too() -> None:
    assert wanted(closed(closed_ms=0, due_ms=60), arrival(said("a.0.0-0-0", 1.0)), rules()) == {0, 1}
    assert wanted(closed(closed_ms=0, due_ms=50), arrival(said("a.0.0-0-0", 1.0), 7), rules()) == {0, 1}
    assert wanted(closed(closed_ms=0, due_ms=51), arrival(said("a.0.0-0-0", 1.0), 7), rules()) == set()
    assert wanted(closed(closed_ms=0, due_ms=1), arrival(said("a.0.0-0-0", 1.0), 7), rules()) == {0, 1}


def test_what_takes_a_word_back_reopens_a_group_however_often_it_was_revised() -> None:
    back = arrival(said("a.0.0-0-0", 0.0, type="retraction"))
    assert wanted(closed(revision=2), back, rules()) == {0, 1}
    assert wanted(closed(revision=1), arrival(said("a.0.0-0-0", 1.0)), rules()) == {0, 1}


def test_a_share_is_of_all_that_is_moved_with_this_word() -> None:
    limits, memories = DayLimits(rater_answers=1, rater_share=0.5), limit_memories({})
    charge(memories, "acme", "bob", 0, 4)
    charge(memories, "acme", "ann", 0, 4)
    assert beyond(memories, limits, "acme", "ann", 0) == "", "4 of 9"
    charge(memories, "acme", "bob", 0, 1)
    charge(memories, "acme", "ann", 0, 2)
    assert beyond(memories, limits, "acme", "ann", 0) == RATER_LIMIT, "6 of 12"
    assert beyond(memories, limits, "other", "ann", 0) == "", "another tenant's rater of that name"


def test_of_a_tenant_that_is_not_alone_the_share_is_bounded_with_this_word() -> None:
    limits, memories = DayLimits(tenant_answers=1, tenant_share=0.5), limit_memories({})
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
