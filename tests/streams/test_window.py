"""Ordered acks: only what is done, only in order, only for the generation that delivered it."""

from hypothesis import given
from hypothesis import strategies as st

from streams.stages.window import Ticket, Window


def taken(window: Window[int], partition: int, offset: int, generation: int = 1) -> Ticket:
    ticket = window.take(partition, offset, generation, offset)
    assert ticket is not None
    return ticket


@given(st.permutations(range(12)))
def test_handles_come_back_in_offset_order_whatever_finishes_first(order: list[int]) -> None:
    window: Window[int] = Window(64)
    tickets = [taken(window, 0, offset) for offset in range(12)]
    acked: list[int] = []
    done: set[int] = set()
    for place in order:
        done.add(place)
        acked += window.complete(tickets[place])
        assert acked == list(range(len(acked)))
        assert set(acked) <= done
    assert acked == list(range(12))
    assert window.num_in_flight() == 0


def test_partitions_do_not_wait_for_each_other() -> None:
    window: Window[int] = Window(64)
    taken(window, 0, 5)
    assert window.complete(taken(window, 1, 9)) == [9]


def test_gaps_between_offsets_do_not_hold_acks_back() -> None:
    window: Window[int] = Window(64)
    first, second = taken(window, 0, 5), taken(window, 0, 9)
    assert window.complete(second) == []
    assert window.complete(first) == [5, 9]


def test_late_completion_of_a_revoked_generation_acks_nothing() -> None:
    window: Window[int] = Window(64)
    stale = taken(window, 0, 5, generation=1)
    fresh = taken(window, 0, 5, generation=2)
    assert window.complete(stale) == []
    assert window.complete(fresh) == [5]


def test_a_record_of_an_older_generation_is_not_taken() -> None:
    window: Window[int] = Window(64)
    taken(window, 0, 5, generation=2)
    assert window.take(0, 6, 1, 6) is None


def test_the_same_record_is_in_flight_once_per_generation() -> None:
    window: Window[int] = Window(64)
    ticket = taken(window, 0, 5)
    assert window.take(0, 5, 1, 5) is None
    assert window.complete(ticket) == [5]
    assert window.take(0, 5, 1, 5) is None


def test_completing_twice_acks_once() -> None:
    window: Window[int] = Window(64)
    ticket = taken(window, 0, 5)
    assert window.complete(ticket) == [5]
    assert window.complete(ticket) == []


def test_forgotten_records_are_never_acked_and_block_nothing() -> None:
    window: Window[int] = Window(2)
    slow, quick = taken(window, 0, 5), taken(window, 0, 6)
    assert window.is_full(0, 1)
    assert window.forget() == [5, 6]
    assert not window.is_full(0, 1)
    assert window.complete(quick) == []
    assert window.complete(slow) == []


@given(st.lists(st.tuples(st.sampled_from(["take", "done", "rebalance"]), st.integers(0, 30)), max_size=120))
def test_nothing_is_acked_before_everything_earlier_of_its_generation_is_done(steps: list[tuple[str, int]]) -> None:
    window: Window[tuple[int, int]] = Window(8)
    generation, next_offset, committed = 1, 0, 0
    flying: list[Ticket] = []
    done: set[int] = set()
    for action, number in steps:
        if action == "take" and not window.is_full(0, generation):
            ticket = window.take(0, next_offset, generation, (generation, next_offset))
            assert ticket is not None
            flying.append(ticket)
            next_offset += 1
        elif action == "done" and flying:
            ticket = flying.pop(number % len(flying))
            if ticket.generation == generation:
                done.add(ticket.offset)
            for acked_generation, offset in window.complete(ticket):
                assert acked_generation == generation
                assert offset == committed
                assert offset in done
                committed += 1
        elif action == "rebalance":
            generation += 1
            done = set(range(committed))
            ticket = window.take(0, committed, generation, (generation, committed))
            assert ticket is not None
            flying.append(ticket)
            next_offset = committed + 1
