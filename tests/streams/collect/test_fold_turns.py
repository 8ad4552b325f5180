"""collect and sessions: what is said about one turn is credited to the turns before it, with a discount."""

import asyncio
import itertools
from pathlib import Path

import msgspec
import pytest

from infra.observe.metrics import Metrics
from schemas import Block, Control, Experience
from schemas.ids import partition_key, request_group
from schemas.topics import BUFFER, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import USUAL_PRIOR, FeedbackRules
from streams.collect.rules import Rules
from streams.collect.turns import MAX_TURNS
from tests.names import session_name
from tests.streams.collect.collecting import (
    DEADLINE_MS,
    FakePartition,
    answer,
    block,
    buffered,
    decisions,
    drops,
    folded,
    said,
    tick,
)
from tests.streams.deliveries import memory_log, stored, values

WINDOW_MS = 5_000
SESSION = session_name("acme", "chat-81")
GAMMA = 0.5


def rules(late: str = "amend", discount: float = GAMMA) -> Rules:
    source = FeedbackRules(window_ms=WINDOW_MS, late=late, discount=discount)  # type: ignore[arg-type]
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source})


def group_of_turn(number: int, session: str = SESSION) -> str:
    return request_group(session, 7, number)


def turn(number: int, session: str = SESSION, size: int = 1) -> Block:
    """The number-th answer of a session: before it stand its own question and two messages for each earlier turn."""
    made = [answer(group_of_turn(number, session), episode, size=size, lane="live") for episode in range(size)]
    return block(*(at_turn(one, 1 + 2 * number) for one in made))


def at_turn(one: Experience, messages: int) -> Experience:
    return msgspec.structs.replace(one, scores=(), turn=messages)


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
        kept = [one for one in decision.blocks if one.group == decision.closure.group]
        found[number] = kept[0].experiences[0].score("csat") if kept else None
    return found


def test_an_outcome_is_credited_to_earlier_turns_with_the_discount_of_each_turn_between() -> None:
    records = [turn(0), turn(1), turn(2), said(ref(2), 0.8)]
    assert last_scores(records, rules()) == {2: 0.8}, "the others wait for what is said of themselves"
    u = usually(0.8)
    expected = {0: credit(None, NAN, 0.8, usual=u), 1: credit(None, 0.8, usual=u), 2: 0.8}
    assert last_scores(records, rules(), WINDOW_MS) == pytest.approx(expected)


def test_without_a_discount_the_named_turn_alone_is_credited() -> None:
    records = [turn(0), turn(1), said(ref(1), 0.8)]
    assert last_scores(records, rules(discount=0.0)) == {1: 0.8}


def test_a_turn_gets_what_was_said_of_itself_and_what_comes_after() -> None:
    records = [said(ref(0), 0.5, rater="ann"), turn(0), turn(1), said(ref(1), 1.0, rater="ann")]
    u = usually(0.5, 1.0)
    assert last_scores(records, rules()) == pytest.approx({0: credit(0.5, 1.0, usual=u), 1: 1.0}), "as a new revision"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_whatever_order_turns_and_feedback_come_in_the_credit_is_the_same(order: tuple[int, ...]) -> None:
    records = [turn(0), turn(1), said(ref(1), 0.8), said(ref(0), 0.3, rater="bob")]
    found = last_scores([records[index] for index in order], rules())
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
        for decision in decisions(folded(inbox, rules()))
        if decision.closure.revision
    }
    assert heard == pytest.approx({0: credit(None, 0.8, usual=usually(0.8)), 1: 0.8})


def test_a_retraction_is_heard_by_earlier_turns_and_takes_back_what_it_took_back_there() -> None:
    back = said(ref(1), 0.0, id="back", type="retraction", rater="ann")
    records = [turn(0), turn(1), said(ref(0), 0.5, rater="ann"), said(ref(1), 0.8, rater="ann"), back]
    assert last_scores(records, rules()) == {0: 0.5, 1: None}


def test_repeated_feedback_is_credited_once_to_every_turn() -> None:
    once = said(ref(1), 0.8, id="x")
    expected = {0: credit(None, 0.8, usual=usually(0.8)), 1: 0.8}
    assert last_scores([turn(0), turn(1), once, once], rules(), WINDOW_MS) == pytest.approx(expected)


def test_other_sessions_and_turns_with_several_choices_hear_nothing() -> None:
    other = session_name("acme", "chat-82")
    records = [turn(0, other), turn(0, size=2), turn(1), said(ref(1), 0.8)]
    inbox = FakePartition().extend(records)
    assert list(buffered(folded(inbox, rules()))) == [(group_of_turn(1), 0)]


