"""The demo's additions without the log: one process samples with the torch engine and trains with the torch learner."""

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from actors.engines.engine import Sampling
from actors.engines.torch import TorchEngine
from actors.tasksets.arithmetic import arithmetic
from infra.model.model import load_tokenizer
from infra.policies.policy import Policy
from schemas import BatchItem, Lane, Span, make_experience
from trainer.batch.batch import PackedBatch, TrainItem, pack
from trainer.learners.torch import TorchLearner

ANSWER_TOKENS = 4  # three digits and the end
EPSILON = 1e-4  # of the group advantage, as in [collect.advantage]


class Problem(NamedTuple):
    """An addition as token ids. answer: With the end token."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def problems(folder: Path, seed: int) -> tuple[list[Problem], list[Problem]]:
    """To practise on, and held out, with the tokenizer of a model folder."""
    tokenizer = load_tokenizer(folder)
    found: dict[str, list[Problem]] = {"train": [], "held-out": []}
    for task in arithmetic(seed=seed):
        if task.split in found:
            found[task.split].append(problem_of(task, tokenizer))
    return found["train"], found["held-out"]


def problem_of(row: Any, tokenizer: Any) -> Problem:
    """An addition as a taskset or a demonstration has it."""
    answer = (*tokenizer.encode(row.answer or ""), tokenizer.eos_ids[0])
    return Problem(row.id, tuple(tokenizer.encode_chat(row.messages)), answer)


def item(problem: Problem, answer: Sequence[int], logprobs: Sequence[float], version: int, **more: Any) -> TrainItem:
    """An answer, ready to be packed. version: Of the policy that sampled it, -1 for a demonstration."""
    lane: Lane = "usual" if version >= 0 else "expert"
    group, start = f"{lane}-{problem.name}.{more.pop('round', 0)}", len(problem.prompt)
    episode, advantage = more.pop("episode", 0), more.pop("advantage", 0.0)
    experience = make_experience(
        id=f"{group}.0-{episode}-0", group=group, episode=episode, group_size=1, lane=lane,
        tokens=[*problem.prompt, *answer], logprobs=logprobs, messages=(),
        spans=(Span(start, start + len(answer), version, ratio=lane == "usual"),), **more,
    )  # fmt: skip
    drawn = BatchItem(id=experience.id, partition=0, offset=0, index=0, lane=lane, advantage=advantage)
    return TrainItem(experience, drawn)


def packed(items: Sequence[TrainItem], **more: Any) -> PackedBatch:
    return pack(items, max_tokens=16_384, **more)


def demonstrations(shown: Sequence[Problem]) -> PackedBatch:
    """The right answers, as an expert gave them."""
    return packed([item(problem, problem.answer, [0.0] * len(problem.answer), -1) for problem in shown])


def policy_of(learner: TorchLearner, version: int) -> Policy:
    """The learner's weights as an engine takes them."""
    tensors = learner.tensors()
    return Policy(version=version, tensors=tensors, probe=learner.probe(((1, 20, 21),)))


async def sample(engine: TorchEngine, drawn: Sequence[Problem], size: int, round: int) -> list[TrainItem]:
    """`size` answers to each problem, the right one worth 1, with group advantages; without groups of equal rewards."""
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=1.0, stop=(drawn[0].answer[-1],))
    asked = [problem for problem in drawn for _ in range(size)]
    answers = await asyncio.gather(*(engine.generate(problem.prompt, sampling) for problem in asked))
    rewards = [float(tuple(each.tokens) == problem.answer) for problem, each in zip(asked, answers, strict=True)]
    items = []
    for at, (problem, each) in enumerate(zip(asked, answers, strict=True)):
        first = at - at % size
        mates = rewards[first : first + size]
        if spread := statistics.pstdev(mates):
            advantage = (rewards[at] - statistics.fmean(mates)) / (spread + EPSILON)
            more = {"episode": at % size, "round": round, "advantage": advantage, "reward": rewards[at]}
            items.append(item(problem, each.tokens, each.logprobs, engine.version, **more))
    return items


class Deck:
    """Deals problems in an order that the seed decides; shuffles them again when all are dealt."""

    def __init__(self, problems: Sequence[Problem], seed: int) -> None:
        self._all, self._random = list(problems), Random(seed)
        self._left: list[Problem] = []

    def deal(self, count: int) -> list[Problem]:
        dealt: list[Problem] = []
        while len(dealt) < count:
            if not self._left:
                self._left = list(self._all)
                self._random.shuffle(self._left)
            dealt.append(self._left.pop())
        return dealt
