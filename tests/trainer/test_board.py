"""TensorBoard files hold what the trainer reported, by step, and what evals found, by version."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from schemas import EvalResult
from trainer.loop.report import Board


def test_what_was_written_is_read_back_by_step_and_version(tmp_path: Path) -> None:
    board = Board(tmp_path / "tensorboard")
    board.step(3, {"loss": 0.5, "usual/ess": 0.25})
    board.step(4, {"loss": 0.25, "usual/ess": 0.5})
    board.result(
        EvalResult(policy="main", version=7, suite="dev", num_tasks=4, num_correct=3, pass_at={"1": 0.75, "2": 1.0})
    )
    board.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()

    def points(name: str) -> list[tuple[int, float]]:
        return [(event.step, float(event.tensor_proto.float_val[0])) for event in read.Tensors(name)]

    assert points("train/loss") == [(3, 0.5), (4, 0.25)]
    assert points("train/usual/ess") == [(3, 0.25), (4, 0.5)]
    assert points("eval/dev") == [(7, 0.75)] and points("eval/dev/pass@2") == [(7, 1.0)]
