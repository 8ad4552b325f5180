"""How much an objective suffers from old samples: reinforcement on the demo's task, every batch a fixed number of versions old.

Off the log, in one process: the batch trained at version v was sampled at v - lag (the first ones at version 0, so that
every run makes the same number of steps). All runs of a seed begin with the same weights, after the same supervised
warm-up, and go on with the same learning rate. What is compared is held-out accuracy, greedily: the mean of the last
looks, since a single one moves by some points. Samples that are n versions old also delay learning by n steps, whatever
the loss makes of them: compare where the curves have flattened.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import msgspec

from infra.cli.bench.common.finished import read_finished, write_finished
from infra.cli.bench.learning.adding import (
    MAX_TOKENS,
    Problems,
    accuracy,
    deck,
    demonstration,
    opened,
    policy_of,
    problems,
    sample,
)
from infra.cli.demo.char_model import Size, build_char_model

if TYPE_CHECKING:
    from infra.policies.tensors import Tensor
    from trainer.batch.batch import TrainItem
    from trainer.config import TrainerConfig
    from trainer.learners.torch import TorchLearner

LOSSES = ("dppo", "decoupled", "grpo", "reinforce")
LABELS = {"reinforce": "policy gradient, uncorrected"}
VARIED = ("losses", "lags", "seeds")
EVERY = 10  # steps between looks at the held-out tasks
Say = Callable[[str], None]


class OffPolicyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    losses: by name. lags: versions between sampling and training. seeds: one run each. steps: after the warm-up.
    groups, size: of one step. learning_rate: after the warm-up. warm_steps: supervised ones. settled: how many of the
    last looks make the final accuracy. model: how large.
    """

    losses: tuple[str, ...] = LOSSES
    lags: tuple[int, ...] = (0, 2, 4, 8, 16)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 120
    groups: int = 32
    size: int = 8
    learning_rate: float = 1e-4
    warm_steps: int = 300
    settled: int = 5
    model: Size = Size(hidden=128, layers=2)


class OffPolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. loss, lag, seed: of the plan. accuracy: (step, held-out share) from the warm-up on. final: mean of the
    last looks.
    """

    loss: str
    lag: int
    seed: int
    accuracy: tuple[tuple[int, float], ...]
    final: float


def run(plan: OffPolicyPlan | None = None, *, out: Path | None = None, say: Say = print) -> dict[str, float]:
    """Run the plan; figures by name. out: folder for offpolicy.json and offpolicy.png, rewritten after each run.

    Runs that offpolicy.json has already are not run again. Raises ConfigError where they were made under another plan.
    """
    import torch

    plan = plan or OffPolicyPlan()
    torch.set_num_threads(1)
    results = read_finished(out and out / "offpolicy.json", plan, VARIED, OffPolicyResult)
    done = {(one.loss, one.lag, one.seed) for one in results}
    with TemporaryDirectory() as scratch:
        for seed in plan.seeds:
            missing = [(loss, lag) for loss in plan.losses for lag in plan.lags if (loss, lag, seed) not in done]
            if not missing:
                continue
            start = WarmStart.made(Path(scratch) / f"model-{seed}", plan, seed)
            say(f"seed {seed}: {start.accuracy:.1%} after the warm-up")
            for loss, lag in missing:
                results.append(asyncio.run(reinforce_at(start, plan, loss, lag, seed)))
                say(f"seed {seed} {loss} lag {lag}: {results[-1].final:.1%}")
                if out is not None:
                    write_finished(out / "offpolicy.json", plan, VARIED, results)
                    draw(results, out / "offpolicy.png")
    return figures(results)


class WarmStart(msgspec.Struct, frozen=True):
    """Where all runs of a seed begin. folder: of the model. problems: the tasks. state: after the warm-up. accuracy:
    likewise, held-out share.
    """

    folder: Path
    problems: Problems
    state: "dict[str, Tensor]"
    accuracy: float

    @classmethod
    def made(cls, folder: Path, plan: OffPolicyPlan, seed: int) -> "WarmStart":
        """Train on 2,000 demonstrations for the plan's steps."""
        from trainer.batch.batch import pack

        found = problems(build_char_model(folder, seed, size=plan.model), seed)
        learner = opened(folder, config_of("dppo", plan))
        learner.begin_phase("warmup")
        shown = deck(found.train[:2000], seed)
        for step in range(plan.warm_steps):
            items = [demonstration(problem) for problem in shown.deal(128)]
            learner.step(pack(items, max_tokens=MAX_TOKENS), learning_rate=2e-3, seed=step)
        learner.begin_phase("train")
        return cls(folder, found, learner.save(), accuracy(learner, found.held_out))


