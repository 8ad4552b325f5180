"""The fold at its edges: what is set where nothing is said, what it cannot use, and where it stops hearing."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from infra.chain.chain import ChainResult, Context
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, sealed
from schemas import Block, Closure, Experience, decode, encode
from schemas.ids import request_group
from streams.collect.feedback import FeedbackRules
from streams.collect.fold import MAX_ANSWERS, fold
from streams.collect.limits import DayLimits
from streams.collect.rules import Rules
from streams.collect.state import State
from tests.names import session_name, subject_name
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    RULES,
    FakePartition,
    answer,
    block,
    decisions,
    drops,
    folded,
    said,
    scored,
    tick,
)
from tests.streams.collect.test_fold_turns import ref, turn


def rules(late: str = "amend", window_ms: int = 5_000, **more: object) -> Rules:
    sources = {"csat": FeedbackRules(window_ms=window_ms, late=late)}  # type: ignore[arg-type]
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources=sources, **more)  # type: ignore[arg-type]


def test_a_record_that_does_not_belong_here_is_put_aside_and_named() -> None:
    inbox = FakePartition().extend([Closure(group="a.0", outcome="dropped"), None])
    state = State()
    first, second = folded(inbox, RULES, state)
    (letter,) = first.letters
    assert (letter.reason, letter.error, letter.offset) == ("unexpected record", "Closure", 0)
    assert not second.letters and (state.next_offset, state.last_ms) == (2, inbox.time_ms)


def test_words_wait_for_an_answer_as_long_as_a_deadline_where_that_is_longer() -> None:
    inbox = FakePartition().extend([said("a.0.0-0-0", 1.0)])
    inbox.append(tick(), after_ms=DEADLINE_MS - 1)
    inbox.append(tick(), after_ms=1)
    assert [bool(one.letters) for one in folded(inbox, rules(window_ms=10))] == [False, False, True]


def test_what_was_said_and_taken_back_of_an_answer_that_never_came_counts_once() -> None:
    inbox = FakePartition().extend([said("a.0.0-0-0", 1.0), said("a.0.0-0-0", 0.0, id="back", type="retraction")])
    inbox.append(tick(), after_ms=20_000)
    assert folded(inbox, rules())[-1].dropped == {"feedback without an answer": 1}


def test_of_a_group_so_many_answers_are_spoken_of_before_it_is_closed() -> None:
    """What is dropped uses up no rater's day: there is room for the last word."""
    inbox = FakePartition(step_ms=0).extend(
        said(f"a.0.0-{number}-0", 1.0, rater="ann") for number in range(MAX_ANSWERS + 1)
    )
    inbox.append(said("a.0.0-0-0", 0.0, id="again", rater="ann"))
    state = State()
    results = folded(inbox, rules(limits=DayLimits(rater_answers=MAX_ANSWERS + 1, rater_share=0.0)), state)
    assert drops(results) == {"feedback about too many answers of a group": 1} and MAX_ANSWERS == 1024
    assert len(state.groups["a.0"].feedback) == MAX_ANSWERS


def test_an_answer_of_production_waits_for_its_window_and_not_a_moment_longer() -> None:
    group = request_group(session_name("acme", "chat"), 7, 1)
    inbox = FakePartition().extend([block(answer(group, 0, size=1, lane="live"))])
    inbox.append(tick(), after_ms=4_999)
    inbox.append(tick(), after_ms=1)
    assert [len(one.decisions) for one in folded(inbox, rules())] == [0, 0, 1]
    usual = FakePartition().extend([block(answer("a.0", 0, size=1))])
    assert [len(one.decisions) for one in folded(usual, rules())] == [1], "no other lane waits"
    assert [
        len(one.decisions) for one in folded(FakePartition().extend(inbox.arrivals[0].value for _ in "1"), RULES)
    ] == [1]


def test_another_attempt_of_a_group_that_is_over_is_superseded_once() -> None:
    first = [block(answer("a.0", number)) for number in range(2)]
    second = [block(answer("a.0", number, attempt=1)) for number in range(2)]
    results = folded(FakePartition().extend([*first, *second, *second]))
    assert [(one.closure.attempt, one.closure.outcome) for one in decisions(results)][1:] == [(1, "superseded")]


