"""Fold and sessions: credit of earlier turns, and turns that close together."""

import functools
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas import Block, Control, Join, Score
from schemas.fields import HISTORY_REWRITTEN
from schemas.ids import partition_key, request_group
from schemas.topics import VERIFIED
from streams.collect.decision import Folded
from streams.collect.feedback import USUAL_PRIOR, FeedbackRules
from streams.collect.rules import Rules
from streams.collect.state import LaterCredit, State
from streams.collect.turns import MAX_JOINED, MAX_TURNS, late_credit
from tests.names import session_name
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    WINDOW_MS,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    drops,
    folded,
    rules,
    said,
    tick,
)
from tests.streams.deliveries import memory_log

SESSION = session_name("acme", "chat-81")
GAMMA = 0.5


turn_rules = functools.partial(rules, discount=GAMMA)


def group_of_turn(number: int, session: str = SESSION) -> str:
    return request_group(session, 7, number)


def turn(number: int, session: str = SESSION, size: int = 1) -> Block:
    """The number-th answer of a session: before it stand its own question and two messages for each earlier turn."""
    made = [answer(group_of_turn(number, session), episode, size=size, lane="live") for episode in range(size)]
    return block(*(msgspec.structs.replace(item, scores=(), turn=1 + 2 * number) for item in made))


def ref(number: int) -> str:
    return f"hr-{group_of_turn(number)}.0-0-0"


def credit(own: float | None, *later: float, usual: float = 0.5) -> float:
    """v + Σ γ^k (v_k - u); of an answer that nobody spoke of, v = u. NaN: nobody spoke of that one."""
    more = sum(GAMMA ** (k + 1) * (value - usual) for k, value in enumerate(later) if value == value)
    return (usual if own is None else own) + more


def usually(*verdicts: float) -> float:
    """The usual verdict after so few: filled up with 0.5."""
    return (sum(verdicts) + (USUAL_PRIOR - len(verdicts)) * 0.5) / USUAL_PRIOR


NAN = float("nan")


def last_scores(records: list[Block | Control], given: Rules, *ticks: int) -> dict[int, float | None]:
    """Turn to the csat of its newest revision."""
    inbox = FakePartition().extend(records)
    for after_ms in ticks:
        inbox.append(tick(), after_ms=after_ms)
    found: dict[int, float | None] = {}
    for decision in decisions(folded(inbox, given)):
        number = int(decision.closure.group.rpartition("-")[2])
        kept = [sent_block for sent_block in decision.blocks if sent_block.group == decision.closure.group]
        found[number] = kept[0].experiences[0].score("csat") if kept else None
    return found


def test_an_outcome_is_credited_to_earlier_turns_with_the_discount_of_each_turn_between() -> None:
    records = [turn(0), turn(1), turn(2), said(ref(2), 0.8)]
    assert last_scores(records, turn_rules()) == {2: 0.8}, "the others wait for what is said of themselves"
    u = usually(0.8)
    expected = {0: credit(None, NAN, 0.8, usual=u), 1: credit(None, 0.8, usual=u), 2: 0.8}
    assert last_scores(records, turn_rules(), WINDOW_MS) == pytest.approx(expected)