def config_of(loss: str, plan: OffPolicyPlan) -> "TrainerConfig":
    """One lane under `loss` with its own defaults, and one for the warm-up."""
    from trainer.config import LaneConfig, TrainerConfig

    lanes = {"usual": LaneConfig(loss=loss), "expert": LaneConfig(loss="sft")}
    return TrainerConfig(lanes=lanes, threads=1, learning_rate=plan.learning_rate, betas=(0.9, 0.98))  # type: ignore[arg-type]


async def reinforce_at(
    start: WarmStart, plan: OffPolicyPlan, loss: str, lag: int, seed: int, *, step_with: "StepOn | None" = None
) -> OffPolicyResult:
    """The plan's steps under one loss, on batches `lag` versions old. step_with: instead of `step_on`, to look on."""
    from actors.engines.torch import TorchEngine

    learner = opened(start.folder, config_of(loss, plan))
    learner.restore(start.state)
    engine = TorchEngine(model=str(start.folder), seed=seed, threads=1)
    await engine.start()
    try:
        await engine.load(policy_of(learner, 0))
        drawn = deck(start.problems.train, seed)
        waiting: deque[list[TrainItem]] = deque()
        points = [(0, start.accuracy)]
        for step in range(plan.steps):
            while len(waiting) <= lag:
                waiting.append(await sample(engine, drawn.deal(plan.groups), size=plan.size, round=step))
            await (step_with or step_on)(learner, waiting.popleft(), version=step, plan=plan)
            await engine.load(policy_of(learner, step + 1))
            if (step + 1) % EVERY == 0:
                points.append((step + 1, accuracy(learner, start.problems.held_out)))
    finally:
        await engine.close()
    final = statistics.fmean(share for _, share in points[-plan.settled :])
    return OffPolicyResult(loss=loss, lag=lag, seed=seed, accuracy=tuple(points), final=final)


async def step_on(learner: "TorchLearner", items: "Sequence[TrainItem]", *, version: int, plan: OffPolicyPlan) -> None:
    """One step; none where no group differed in its rewards."""
    from trainer.batch.batch import pack

    if items:
        batch = pack(items, max_tokens=MAX_TOKENS, version=version)
        await asyncio.to_thread(learner.step, batch, learning_rate=plan.learning_rate, seed=version)


class StepOn(Protocol):
    """`step_on`, or a replacement."""

    def __call__(
        self, learner: "TorchLearner", items: "Sequence[TrainItem]", *, version: int, plan: OffPolicyPlan
    ) -> Awaitable[None]:
        """One step."""


def complete(results: Sequence[OffPolicyResult]) -> list[OffPolicyResult]:
    """The runs of those losses and lags that every seed has, by loss and lag: seeds differ by more than lags do."""
    seeds = {one.seed for one in results}
    of_pair: dict[tuple[str, int], set[int]] = {}
    for one in results:
        of_pair.setdefault((one.loss, one.lag), set()).add(one.seed)
    found = [one for one in results if of_pair[one.loss, one.lag] == seeds]
    return sorted(found, key=lambda one: (LOSSES.index(one.loss) if one.loss in LOSSES else len(LOSSES), one.lag))


def figures(results: Sequence[OffPolicyResult]) -> dict[str, float]:
    """Final accuracy of each loss at each lag, and points below its own lag 0: means over seeds."""
    found: dict[str, float] = {}
    finals: dict[tuple[str, int], list[float]] = {}
    for one in complete(results):
        finals.setdefault((one.loss, one.lag), []).append(one.final)
    means = {pair: statistics.fmean(of_seeds) for pair, of_seeds in finals.items()}
    for (loss, lag), mean in means.items():
        found[f"{loss}_lag_{lag}"] = 100 * mean
        if lag and (loss, 0) in means:
            found[f"{loss}_lag_{lag}_points_lost"] = 100 * (means[loss, 0] - mean)
    return found


def draw(results: Sequence[OffPolicyResult], out: Path) -> None:
    """One panel per loss, one curve per lag."""
    from infra.cli.demo.curves import draw_curves

    panels: dict[str, dict[str, list[tuple[tuple[int, float], ...]]]] = {}
    for one in complete(results):
        curves = panels.setdefault(LABELS.get(one.loss, one.loss), {})
        curves.setdefault(f"lag {one.lag}", []).append(one.accuracy)
    draw_curves(panels, out, x="optimizer steps", y="held-out accuracy, greedy")
