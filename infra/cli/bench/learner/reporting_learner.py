"""The learner of many ranks with a report for a benchmark: the hash of the state that it went on from, and its memory.

Loaded by the settings that `infra.cli.bench.learner.life` writes, in the trainer's own processes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.cli.bench.common.peak import most_bytes
from infra.store.store import Store
from trainer.config import TrainerConfig
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.state.stored import StoredState


class ReportingLearner(DeepSpeedLearner):
    """reports: folder of a file for each rank. The others are of `DeepSpeedLearner`."""

    def __init__(self, model: str, config: TrainerConfig, *, reports: str, stage: int = 2) -> None:
        super().__init__(model, config, stage=stage)
        self._reports = Path(reports)

    def load(self, state: StoredState, *, without: Sequence[str] = ()) -> None:
        """As a learner does it, then the hash of what all ranks hold."""
        super().load(state, without=without)
        self._report({"hash": self.state_hash()})

    def follow(self, store: Store) -> None:
        """What ranks other than 0 do."""
        super().follow(store)
        self._report({"peak_bytes": most_bytes()})

    def close(self) -> None:
        """Rank 0."""
        super().close()
        self._report({"peak_bytes": most_bytes()})

    def _report(self, what: dict[str, object]) -> None:
        self._reports.mkdir(parents=True, exist_ok=True)
        with (self._reports / f"rank-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")