def test_a_turn_gets_what_was_said_of_itself_and_what_comes_after() -> None:
    records = [said(ref(0), 0.5, rater="ann"), turn(0), turn(1), said(ref(1), 1.0, rater="ann")]
    u = usually(0.5, 1.0)
    assert last_scores(records, turn_rules()) == pytest.approx({0: credit(0.5, 1.0, usual=u), 1: 1.0}), (
        "as a new revision"
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_whatever_order_turns_and_feedback_come_in_the_credit_is_the_same(order: tuple[int, ...]) -> None:
    records = [turn(0), turn(1), said(ref(1), 0.8), said(ref(0), 0.3, rater="bob")]
    found = last_scores([records[index] for index in order], turn_rules())
    # What is usual depends on what was said before, and that on the order.
    possible = [credit(0.3, 0.8, usual=usually(*before)) for before in ((0.3,), (0.8,), (0.3, 0.8))]
    assert found[1] == 0.8 and any(found[0] == pytest.approx(value) for value in possible)


def test_late_feedback_is_credited_to_the_right_turn_and_to_no_later_one() -> None:
    closed = [turn(0), turn(1), turn(2)]
    inbox = FakePartition().extend(closed)
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.append(said(ref(1), 0.8))
    heard = {
        int(decision.closure.group.rpartition("-")[2]): decision.blocks[0].experiences[0].score("csat")
        for decision in decisions(folded(inbox, turn_rules()))
        if decision.closure.revision
    }
    assert heard == pytest.approx({0: credit(None, 0.8, usual=usually(0.8)), 1: 0.8})


def test_a_retraction_is_heard_by_earlier_turns_and_takes_back_what_it_took_back_there() -> None:
    back = said(ref(1), 0.0, id="back", type="retraction", rater="ann")
    records = [turn(0), turn(1), said(ref(0), 0.5, rater="ann"), said(ref(1), 0.8, rater="ann"), back]
    assert last_scores(records, turn_rules()) == {0: 0.5, 1: None}


def test_other_sessions_and_turns_with_several_choices_hear_nothing() -> None:
    other = session_name("acme", "chat-82")
    records = [turn(0, other), turn(0, size=2), turn(1), said(ref(1), 0.8)]
    inbox = FakePartition().extend(records)
    assert list(buffered(folded(inbox, turn_rules()))) == [(group_of_turn(1), 0)]


def test_late_feedback_under_drop_is_counted_and_no_turn_hears_it() -> None:
    inbox = FakePartition().extend([turn(0), turn(1)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.append(said(ref(1), 0.8))
    inbox.append(turn(2))
    results = folded(inbox, turn_rules("drop"))
    assert drops(results)["late feedback"] == 1
    assert not any(decision.closure.revision for decision in decisions(results))


def test_credit_in_time_under_drop_stays_when_another_source_comes_late() -> None:
    before, came = LaterCredit(1, {"csat": 0.8}), LaterCredit(1, {"csat": 0.1, "resolved": 1.0})
    assert late_credit(before, came, ["csat"]) == LaterCredit(1, {"csat": 0.8, "resolved": 1.0})
    assert late_credit(None, came, ["csat"]) == LaterCredit(1, {"resolved": 1.0})


@pytest.mark.parametrize("late", ["drop", "amend", "retrain"])
def test_what_is_said_of_a_later_turn_ends_no_turns_wait_for_its_own_verdict(late: str) -> None:
    records = [turn(0), turn(1), said(ref(1), 0.8), said(ref(0), 0.1, rater="ann")]
    inbox = FakePartition().extend(records)
    results = folded(inbox, turn_rules(late))
    expected = {0: credit(0.1, 0.8, usual=usually(0.8, 0.1)), 1: 0.8}
    assert last_scores(records, turn_rules(late)) == pytest.approx(expected)
    assert drops(results) == {} and not any(decision.closure.revision for decision in decisions(results))


def test_what_is_said_of_a_later_turn_is_heard_by_a_bounded_number_before_it() -> None:
    number = MAX_TURNS + 3
    records = [*(turn(index) for index in range(number)), said(ref(number - 1), 1.0)]
    heard = last_scores(records, turn_rules(discount=1.0), WINDOW_MS)
    assert sorted(index for index, score in heard.items() if score) == list(range(2, number))


async def test_all_turns_of_a_session_and_what_is_said_about_them_lie_in_one_partition() -> None:
    assert {partition_key(group_of_turn(number)) for number in range(9)} == {SESSION}

    async with memory_log(partitions=8) as log:
        where = {
            (await log.publish(VERIFIED, record)).partition
            for number in range(6)
            for record in (turn(number), said(ref(number), 0.5))
        }
        assert len(where) == 1


@pytest.mark.parametrize("type", ["value", "correction"])
def test_a_complaint_about_the_first_turn_counts_after_any_number_of_rated_later_turns(type: str) -> None:
    """Revisions by credit and by feedback on the answer itself have a budget each."""
    inbox = FakePartition()
    for number in range(21):
        inbox.extend([turn(number), said(ref(number), 1.0)])
    complaint = msgspec.structs.replace(said(ref(0), 0.0, rater="bob", type=type), text="better")
    inbox.append(complaint)
    results = folded(inbox, msgspec.structs.replace(turn_rules(discount=0.9), corrects=True))
    last = [decision for decision in decisions(results) if decision.closure.group == turn(0).group][-1].closure
    assert "bob" in {rating.rater for rating in last.ratings or ()}
    assert drops(results) == {"revised often enough": 4 + 3 + 2 + 1}, "credit of the turns after the sixteenth"


def test_feedback_within_its_window_counts_though_the_answer_is_closed_and_late_feedback_is_dropped() -> None:
    inbox = FakePartition().extend([turn(0), said(ref(0), 1.0, rater="ann")])  # every source has spoken: closed
    inbox.append(said(ref(0), 0.0, id="2", rater="ann"), after_ms=WINDOW_MS - 20)
    inbox.append(said(ref(0), 0.5, id="3", rater="bob"), after_ms=20)
    results = folded(inbox, turn_rules("drop", discount=0.0))
    ratings = [[rating.value for rating in decision.closure.ratings or ()] for decision in decisions(results)]
    assert ratings == [[1.0], [0.0]] and drops(results) == {"late feedback": 1}


SESSION_MS = 1_000


def session_rules(
    *, window_ms: int = WINDOW_MS, discount: float = 0.0, turns: int = 1_000, late: str = "amend"
) -> Rules:
    """Feedback within a time, where that is not 0."""
    source = FeedbackRules(window_ms=window_ms, late=late, discount=discount)  # type: ignore[arg-type]
    return Rules(
        deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source} if window_ms else {},
        session_ms=SESSION_MS, session_turns=turns,
    )  # fmt: skip


def exact(number: int) -> Block:
    """A turn with a score of its own, so that it goes on without feedback."""
    return marked(number, scores=turn_scores())


def marked(number: int, **fields: object) -> Block:
    return Block(tuple(msgspec.structs.replace(member, **fields) for member in turn(number).experiences))


def turn_scores() -> tuple[Score, ...]:
    return (Score(name="exact", value=1.0),)


def sent(results: list[Folded]) -> list[tuple[int, int, Join | None]]:
    """(turn, revision, join) of what went on, in its order."""
    found = []
    for decision in decisions(results):
        members = [member for sent_block in decision.blocks for member in sent_block.experiences]
        found += [(int(member.group.rpartition("-")[2]), decision.closure.revision, member.join) for member in members]
    return found


def joins(results: list[Folded]) -> list[list[int]]:
    """The turns of each join, in the order in which they were closed; those that went on alone each for itself."""
    found: dict[str, list[int]] = {}
    for number, _, join in sent(results):
        found.setdefault(join.name if join is not None else f"alone {number}", []).append(number)
    return list(found.values())


def test_turns_are_closed_together_once_their_session_is_silent_in_the_order_of_their_turns() -> None:
    inbox = FakePartition().extend([exact(2), exact(0), exact(1)])
    assert joins(folded(inbox, session_rules(window_ms=0))) == []
    inbox.append(tick(), after_ms=SESSION_MS)
    results = folded(inbox, session_rules(window_ms=0))
    name = group_of_turn(0)
    assert sent(results) == [(0, 0, Join(name, 2)), (1, 0, Join(name, 1)), (2, 0, Join(name, 0))]
    assert [decision.closure.outcome for decision in decisions(results)] == ["buffered"] * 3


def test_a_session_waits_for_the_feedback_of_its_slowest_turn_and_each_is_credited_with_its_own() -> None:
    inbox = FakePartition().extend([turn(0), turn(1), turn(2), said(ref(0), 0.2), said(ref(2), 0.9)])
    inbox.append(tick(), after_ms=2 * SESSION_MS)
    assert joins(folded(inbox, session_rules())) == [], "turn 1 may still be spoken of"
    inbox.append(said(ref(1), 0.5))
    results = folded(inbox, session_rules())
    assert joins(results) == [[0, 1, 2]]
    rewards = [member.reward for d in decisions(results) for block in d.blocks for member in block.experiences]
    assert rewards == [0.2, 0.5, 0.9]


def test_turns_that_nobody_spoke_of_are_dropped_and_the_others_are_joined_without_them() -> None:
    inbox = FakePartition().extend([turn(0), turn(1), turn(2), said(ref(0), 0.2), said(ref(2), 0.9)])
    inbox.append(tick(), after_ms=WINDOW_MS + SESSION_MS)
    results = folded(inbox, session_rules())
    assert sent(results) == [(0, 0, Join(group_of_turn(0), 1)), (2, 0, Join(group_of_turn(0), 0))]
    assert drops(results) == {"unlabelled": 1}


def test_a_client_that_ends_its_session_has_it_closed_at_once_and_what_comes_then_is_another() -> None:
    inbox = FakePartition().extend(
        [exact(0), exact(1), marked(2, scores=turn_scores(), ends_session=True), exact(3), exact(4)]
    )
    assert joins(folded(inbox, session_rules(window_ms=0))) == [[0, 1, 2]]
    inbox.append(tick(), after_ms=SESSION_MS)
    assert joins(folded(inbox, session_rules(window_ms=0))) == [[0, 1, 2], [3, 4]]


def test_rewritten_history_closes_what_came_before_it() -> None:
    rewritten = marked(2, scores=turn_scores(), part_reason=HISTORY_REWRITTEN)
    inbox = FakePartition().extend([exact(0), exact(1), rewritten, exact(3)])
    assert joins(folded(inbox, session_rules(window_ms=0))) == [[0, 1]]
    inbox.append(tick(), after_ms=SESSION_MS)
    assert joins(folded(inbox, session_rules(window_ms=0))) == [[0, 1], [2, 3]]


def test_a_session_without_an_end_is_closed_in_runs() -> None:
    inbox = FakePartition().extend(exact(number) for number in range(2 * MAX_JOINED + 1))
    results = folded(inbox, session_rules(window_ms=0))
    assert joins(results) == [list(range(MAX_JOINED)), list(range(MAX_JOINED, 2 * MAX_JOINED))]


def test_where_too_many_turns_wait_the_sessions_that_began_first_are_closed_early() -> None:
    state, inbox = State(), FakePartition()
    for number in range(40):
        for at in range(2):
            made = turn(at, session_name("acme", f"chat-{number}"))
            inbox.append(
                Block(tuple(msgspec.structs.replace(member, scores=turn_scores()) for member in made.experiences))
            )
    results = folded(inbox, session_rules(window_ms=0, turns=20), state)
    assert state.num_held() <= 20 and sum(result.closed_early for result in results) >= 30
    assert len(sent(results)) + state.num_held() == 80
    inbox.append(tick(), after_ms=SESSION_MS)
    assert len({(name.name if name else "") for _, _, name in sent(results)} - {""}) >= 29
    assert len(sent(folded(inbox, session_rules(window_ms=0, turns=20)))) == 80


def test_without_the_setting_each_turn_is_closed_by_itself_also_those_that_waited_before() -> None:
    state, inbox = State(), FakePartition().extend([exact(0), exact(1)])
    folded(inbox, session_rules(window_ms=0), state)
    assert state.num_held() == 2
    off = msgspec.structs.replace(session_rules(window_ms=0), session_ms=0)
    inbox.append(tick(), after_ms=SESSION_MS)
    assert sorted(sent(folded(inbox, off, state)), key=lambda entry: entry[0]) == [(0, 0, None), (1, 0, None)]
    assert state.num_held() == 0 and joins(folded(FakePartition().extend([exact(0), exact(1)]), off)) == [[0], [1]]


@settings(deadline=None)
@given(
    order=st.permutations(list(range(6))),
    words=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.1, 0.9]), st.integers(1, 4_000)), max_size=8),
    gaps=st.lists(st.integers(0, 3_000), min_size=6, max_size=6),
    ends=st.integers(0, 8),
)
def test_whatever_comes_each_turn_is_closed_once_and_counts_as_it_would_alone(
    order: list[int], words: list[tuple[int, float, int]], gaps: list[int], ends: int
) -> None:
    inbox, alone = FakePartition(), FakePartition()
    for number, gap in zip(order, gaps, strict=True):
        for item in (inbox, alone):
            item.append(marked(number, ends_session=number == ends), after_ms=gap)
    for at, (number, value, gap) in enumerate(words):
        for item in (inbox, alone):
            item.append(said(ref(number), value, id=f"w{at}"), after_ms=gap)
    for item in (inbox, alone):
        item.append(tick(), after_ms=3 * (WINDOW_MS + SESSION_MS))
    last = [
        final_rewards(item, given)
        for item, given in ((inbox, session_rules()), (alone, msgspec.structs.replace(session_rules(), session_ms=0)))
    ]
    assert last[0] == last[1]


def final_rewards(inbox: FakePartition, given: Rules) -> dict[int, float | None]:
    """Turn to the reward of its newest revision; each is closed once as revision 0."""
    state = State()
    found: dict[int, float | None] = {}
    results = folded(inbox, given, state)
    first = [d.closure.group for d in decisions(results) if d.closure.revision == 0]
    assert sorted(first) == sorted(set(first)) and len(first) == 6 and state.num_held() == 0
    for decision in decisions(results):
        number = int(decision.closure.group.rpartition("-")[2])
        found[number] = next(
            (member.reward for block in decision.blocks for member in block.experiences), found.get(number)
        )
    return found
