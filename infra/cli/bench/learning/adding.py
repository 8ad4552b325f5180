"""The demo's task without the log: one process samples with the torch engine and trains with the torch learner.

For questions about objectives, where brokers and processes would only add noise. The same seed gives the same tasks,
first weights and demonstrations; sampling is seeded too.
"""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from schemas import BatchItem, Lane, Span, Task, make_experience

if TYPE_CHECKING:
    from actors.engines.torch import TorchEngine
    from actors.tasksets.taskset import Demonstration
    from infra.model.model import Tokenizer
    from infra.policies.policy import Policy
    from trainer.batch.batch import TrainItem
    from trainer.config import TrainerConfig
    from trainer.learners.torch import TorchLearner

EPSILON = 1e-4  # of the group advantage, as in [collect.advantage]
ANSWER_TOKENS = 4  # three digits and the end
MAX_TOKENS = 16384


class Problem(msgspec.Struct, frozen=True):
    """One addition as token ids. name: of its task. prompt: up to the equals sign. answer: with the end token."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Problems(msgspec.Struct, frozen=True):
    """train: to practise on. held_out: shares no pair of operands with it."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def problems(folder: Path, seed: int) -> Problems:
    """The additions of `actors.tasksets.arithmetic`, with the tokenizer of a model folder."""
    from actors.tasksets.arithmetic import HELD_OUT, TRAIN, arithmetic
    from infra.model.model import load_tokenizer

    tokenizer = load_tokenizer(folder)
    found: dict[str, list[Problem]] = {TRAIN: [], HELD_OUT: []}
    for task in arithmetic(seed=seed):
        if task.split in found:
            found[task.split].append(problem_of(task, tokenizer))
    return Problems(tuple(found[TRAIN]), tuple(found[HELD_OUT]))


def problem_of(row: "Task | Demonstration", tokenizer: "Tokenizer") -> Problem:
    """An addition as a taskset has it."""
    answer = (*tokenizer.encode(row.answer or ""), tokenizer.eos_ids[0])
    return Problem(row.id, tuple(tokenizer.encode_chat(row.messages)), answer)


def item_of(
    problem: Problem,
    answer: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    episode: int = 0,
    round: int = 0,
    advantage: float = 0.0,
    reward: float | None = None,
) -> "TrainItem":
    """One answer, ready to be packed. version: of the policy that sampled it, -1 for a demonstration."""
    from trainer.batch.batch import TrainItem

    lane: Lane = "usual" if version >= 0 else "expert"
    group = f"{lane}-{problem.name}.{round}"
    name = f"{group}.0-{episode}-0"
    start = len(problem.prompt)
    experience = make_experience(
        id=name,
        group=group,
        episode=episode,
        group_size=1,
        lane=lane,
        tokens=[*problem.prompt, *answer],
        logprobs=logprobs,
        messages=(),
        spans=(Span(start, start + len(answer), version, ratio=lane == "usual"),),
        reward=reward,
    )
    return TrainItem(experience, BatchItem(id=name, partition=0, offset=0, index=0, lane=lane, advantage=advantage))


def demonstration(problem: Problem) -> "TrainItem":
    """The right answer, as an expert gave it."""
    return item_of(problem, problem.answer, [0.0] * len(problem.answer), version=-1)


def policy_of(learner: "TorchLearner", version: int) -> "Policy":
    """The learner's weights as the engine takes them."""
    from infra.policies.policy import Policy

    tensors = learner.tensors()
    return Policy(version=version, tensors=tensors, touched=frozenset(tensors), probe=learner.probe(((1, 20, 21),)))


async def sample(engine: "TorchEngine", drawn: Sequence[Problem], *, size: int, round: int) -> list["TrainItem"]:
    """`size` answers to each problem, the right one worth 1, with group advantages; without groups of equal rewards."""
    from actors.engines.engine import Sampling

    ends = tuple({problem.answer[-1] for problem in drawn})
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=1.0, stop=ends)
    asked = [(problem, episode) for problem in drawn for episode in range(size)]
    answers = await asyncio.gather(*(engine.generate(problem.prompt, sampling) for problem, _ in asked))
    rewards = [float(tuple(one.tokens) == problem.answer) for (problem, _), one in zip(asked, answers, strict=True)]
    items = []
    for at, ((problem, episode), one) in enumerate(zip(asked, answers, strict=True)):
        of_group = rewards[at - episode : at - episode + size]
        spread = statistics.pstdev(of_group)
        if spread:
            advantage = (rewards[at] - statistics.fmean(of_group)) / (spread + EPSILON)
            items.append(
                item_of(
                    problem,
                    one.tokens,
                    one.logprobs,
                    version=engine.version,
                    episode=episode,
                    round=round,
                    advantage=advantage,
                    reward=rewards[at],
                )
            )
    return items


def accuracy(learner: "TorchLearner", of: Sequence[Problem]) -> float:
    """Share of the problems answered right, greedily."""
    from trainer.batch.batch import pack

    return learner.greedy_accuracy(pack([demonstration(problem) for problem in of], max_tokens=MAX_TOKENS))


def opened(folder: Path, config: "TrainerConfig") -> "TorchLearner":
    """A learner of the model in `folder`, on the CPU."""
    from trainer.learners.torch import TorchLearner

    return TorchLearner(str(folder), config, device="cpu")


def deck(of: Sequence[Problem], seed: int) -> "Deck":
    """Problems in an order that `seed` decides, again and again."""
    return Deck(of, Random(seed))


class Deck:
    """Deals problems; when all are dealt it is shuffled again."""

    def __init__(self, of: Sequence[Problem], random: Random) -> None:
        self._all = list(of)
        self._random = random
        self._left: list[Problem] = []

    def add(self, problem: Problem) -> None:
        """One more, dealt soon and in every round from then on."""
        self._all.append(problem)
        self._left.append(problem)

    def deal(self, count: int) -> list[Problem]:
        """The next `count`."""
        dealt: list[Problem] = []
        while len(dealt) < count:
            if not self._left:
                self._left = list(self._all)
                self._random.shuffle(self._left)
            dealt.append(self._left.pop())
        return dealt
