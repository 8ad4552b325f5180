"""The learner of many ranks, which tells a benchmark what it read: the hash of the state that it went on from, and its memory.

Loaded by the settings that `infra.cli.bench.life` writes, in the trainer's own processes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.cli.bench.peak import most_bytes
from infra.store.store import Store
from trainer.config import TrainerConfig
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.state.stored import StoredState


class ToldLearner(DeepSpeedLearner):
    """told: folder of a file for each rank. The others are of `DeepSpeedLearner`."""

    def __init__(self, model: str, config: TrainerConfig, *, told: str, stage: int = 2) -> None:
        super().__init__(model, config, stage=stage)
        self._folder_told = Path(told)

    def load(self, state: StoredState, *, without: Sequence[str] = ()) -> None:
        """As a learner does it, then the hash of what all ranks hold."""
        super().load(state, without=without)
        self._tell({"hash": self.state_hash()})

    def follow(self, store: Store) -> None:
        """What ranks other than 0 do."""
        super().follow(store)
        self._tell({"peak_bytes": most_bytes()})

    def close(self) -> None:
        """Rank 0."""
        super().close()
        self._tell({"peak_bytes": most_bytes()})

    def _tell(self, what: dict[str, object]) -> None:
        self._folder_told.mkdir(parents=True, exist_ok=True)
        with (self._folder_told / f"rank-{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")