def test_late_feedback_under_drop_is_counted_and_no_turn_hears_it() -> None:
    inbox = FakePartition().extend([turn(0), turn(1)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.append(said(ref(1), 0.8))
    inbox.append(turn(2))
    results = folded(inbox, rules("drop"))
    assert drops(results)["late feedback"] == 1
    assert not any(decision.closure.revision for decision in decisions(results))


@pytest.mark.parametrize("late", ["drop", "amend", "retrain"])
def test_what_is_said_of_a_later_turn_ends_no_turns_wait_for_its_own_verdict(late: str) -> None:
    records = [turn(0), turn(1), said(ref(1), 0.8), said(ref(0), 0.1, rater="ann")]
    inbox = FakePartition().extend(records)
    results = folded(inbox, rules(late))
    expected = {0: credit(0.1, 0.8, usual=usually(0.8, 0.1)), 1: 0.8}
    assert last_scores(records, rules(late)) == pytest.approx(expected)
    assert drops(results) == {} and not any(decision.closure.revision for decision in decisions(results))


def test_a_turn_that_comes_late_puts_those_before_it_one_further_from_those_behind() -> None:
    records = [turn(0), turn(2), said(ref(2), 0.8), turn(1)]
    u = usually(0.8)
    expected = {0: credit(None, NAN, 0.8, usual=u), 1: credit(None, 0.8, usual=u), 2: 0.8}
    assert last_scores(records, rules(), WINDOW_MS) == pytest.approx(expected)


def test_what_is_said_of_a_later_turn_is_heard_by_a_bounded_number_before_it() -> None:
    number = MAX_TURNS + 3
    records = [*(turn(index) for index in range(number)), said(ref(number - 1), 1.0)]
    heard = last_scores(records, rules(discount=1.0), WINDOW_MS)
    assert sorted(index for index, score in heard.items() if score) == list(range(2, number))


def test_all_turns_of_a_session_and_what_is_said_about_them_lie_in_one_partition() -> None:
    assert {partition_key(group_of_turn(number)) for number in range(9)} == {SESSION}

    async def run() -> None:
        async with memory_log(partitions=8) as log:
            where = {
                (await log.publish(VERIFIED, record)).partition
                for number in range(6)
                for record in (turn(number), said(ref(number), 0.5))
            }
            assert len(where) == 1

    asyncio.run(run())


def test_a_worker_that_lost_its_memory_between_any_two_records_credits_the_same(tmp_path: Path) -> None:
    records = [turn(0), said(ref(2), 0.8), turn(1), said(ref(0), 1.0, id="own"), turn(2), said(ref(1), 0.0)]
    expected = last_scores(list(records), rules())

    async def run() -> None:
        async with memory_log() as log:
            for record in records:
                await log.publish(VERIFIED, record)
            settings = CollectSettings(folder=tmp_path, rules=rules(), steps=())
            for message in await stored(log, VERIFIED):
                collector = Collector(log, Metrics("process"), 0, settings)
                await collector.recover(message.offset, lambda: False)
                await collector.take([message.record])
                collector.close()
            newest = {
                int(sent.group.rpartition("-")[2]): sent.experiences[0].score("csat")
                for sent in await values(log, BUFFER)
                if isinstance(sent, Block)
            }
            assert newest == expected

    asyncio.run(run())


def test_what_a_later_turn_takes_back_is_taken_back_of_earlier_ones_however_often_they_were_revised() -> None:
    inbox = FakePartition().extend([turn(0), turn(1)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.extend([said(ref(1), 1.0), said(ref(1), 1.0, id="back", type="retraction")])
    results = folded(inbox, msgspec.structs.replace(rules(), revisions=1))
    first = [one.closure.revision for one in decisions(results) if one.closure.group == turn(0).group]
    assert first == [0, 1, 2] and "revised often enough" not in drops(results)


def test_a_word_that_comes_late_to_an_earlier_turn_is_counted_once() -> None:
    inbox = FakePartition().extend([turn(0)])
    inbox.append(tick(), after_ms=WINDOW_MS)
    inbox.extend([turn(1), turn(2), said(ref(2), 1.0), said(ref(1), 0.0)])
    assert drops(folded(inbox, rules("drop")))["late feedback"] == 2


@pytest.mark.parametrize("type", ["value", "correction"])
def test_a_complaint_about_the_first_turn_counts_after_any_number_of_rated_later_turns(type: str) -> None:
    """Revisions by credit and by feedback on the answer itself have a budget each."""
    inbox = FakePartition()
    for number in range(21):
        inbox.extend([turn(number), said(ref(number), 1.0)])
    complaint = msgspec.structs.replace(said(ref(0), 0.0, rater="bob", type=type), text="better")
    inbox.append(complaint)
    results = folded(inbox, msgspec.structs.replace(rules(discount=0.9), corrects=True))
    last = [one for one in decisions(results) if one.closure.group == turn(0).group][-1].closure
    assert "bob" in {rating.rater for rating in last.ratings or ()}
    assert drops(results) == {"revised often enough": 4 + 3 + 2 + 1}, "credit of the turns after the sixteenth"


def test_feedback_within_its_window_counts_though_the_answer_is_closed_and_late_feedback_is_dropped() -> None:
    inbox = FakePartition().extend([turn(0), said(ref(0), 1.0, rater="ann")])  # every source has spoken: closed
    inbox.append(said(ref(0), 0.0, id="2", rater="ann"), after_ms=WINDOW_MS - 20)
    inbox.append(said(ref(0), 0.5, id="3", rater="bob"), after_ms=20)
    results = folded(inbox, rules("drop", discount=0.0))
    ratings = [[rating.value for rating in one.closure.ratings or ()] for one in decisions(results)]
    assert ratings == [[1.0], [0.0]] and drops(results) == {"late feedback": 1}
