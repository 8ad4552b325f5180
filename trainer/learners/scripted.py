"""Learner without a model, for tests: a few numbers that every item of a batch changes, in order.

Guarantee: different batches, or the same items in another order, give different weights; the same batches give the same bits.
"""

import hashlib
import sys
from collections.abc import Mapping

import numpy as np

from infra.policies.policy import Adapter, Probe
from infra.policies.tensors import Tensor
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.learner import Phase, StepStats

SIZE = 8


class ScriptedLearner:
    """Learner for tests, whose weights are a hash chain of the batches. fail_at: Seeds of the steps that report a loss that is
    not finite. device: Name of the reported device. drift: Number added to every weight at every step, to imitate other
    kernels.
    """

    adapter: Adapter | None = None

    def __init__(
        self,
        *,
        model: str = "",
        config: TrainerConfig | None = None,
        fail_at: tuple[int, ...] = (),
        device: str = "cpu",
        drift: float = 0.0,
    ) -> None:
        self._device = device
        self._drift = np.float32(drift)
        self._weights = np.zeros(SIZE, dtype="<f4")
        self._steps = 0
        self._fail_at = frozenset(fail_at)

    def begin_phase(self, phase: Phase) -> None:
        self._steps = 0

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        if seed in self._fail_at:
            return StepStats(finite=False, loss=float("nan"), grad_norm=float("nan"), values={})
        digest = hashlib.sha256(self._weights.tobytes() + f"{self._steps}:{learning_rate}:{seed}".encode())
        for part in batch.microbatches:
            digest.update(part.target_N.tobytes() + part.behaviour_N.tobytes() + part.advantage_N.tobytes())
        self._weights = np.frombuffer(digest.digest(), dtype="<u4").astype("<f4") / np.float32(2**32)
        self._weights += self._drift
        self._steps += 1
        return StepStats(finite=True, loss=float(self._weights[0]), grad_norm=1.0, values={})

    def tensors(self) -> dict[str, Tensor]:
        return {"weights": Tensor("F32", (SIZE,), self._weights.tobytes())}

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        value = -float(self._weights[0])
        return Probe(sequences=sequences, logprobs=tuple((value,) * (len(tokens) - 1) for tokens in sequences))

    def greedy_accuracy(self, batch: PackedBatch) -> float:
        return min(1.0, self._steps / 10)

    def log_distances(self, batch: PackedBatch) -> np.ndarray:
        """The distances that a policy would have whose logprobs are all 0."""
        sums = np.zeros(batch.num_sequences)
        for rows in batch.microbatches:
            moved = np.where(rows.ratio_N, np.abs(rows.behaviour_N), 0.0)
            sums += np.bincount(rows.sequence_N, weights=moved, minlength=len(sums))
        return sums

    def numerics(self) -> dict[str, str]:
        return {"device": self._device}

    def save(self) -> dict[str, Tensor]:
        return self.tensors() | {"steps": Tensor("I64", (1,), np.asarray([self._steps], dtype="<i8").tobytes())}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if set(state) != {"weights", "steps"}:
            raise ValueError(f"state: got {sorted(state)}, expected weights and steps")
        self._weights = np.frombuffer(state["weights"].data, dtype="<f4").copy()
        self._steps = int(np.frombuffer(state["steps"].data, dtype="<i8")[0])

    def close(self) -> None:
        """Nothing is held."""
