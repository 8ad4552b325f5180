"""Which turns of a session hear what of which, at the edges."""

import msgspec

from schemas.ids import request_group, session_name
from streams.collect.credit import FeedbackRules
from streams.collect.feedback import take_feedback
from streams.collect.group import AnswerFeedback, Attempt, Group, LaterCredit, LoggedFeedback
from streams.collect.turns import (
    MAX_TURNS,
    NO_TURN,
    counting,
    credited_turns,
    crediting,
    depth_of,
    late_credit,
    new_credits,
    session_named,
)  # fmt: skip
from tests.streams.collect.collecting import answer, block, said, tick

NAMES = frozenset({"csat"})
SESSION = session_name("acme", "chat-81")


def turn(number: int, depth: int, *values: float, winner: int = 0, **more: object) -> Group:
    group = Group(request_group(SESSION, 7, number), winner=winner, depth=depth, **more)
    ref = f"{group.id}.{max(winner, 0)}-0-0"
    for at, value in enumerate(values):
        take_feedback(
            group.feedback.setdefault(ref, AnswerFeedback()),
            LoggedFeedback(said(ref, value, id=str(at), rater=f"r{at}"), at, at),
        )
    return group


def test_a_turn_is_one_answer_of_a_session_and_nothing_else_is() -> None:
    one = msgspec.structs.replace(answer(request_group(SESSION, 7, 1), 0, size=1), turn=3)
    assert depth_of(one) == 3 and NO_TURN == -1
    assert depth_of(msgspec.structs.replace(one, group_size=2)) == NO_TURN
    assert depth_of(msgspec.structs.replace(one, group="a.0")) == NO_TURN
    assert crediting({"a": FeedbackRules(1, discount=0.1), "b": FeedbackRules(1)}) == {"a"}


def test_a_record_concerns_a_session_only_where_earlier_turns_are_credited() -> None:
    name = request_group(SESSION, 7, 1)
    value = block(answer(name, 0, size=1))
    assert session_named(value, name, NAMES) == session_named(said("x", 1.0), name, NAMES) == SESSION
    for other in ((value, None, NAMES), (value, name, frozenset()), (tick(), name, NAMES), (value, "a.0", NAMES)):
        assert session_named(*other) == ""


def test_the_turns_before_one_that_is_spoken_of_may_have_to_hear_and_at_most_so_many() -> None:
    turns = [turn(number, 2 * number) for number in range(MAX_TURNS + 3)]
    last, word = turns[-1], said("x", 1.0)
    found = credited_turns(last, word, [*reversed(turns), turn(900, -1)], NAMES)
    assert found == turns[2:-1] and len(found) == MAX_TURNS == 64
    assert credited_turns(turns[1], word, [turn(900, -1), *turns], NAMES) == turns[:1]
    two = block(*(msgspec.structs.replace(answer(turns[0].id, 0, size=1, part=part), turn=3 - part) for part in (0, 1)))
    assert credited_turns(None, two, [*turns[:2], turn(2, 4, 1.0)], NAMES) == turns[:2], (
        "its first part says where it stands"
    )
    assert (
        credited_turns(None, word, turns, NAMES)
        == credited_turns(last, said("x", 1.0, source="other"), turns, NAMES)
        == []
    )
    assert credited_turns(last, tick(), turns, NAMES) == []
    new = msgspec.structs.replace(answer(request_group(SESSION, 7, 500), 0, size=1), turn=3)
    assert credited_turns(None, block(new), turns, NAMES) == [], "nobody has said anything yet"
    assert credited_turns(None, block(new), [*turns[:2], turn(2, 4, 1.0)], NAMES) == turns[:2]


def test_a_word_about_a_turn_is_heard_by_those_before_it_by_how_many_turns_they_are_away() -> None:
    first, second, third, nothing = turn(1, 0), turn(2, 2), turn(3, 4, 0.75), turn(4, -1, 1.0)
    turns = [nothing, third, first, second]
    expected = [(first, third.id, LaterCredit(2, {"csat": 0.75})), (second, third.id, LaterCredit(1, {"csat": 0.75}))]
    assert new_credits(third, turns, NAMES, False) == expected
    assert new_credits(second, turns, NAMES, False) == [], "of it nobody said anything, and it did not just come"
    assert new_credits(second, turns, NAMES, True) == expected
    second.credits[third.id] = LaterCredit(1, {"csat": 0.75})
    first.credits[third.id] = LaterCredit(2, {"csat": 0.5})
    assert new_credits(third, turns, NAMES, False) == expected[:1]


def test_two_answers_at_one_place_of_a_session_are_the_same_distance_from_all_others() -> None:
    first, second, again, third = turn(1, 0), turn(2, 2), turn(3, 2, 0.25), turn(4, 4, 1.0)
    turns = [first, second, again, third]
    assert [(one.id, credit.turns) for one, _, credit in new_credits(third, turns, NAMES, False)] == [
        (first.id, 2), (second.id, 1), (again.id, 1)
    ]  # fmt: skip
    assert [one.id for one, _, _ in new_credits(again, turns, NAMES, False)] == [first.id]
    assert {told for _, told, _ in new_credits(second, turns, NAMES, True)} == {third.id}


def test_a_turn_further_away_than_the_most_hears_nothing() -> None:
    turns = [turn(number, 2 * number) for number in range(MAX_TURNS + 1)]
    last = turn(900, 2 * MAX_TURNS + 2, 1.0)
    found = new_credits(last, [*turns, last], NAMES, False)
    assert [credit.turns for _, _, credit in found] == list(range(MAX_TURNS, 0, -1)) and found[0][0] is turns[1]


def test_what_is_taken_back_is_taken_back_from_who_heard_it() -> None:
    first, second = turn(1, 0), turn(2, 2)
    first.credits[second.id] = LaterCredit(1, {"csat": 0.5})
    assert new_credits(second, [first, second], NAMES, False) == [(first, second.id, LaterCredit(1, {}))]


def test_a_closed_turn_is_credited_with_nothing_new_of_sources_that_no_longer_count_for_it() -> None:
    credit = LaterCredit(2, {"csat": 0.75, "thumbs": 0.25, "judge": 1.0})
    assert late_credit(None, credit, {"judge"}) == LaterCredit(2, {"csat": 0.75, "thumbs": 0.25})
    before = LaterCredit(1, {"csat": 0.1, "thumbs": 1.0, "judge": 0.5})
    assert late_credit(before, credit, {"judge"}) == LaterCredit(2, {"csat": 0.75, "thumbs": 0.25, "judge": 0.5})


def test_what_counts_of_a_turn_is_of_the_attempt_that_won_or_else_of_the_first() -> None:
    assert counting(turn(1, 0, 0.5, 1.0), NAMES) == {"csat": 0.75}
    assert counting(turn(1, 0, 0.5, winner=2), NAMES) == {"csat": 0.5}
    assert counting(turn(1, 0, 0.5, winner=-1), NAMES) == {"csat": 0.5}
    tries = {number: Attempt(number, 1, "live", 1, 1) for number in (3, 0)}
    assert counting(turn(1, 0, 0.5, winner=-1, attempts=tries), NAMES) == {"csat": 0.5}
    del tries[0]
    assert counting(turn(1, 0, 0.5, winner=-1, attempts=tries), NAMES) == {}
    assert counting(turn(1, 0, 0.5), frozenset({"judge"})) == {}
