"""TensorBoard: the trainer's diagnostics by step, and eval results by version, as event files.

Loss: the files are for eyes alone; what they show is in the log. A step that is executed again writes its points again.
"""

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from infra.log.log import Log
from schemas import EvalResult, topics


class Board:
    """One folder of event files. `tensorboard --logdir <folder>` shows them."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer  # takes a second to import

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(str(folder))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Diagnostics after an optimizer step."""
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def result(self, result: EvalResult) -> None:
        """Accuracy of a version."""
        self._writer.add_scalar(f"eval/{result.suite}", result.accuracy, result.version)
        for k, share in result.pass_at.items():
            self._writer.add_scalar(f"eval/{result.suite}/pass@{k}", share, result.version)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


async def follow_results(log: Log, board: Board) -> None:
    """Put eval results that arrive from here on onto the board."""
    async with aclosing(log.tail(topics.EVALS, "end")) as messages:
        async for message in messages:
            if isinstance(message.value, EvalResult):
                board.result(message.value)
