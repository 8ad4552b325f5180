"""Few demonstrations: supervised alone, reinforcement alone, and both in one loss (MIX), on the demo's task, off the log.

Three runs per seed from the same random weights, of as many steps: `sft` repeats the demonstrations; `grpo` has rewards
only; `mix` begins with a short supervised phase and continues with (1-m)·L_RL + m·L_SFT. The reward is the task's own: 1 for
the right answer, else 0. With keep_successes its own right answers become demonstrations too, as [collect.synthesize]
makes them of the best of a group; that is how two hundred become thousands.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.common.finished import read_finished, write_finished
from infra.cli.bench.learning.adding import (
    MAX_TOKENS,
    Deck,
    Problem,
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
    from actors.engines.torch import TorchEngine
    from trainer.batch.batch import TrainItem
    from trainer.config import TrainerConfig
    from trainer.learners.torch import TorchLearner

KINDS = ("sft", "grpo", "mix")
VARIED = ("kinds", "seeds")
EVERY = 20
LABELS = {"sft": "demonstrations alone", "grpo": "reinforcement alone (grpo)", "mix": "MIX"}
Say = Callable[[str], None]


class MixPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    kinds: of loss. seeds: one run each. demonstrations: there are. steps: of reinforcement. warm_steps: supervised ones
    before. learning_rate: of both. m: supervised weight of MIX. groups, size: of one step. shown: demonstrations of a
    step. keep_successes: groups that all succeed are trained. model: how large.
    """

    kinds: tuple[str, ...] = KINDS
    seeds: tuple[int, ...] = (0, 1, 2)
    demonstrations: int = 200
    steps: int = 500
    warm_steps: int = 40
    learning_rate: float = 1e-3
    m: float = 0.5
    groups: int = 96
    size: int = 8
    shown: int = 128
    keep_successes: bool = True
    model: Size = Size(hidden=128, layers=2)


class MixResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. kind: of loss. seed: of the run. accuracy: (step, held-out share), supervised steps of MIX included.
    known: problems with a demonstration.
    """

    kind: str
    seed: int
    accuracy: tuple[tuple[int, float], ...]
    known: int


def run(plan: MixPlan | None = None, *, out: Path | None = None, say: Say = print) -> dict[str, float]:
    """Run the plan; best and last accuracy by kind and seed. out: folder for mix.json and mix.png, rewritten after each run.

    Runs that mix.json has already are not run again. Raises ConfigError where they were made under another plan.
    """
    import torch

    plan = plan or MixPlan()
    torch.set_num_threads(1)
    results = read_finished(out and out / "mix.json", plan, VARIED, MixResult)
    done = {(one.kind, one.seed) for one in results}
    with TemporaryDirectory() as scratch:
        for seed in plan.seeds:
            for kind in (kind for kind in plan.kinds if (kind, seed) not in done):
                results.append(asyncio.run(one_run(Path(scratch) / f"model-{seed}", plan, kind, seed)))
                best = max(share for _, share in results[-1].accuracy)
                say(f"seed {seed} {kind}: best {best:.1%}, last {results[-1].accuracy[-1][1]:.1%}")
                if out is not None:
                    write_finished(out / "mix.json", plan, VARIED, results)
                    draw(results, out / "mix.png")
    figures = {}
    for one in results:
        figures[f"{one.kind}_seed_{one.seed}_best"] = 100 * max(share for _, share in one.accuracy)
        figures[f"{one.kind}_seed_{one.seed}_last"] = 100 * one.accuracy[-1][1]
    return figures


async def one_run(folder: Path, plan: MixPlan, kind: str, seed: int) -> MixResult:
    """One curve."""
    from actors.engines.torch import TorchEngine

    of = problems(build_char_model(folder, seed, size=plan.model), seed)
    learner = opened(folder, config_of(kind, plan))
    engine = TorchEngine(model=str(folder), seed=seed, threads=1, max_sequences=plan.groups * plan.size)
    await engine.start()
    shown = of.train[: plan.demonstrations] if kind != "grpo" else ()
    teacher = Teacher({problem.name: problem for problem in of.train}, shown, seed)
    practice = deck(of.train, seed)
    points = [(0, accuracy(learner, of.held_out))]
    warm = plan.warm_steps if kind == "mix" else plan.steps if kind == "sft" else 0
    if warm:
        learner.begin_phase("warmup")
    try:
        for step in range(plan.steps):
            if step < warm:
                train(learner, teacher.show(plan.shown), step, plan.learning_rate)
            else:
                if step == warm:
                    learner.begin_phase("train")
                    await engine.load(policy_of(learner, step))
                await mixed_step(learner, engine, practice, teacher, plan, step)
            if (step + 1) % EVERY == 0:
                points.append((step + 1, accuracy(learner, of.held_out)))
    finally:
        await engine.close()
    return MixResult(kind=kind, seed=seed, accuracy=tuple(points), known=teacher.num_known)


async def mixed_step(
    learner: "TorchLearner", engine: "TorchEngine", practice: Deck, teacher: "Teacher", plan: MixPlan, step: int
) -> None:
    """Sample, show, train, load."""
    items = await sample(engine, practice.deal(plan.groups), size=plan.size, round=step)
    if plan.keep_successes:
        teacher.learn(items)
    items += teacher.show(plan.shown)
    if items:
        await asyncio.to_thread(train, learner, items, step, plan.learning_rate)
        await engine.load(policy_of(learner, step + 1))


def train(learner: "TorchLearner", items: "Sequence[TrainItem]", step: int, rate: float) -> None:
    """One optimizer step on fresh samples."""
    from trainer.batch.batch import pack

    learner.step(pack(items, max_tokens=MAX_TOKENS, version=step), learning_rate=rate, seed=step)


class Teacher:
    """Demonstrations: those given, and problems that were answered right since. None given: none are ever shown."""

    def __init__(self, every: dict[str, Problem], given: Sequence[Problem], seed: int) -> None:
        self._every = every
        self._known = {problem.name: problem for problem in given}
        self._deck = deck(given, seed + 1)

    @property
    def num_known(self) -> int:
        """Problems with a demonstration."""
        return len(self._known)

    def show(self, count: int) -> "list[TrainItem]":
        """The next demonstrations."""
        return [demonstration(problem) for problem in self._deck.deal(count)] if self._known else []

    def learn(self, items: "Sequence[TrainItem]") -> None:
        """Keep what was answered right for the first time."""
        for one in items:
            name = one.experience.group.removeprefix("usual-").rpartition(".")[0]
            if self._known and one.experience.reward == 1.0 and name not in self._known:
                self._known[name] = self._every[name]
                self._deck.add(self._every[name])


def config_of(kind: str, plan: MixPlan) -> "TrainerConfig":
    """The lanes of a kind."""
    from trainer.config import LaneConfig, TrainerConfig

    usual = LaneConfig(loss="grpo", weight=1.0) if kind == "grpo" else LaneConfig(weight=1.0 - plan.m)
    lanes = {"usual": usual, "expert": LaneConfig(loss="sft", weight=plan.m)}
    return TrainerConfig(lanes=lanes, threads=1, learning_rate=plan.learning_rate, betas=(0.9, 0.98))  # type: ignore[arg-type]


def draw(results: Sequence[MixResult], out: Path) -> None:
    """All curves in one picture."""
    from infra.cli.demo.curves import draw_curves

    curves: dict[str, list[tuple[tuple[int, float], ...]]] = {}
    for one in results:
        curves.setdefault(LABELS[one.kind], []).append(one.accuracy)
    num_seeds = len({one.seed for one in results})
    draw_curves(
        {"one seed" if num_seeds == 1 else f"mean of {num_seeds} seeds": curves},
        out,
        x="optimizer steps",
        y="held-out accuracy, greedy",
        target=0.8,
    )
