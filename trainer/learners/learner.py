"""The learner: holds the model and the optimizer, turns one packed batch into one optimizer step.

Guarantees (one contract, every learner): a step whose loss or gradient is not finite changes nothing and says so;
`save` then `restore` continues to the same bits in one process on one model of CPU; `tensors` are exactly the weights that
the forward uses.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from infra.policies.manifest import HashedTensors
from infra.policies.policy import Adapter, Probe
from infra.policies.tensors import Tensor
from infra.settings.plugin import load
from infra.store.store import Store
from trainer.batch.batch import PackedBatch
from trainer.config import LOSSES, TrainerConfig, loss_use
from trainer.learners.channel import Channel
from trainer.learners.snapshot import Snapshot
from trainer.state import StoredState, find_layout, whole_pieces

Phase = Literal["warmup", "train"]

# Learners that ship, and the options of each that settings which came with data may set: no path, no address.
LEARNERS: Mapping[str, tuple[str, ...]] = {
    "trainer.learners.torch:TorchLearner": ("device",),
    "trainer.learners.deepspeed:DeepSpeedLearner": ("stage", "offload"),
    "trainer.learners.scripted:ScriptedLearner": ("fail_at", "device", "drift"),
}


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one step.

    finite: False where a loss or gradient was not, and nothing was changed. loss: of the whole step (the mean over its
    minibatches where there are several). grad_norm: before clipping, the largest. values: diagnostics of `trainer.health`, by
    name. reward: mean over the trained experiences, which the loop fills in; None without rewards. seconds: by part of the
    step, of learners that can measure without waiting for a card: "gradients" (forward and backward), "update" (work that a
    card still runs counts in the part that waits for it).
    """

    finite: bool
    loss: float
    grad_norm: float
    values: Mapping[str, float]
    reward: float | None = None
    seconds: Mapping[str, float] = {}


class Learner(Protocol):
    """One trainable policy. Not thread-safe; calls block for as long as they compute.

    adapter: the adapter that `tensors` and the state hold, None for the whole model; it never changes.
    """

    adapter: Adapter | None

    def begin_phase(self, phase: Phase) -> None:
        """Start a fresh optimizer. In "warmup" every lane weighs 1; a new learner is in "train"."""

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        """Forward, backward and one optimizer step (m minibatch steps where a loss asks for them).

        seed: of everything random in the step. max_grad_norm: before clipping; a larger norm counts as not finite.
        ValueError for an empty batch, a lane without an objective, or tokens without an importance ratio under a loss that
        forms one: nothing is changed then either.
        """

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the policy in its published dtype, by the names of its folder."""

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        """Logprobs of `sequences` under `tensors()`."""

    def greedy_accuracy(self, batch: PackedBatch) -> float:
        """Share of sequences whose every sampled token is the argmax (one teacher-forced forward)."""

    def log_distances(self, batch: PackedBatch) -> np.ndarray:
        """Σ |log π_θ - log μ| over the tokens of each sequence that have a ratio, [num_sequences] float64."""

    def numerics(self) -> dict[str, str]:
        """The facts besides a batch that the bits of a step depend on, by name; "device" is cpu or not."""

    def save(self) -> dict[str, Tensor]:
        """Weights, optimizer state and phase: everything `restore` needs."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `save`; ValueError names a tensor or adapter that does not fit, and nothing is changed then."""

    def close(self) -> None:
        """Release all resources and end the other ranks; the last call."""


@runtime_checkable
class Ranks(Protocol):
    """A learner of several processes. Rank 0 is called; the others follow it. Each holds, saves and reads its own pieces."""

    rank: int

    def follow(self, store: Store) -> None:
        """Execute the orders of rank 0 until it closes. Blocks. store: where states lie, the same as rank 0's."""

    def snapshot(self, store: Store, folder: str) -> Snapshot:
        """Copy the state to host memory, each rank its own pieces. folder: where the snapshot will be written."""

    def verify(self, state: StoredState) -> None:
        """Read a stored state, each rank a share, and compare its hashes. ValueError names rank and object."""


@runtime_checkable
class InHostMemory(Protocol):
    """A learner that may hold its state in host memory, where a copy for a checkpoint would take as much again."""

    def held(self) -> dict[str, Tensor] | None:
        """The state of `save` without a copy, until the next step; None where it lies elsewhere."""


def take_snapshot(learner: Learner, store: Store, folder: str) -> Snapshot:
    """A learner's snapshot: a copy in host memory; a state that is there already is stored at once. Raises StoreError."""
    if isinstance(learner, Ranks):
        return learner.snapshot(store, folder)
    held = learner.held() if isinstance(learner, InHostMemory) else None
    state = learner.save() if held is None else held
    snapshot = Snapshot(Channel(alone=True), store, folder, find_layout(state), whole_pieces(state))
    if held is not None:
        snapshot.write()
    return snapshot


def take_weights(learner: Learner) -> HashedTensors:
    return HashedTensors(learner.tensors())


def take_from(learner: Learner) -> Callable[[StoredState], Mapping[str, Tensor]]:
    """Verifier of a checkpoint's state for this learner: one process reads it whole, ranks read shares."""
    if not isinstance(learner, Ranks):
        return dict
    ranks = learner

    def verified(state: StoredState) -> StoredState:
        ranks.verify(state)
        return state

    return verified


def open_learner(config: TrainerConfig, model: str) -> Learner:
    """The configured learner on a model folder. Raises ConfigError."""
    options = {"model": model, "config": config, **config.learner.options}
    learner: Learner = load(config.learner.use, options, "trainer.learner")
    return learner


def foreign_names(config: TrainerConfig) -> tuple[str, ...]:
    """Every setting that names something else, as `path = "value"`; empty where all of it ships."""
    found = []
    options = LEARNERS.get(config.learner.use)
    if options is None:
        found.append(f'trainer.learner.use = "{config.learner.use}"')
    else:
        unknown = [name for name in config.learner.options if name not in options]
        found += [f"trainer.learner.options.{name} = {config.learner.options[name]!r}" for name in unknown]
    shipped = {*LOSSES, *(loss_use(name) for name in LOSSES)}
    for lane, lane_config in config.lanes.items():
        if lane_config.loss not in shipped:
            found.append(f'trainer.lanes.{lane}.loss = "{lane_config.loss}"')
    return tuple(found)
