"""The journal's reading rules: fences, first record wins, rollbacks."""

from schemas import Batch, Fence, Rollback, Skip
from trainer.journal import effective, pending_batches


def batch(step: int, token: int) -> Batch:
    return Batch(run="r", token=token, step=step, version=step, items=())


def test_records_of_a_lower_token_after_a_fence_count_for_nothing() -> None:
    records = [Fence(run="r", token=1), batch(0, 1), Fence(run="r", token=5), batch(1, 1), batch(1, 5)]
    entries, token = effective(records, "r")
    assert entries == [batch(0, 1), batch(1, 5)] and token == 5


def test_the_first_record_of_a_token_and_step_wins() -> None:
    first, second = batch(0, 1), Batch(run="r", token=1, step=0, version=9, items=())
    assert effective([first, second], "r")[0] == [first]


def test_another_run_is_another_journal() -> None:
    assert effective([Fence(run="other", token=9), batch(0, 1)], "r") == ([batch(0, 1)], -1)


def test_a_batch_and_its_skip_both_count() -> None:
    skip = Skip(run="r", token=1, step=0, reason="not finite")
    assert effective([batch(0, 1), skip], "r")[0] == [batch(0, 1), skip]


def test_rolled_back_batches_are_never_executed_again() -> None:
    back = Rollback(run="r", token=1, from_step=1, to_step=2, restored_version=1, version=3, reason="x")
    entries = [batch(0, 1), batch(1, 1), batch(2, 1), back, batch(3, 1)]
    assert [one.step for one in pending_batches(entries, after_step=-1)] == [0, 3]


def test_batches_before_the_checkpoint_are_not_executed_again() -> None:
    assert [one.step for one in pending_batches([batch(0, 1), batch(1, 1)], after_step=0)] == [1]
