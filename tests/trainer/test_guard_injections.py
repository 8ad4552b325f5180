"""Fifty damages of every kind to a learning run: nothing unhealthy is published, and the run learns on."""

import asyncio
import random
import sys

import numpy as np
import pytest

from infra.cli.look.status import read_status
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy import Probe
from infra.policies.tensors import to_numpy
from infra.store.memory import MemoryStore
from schemas import Batch, Rollback, Saved, Skip
from tests.trainer.memory_run import CONFIG, FLOOR, STEPS, filled_log, journal, published, train
from trainer.batch.assemble import step_seed
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerGuardConfig
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner

INJECTIONS = 50
KINDS = ("nan steps", "nan weights", "spike", "unrefused spike", "weights collapse", "entropy collapse")
WARM_UP = 6  # steps of the warm-up in this run
EVERY = 2  # versions between checkpoints
GUARDED = {
    "checkpoint_every": EVERY,
    "max_skips": 2,
    "halt_on": ("entropy_collapse",),
    "guard": TrainerGuardConfig(window=8, min_steps=3, grad_norm=20, entropy=0.3, probe_shift=3.0),
}
BAD = 100.0  # weights of the scripted learner lie in [0, 1): one that is not sound is at least so large


class Tampered(ScriptedLearner):
    """A scripted learner that one thing happens to, at one step (at two, where one is forgiven)."""

    def __init__(self, kind: str, at: int) -> None:
        super().__init__()
        self._kind = kind
        steps = (at, at + 1) if kind == "nan steps" else (at,)
        self._seeds = {step_seed(3, step) for step in steps}

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        hit = seed in self._seeds
        if hit and (self._kind == "nan steps" or (self._kind == "spike" and max_grad_norm < 1000)):
            norm = 1000.0 if self._kind == "spike" else float("nan")
            return StepStats(finite=False, loss=0.5, grad_norm=norm, values={})
        super().step(batch, learning_rate=learning_rate, seed=seed)
        if hit and self._kind == "nan weights":
            self._weights = self._weights + np.float32("nan")
        elif hit and self._kind != "entropy collapse":
            self._weights = self._weights + np.float32(BAD)
        entropy = 0.01 if hit and self._kind == "entropy collapse" else 1.0
        norm = 1000.0 if hit and "spike" in self._kind else 1.0
        return StepStats(finite=True, loss=0.5, grad_norm=norm, values={"usual/entropy": entropy})

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        value = -float(self._weights[0])
        return Probe(sequences=sequences, logprobs=tuple((value,) * (len(one) - 1) for one in sequences))


async def injected(kind: str, at: int) -> None:
    store = MemoryStore()
    log = await filled_log(store)
    config = type(CONFIG)(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | GUARDED)
    learner = Tampered(kind, at)
    await train(log, store, learner, config)
    records = await journal(log)
    batches = [one for one in records if isinstance(one, Batch)]
    skips = [one for one in records if isinstance(one, Skip)]
    rollbacks = [one for one in records if isinstance(one, Rollback)]
    told = f"{kind} at step {at}: {skips} {rollbacks}"

    follower = PolicyFetcher(store, "main")
    versions = {event.version: follower.fetch(event) for event in await published(log)}
    weights = {version: to_numpy(policy.tensors["weights"]) for version, policy in versions.items()}
    assert all(np.isfinite(one).all() and (one < BAD).all() for one in weights.values()), told

    assert max(one.step for one in batches) - WARM_UP + 1 >= STEPS, told
    uses = [(item.id, item.use) for one in batches for item in one.items]
    assert len(set(uses)) == len(uses), f"quarantined batches came back: {told}"
    if kind == "spike":
        assert [one.step for one in skips] == [at] and not rollbacks, told
        assert "gradient norm 1e+03" in skips[0].reason
        return
    assert len(rollbacks) == 1, told
    (back,) = rollbacks
    assert at <= back.to_step <= at + 1 and back.from_step <= back.to_step, told
    np.testing.assert_array_equal(weights[back.version], weights[back.restored_version])
    healthy = [event.step for event in await published(log) if event.version > back.version]
    assert healthy and min(healthy) - at <= 2 * EVERY * FLOOR.pacing.steps_per_version, told


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_injected_is_never_published_and_the_run_learns_on(kind: str) -> None:
    chosen = random.Random(kind)
    for _ in range(-(-INJECTIONS // len(KINDS))):
        asyncio.run(injected(kind, WARM_UP + chosen.randint(3, STEPS - 4)))


def test_status_says_why_the_run_went_back() -> None:
    async def main() -> None:
        store = MemoryStore()
        log = await filled_log(store)
        config = type(CONFIG)(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | GUARDED)
        await train(log, store, Tampered("nan weights", WARM_UP + 5), config)
        state = await read_status(log, now_s=0.0, max_lag=1000)
        (line,) = state["rollbacks"]
        assert line.startswith("steps ") and "weights holds values that are not finite" in line

    asyncio.run(main())


def test_weights_that_a_warm_up_ruined_are_neither_published_nor_kept() -> None:
    async def main() -> None:
        store = MemoryStore()
        log = await filled_log(store)
        for _ in range(2):  # the journal decides: a restart comes to the same end
            with pytest.raises(ExceptionGroup) as raised:
                await train(log, store, Tampered("nan weights", WARM_UP - 1))
            assert raised.group_contains(RuntimeError, match=r"weights holds values that are not finite.*learning_rate")
        assert [event.version for event in await published(log)] == [0]
        assert [one.step for one in await journal(log) if isinstance(one, Saved)] == [-1]

    asyncio.run(main())