def test_a_group_is_trained_again_and_revised_only_so_often() -> None:
    closed = [block(answer("a.0", number)) for number in range(2)]
    words = [said("a.0.0-1-0", value / 10, id=str(value)) for value in range(6)]
    results = folded(FakePartition().extend([*closed, *words]), rules("retrain", retrainings=2, revisions=4))
    assert drops(results)["retrained often enough"] == 2 and drops(results)["revised often enough"] == 2
    assert [one.closure.revision for one in decisions(results)] == [0, 1, 2, 3, 4]


def test_the_first_turn_of_a_session_hears_of_later_ones_that_were_there_before_it() -> None:
    first = block(*(replace(one, turn=0) for one in turn(0).experiences))
    source = FeedbackRules(window_ms=5_000, late="amend", discount=0.5)
    given = Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source})
    state = State()
    folded(FakePartition().extend([turn(1), said(ref(1), 1.0), first]), given, state)
    assert [credit.turns for credit in state.groups[first.group].credits.values()] == [1]


def test_of_two_attempts_that_complete_with_one_record_the_first_wins() -> None:
    both = block(*(answer("a.0", 0, size=1, attempt=number) for number in (1, 0)))
    made = [(one.closure.attempt, one.closure.outcome) for one in decisions(folded(FakePartition().extend([both])))]
    assert made == [(1, "superseded"), (0, "buffered")]


def test_what_is_superseded_is_told_with_its_lane_and_its_place_in_the_order_of_issue() -> None:
    other = replace(answer("a.0", 0, attempt=0, lane="live"), sequence=412)
    inbox = FakePartition().extend([block(other), *(block(answer("a.0", number, attempt=1)) for number in range(2))])
    closure = decisions(folded(inbox))[0].closure
    assert (closure.outcome, closure.attempt, closure.lane, closure.sequence) == ("superseded", 0, "live", 412)


@pytest.mark.parametrize(
    ("late", "episode", "revisions", "reason"),
    [
        ("drop", 1, 16, "late feedback"),
        ("amend", 7, 16, "feedback for an unknown answer"),
        ("amend", 1, 0, "revised often enough"),
    ],
)
def test_a_word_that_was_dropped_uses_up_nobodys_limit(late: str, episode: int, revisions: int, reason: str) -> None:
    closed = [block(answer("a.0", number)) for number in range(2)]
    words = [said(f"a.0.0-{episode}-0", 0.5, id=str(number), rater="ann") for number in range(3)]
    still_open = [block(answer("b.0", 0, size=1, lane="live")), said("b.0.0-0-0", 1.0, rater="ann")]
    limited = rules(late, revisions=revisions, limits=DayLimits(rater_answers=1, rater_share=0.0))
    inbox = FakePartition().extend(closed)
    inbox.append(tick(), after_ms=5_000)
    results = folded(inbox.extend([*words, *still_open]), limited)
    assert {reason: count for reason, count in drops(results).items() if count} == {reason: 3}
    assert [len(one.closure.ratings or ()) for one in decisions(results)] == [0, 1]


def test_the_chain_is_told_when_and_where_the_record_lay() -> None:
    seen: list[Context] = []

    async def noting(experiences: Sequence[Experience], context: Context) -> ChainResult:
        seen.append(context)
        return await scored(experiences, context)

    inbox, state = FakePartition().extend([tick(), block(answer("a.0", 0, size=1))]), State()
    for arrival in inbox.arrivals:
        asyncio.run(fold(state, arrival, RULES, noting))
    (context,) = seen
    assert (context.time_ms, context.record_offset) == (inbox.time_ms, 1) and context.memories is state.memories


def test_what_came_late_is_told_where_the_group_is_closed_anew() -> None:
    inbox = FakePartition().extend([block(answer("a.0", 1))])
    inbox.append(tick(), after_ms=DEADLINE_MS)
    inbox.extend([block(answer("a.0", 0)), said("a.0.0-1-0", 0.5)])
    assert decisions(folded(inbox, rules()))[-1].closure.drops["late"] == 1


