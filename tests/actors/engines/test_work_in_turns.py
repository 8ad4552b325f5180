"""Work that takes turns with whoever asks for it."""

import time

import pytest

from actors.engines.vllm.turns import TURN_S, InTurns, Turns


def steps_of(num: int, log: list[str], each_s: float = 0.0):
    def work(turns: Turns[int]) -> int:
        total = 0
        for one in turns(range(num)):
            log.append("work")
            time.sleep(each_s)
            total += one
        return total

    return work


def test_work_and_whoever_asks_for_it_never_run_at_once():
    """Each item takes as long as a turn: so they alternate strictly, and nothing is done between two turns."""
    log: list[str] = []
    made = InTurns(steps_of(5, log, each_s=1.2 * TURN_S))
    assert log == []
    while not made.take():
        seen = len(log)
        log.append("step")
        time.sleep(TURN_S)
        assert len(log) == seen + 1, "the work went on while a step ran"
    assert made.result() == 10 and log.count("work") == 5
    assert ["work", "work"] not in [log[at : at + 2] for at in range(len(log) - 2)]


def test_short_work_is_done_in_one_turn():
    log: list[str] = []
    made = InTurns(steps_of(3, log))
    assert made.take() and made.take() and made.result() == 3


def test_what_the_work_raises_is_raised_where_its_result_is_asked_for():
    def work(turns: Turns[int]) -> int:
        raise ValueError("no")

    made = InTurns(work)
    assert made.take()
    with pytest.raises(ValueError, match="no"):
        made.result()


@pytest.mark.parametrize("turns", [0, 1])
def test_work_that_is_left_ends_and_lets_go_of_what_it_held(turns):
    log: list[str] = []
    made = InTurns(steps_of(9, log, each_s=1.2 * TURN_S))
    for _ in range(turns):
        assert not made.take()
    made.leave()
    assert not made._thread.is_alive() and len(log) == turns