def test_words_that_are_sealed_are_compared_as_they_were_written() -> None:
    opened = {
        "x1": "It is too slow to be of any use to me at all today",
        "x2": "My name is spelled in the wrong way here",
    }
    source = FeedbackRules(window_ms=5_000, alike=1, within_ms=1_000)
    given = Rules(
        deadline_ms=DEADLINE_MS,
        keep_ms=10_000_000,
        sources={"csat": source},
        open_text=lambda text, of: opened[text[:2]],
    )
    words = [
        replace(said(f"{name}.0.0-0-0", 1.0, type="label"), text=text)
        for name, text in zip("abc", ("x1", "x2", "x1"), strict=True)
    ]
    assert drops(folded(FakePartition().extend(words), given)) == {"burst of near duplicates": 1}
    sealed = [replace(said(f"{name}.0.0-0-0", 1.0, type="label"), text=f"x1 {name * 40}") for name in "abc"]
    assert drops(folded(FakePartition().extend(sealed), given)) == {"burst of near duplicates": 2}


def test_a_late_word_uses_up_its_raters_limit_whether_it_changes_anything_or_not() -> None:
    for value in (0.5, 1.0):
        closed = [*(block(answer("a.0", number)) for number in range(2)), said("a.0.0-1-0", 1.0, rater="bob")]
        words = [said("a.0.0-1-0", value, id="1", rater="ann"), said("a.0.0-1-0", 0.0, id="2", rater="ann")]
        limited = rules("amend", limits=DayLimits(rater_answers=1, rater_share=0.0))
        assert sum(drops(folded(FakePartition().extend([*closed, *words]), limited)).values()) == 1
    again = [said("a.0.0-1-0", 1.0, id=name, rater="ann") for name in "abc"]
    closed = [block(answer("a.0", number)) for number in range(2)]
    limited = rules("amend", limits=DayLimits(rater_answers=2, rater_share=0.0))
    assert sum(drops(folded(FakePartition().extend([*closed, *again]), limited)).values()) == 1


def test_words_of_a_source_that_no_setting_names_are_heard_and_only_what_is_compared_is_opened() -> None:
    def opened(text: str, answer: str) -> str:
        raise AssertionError(f"{text} was opened")

    live = [block(answer(f"{name}.0", 0, size=1, lane="live")) for name in "abc"]
    words = [
        replace(said("a.0.0-0-0", 1.0, source="letters"), text="Thanks"),
        replace(said("b.0.0-0-0", 0.0), text="Thanks"),
        said("c.0.0-0-0", 0.5, source="forum"),
    ]
    sources = {
        "csat": FeedbackRules(window_ms=5_000),
        "forum": FeedbackRules(window_ms=5_000, alike=1, within_ms=1_000),
    }
    given = Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources=sources, open_text=opened)
    inbox = FakePartition().extend([*live, *words])
    inbox.append(tick(), after_ms=5_000)
    found = [rating for one in decisions(folded(inbox, given)) for rating in one.closure.ratings or ()]
    assert [(one.source, one.value) for one in found] == [("letters", 1.0), ("csat", 0.0), ("forum", 0.5)]


def test_an_answer_of_several_choices_waits_for_a_word_about_each() -> None:
    group = request_group(session_name("acme", "chat"), 7, 1)
    choices = block(*(answer(group, number, lane="live") for number in range(2)))
    words = [said(f"{group}.0-{number}-0", 1.0) for number in range(2)]
    assert [len(one.decisions) for one in folded(FakePartition().extend([choices, *words]), rules())] == [0, 0, 1]


def test_an_answer_whose_last_part_comes_when_its_window_ends_is_closed_by_that_part() -> None:
    inbox = FakePartition().extend([block(answer("a.0", 0, lane="live"))])
    inbox.append(block(answer("a.0", 1, lane="live")), after_ms=DEADLINE_MS // 2)
    assert [len(one.decisions) for one in folded(inbox, rules(window_ms=DEADLINE_MS // 2))] == [0, 1]


def test_nothing_is_learned_from_what_was_forgotten() -> None:
    store, subject = MemoryStore(), subject_name("acme", "ann")
    keys = Keys(store)
    sent = encode(sealed(block(replace(answer("a.0", 0), subject=subject)), keys, subject))
    keys.destroy(subject)
    gone = decode(sent, Keys(store).find)
    assert isinstance(gone, Block)
    (one,) = decisions(folded(FakePartition().extend([gone, block(answer("a.0", 1))])))
    assert (one.closure.experiences, one.closure.drops) == (1, {"forgotten": 1})
    assert [member.episode for part in one.blocks for member in part.experiences] == [1] and not one.dropped
