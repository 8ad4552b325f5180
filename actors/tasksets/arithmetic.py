"""Two-digit addition with the answer written backwards, always three digits: "37+45=" is "280".

The splits share no pair of operands in either order. The same seed gives the same tasks.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from actors.tasksets.taskset import DEV, HELD_OUT, TRAIN, VALIDATION, Demonstration, write_rows
from schemas import Message, Task

Pair = tuple[int, int]


def split_pairs(seed: int, *, num_dev: int = 250, num_held_out: int = 500) -> dict[str, list[Pair]]:
    """Pairs of 0 to 99 by split. No two splits share an unordered pair; train has both orders, the others one order."""
    pairs = [(first, second) for first in range(100) for second in range(first, 100)]
    random = Random(f"arithmetic/{seed}")
    random.shuffle(pairs)
    kept = [pair if random.random() < 0.5 else pair[::-1] for pair in pairs[: num_held_out + num_dev]]
    train = [order for pair in pairs[num_held_out + num_dev :] for order in sorted({pair, pair[::-1]})]
    random.shuffle(train)
    return {HELD_OUT: kept[:num_held_out], DEV: kept[num_held_out:], TRAIN: train}


def arithmetic(*, seed: int = 0, num_dev: int = 250, num_held_out: int = 500) -> Iterator[Task]:
    """Two-digit additions, in the splits "held-out", "dev" and "train". num_dev: Pairs of operands in split "dev".
    num_held_out: Pairs of operands in split "held-out".
    """
    for split, pairs in split_pairs(seed, num_dev=num_dev, num_held_out=num_held_out).items():
        for pair in pairs:
            yield _task(pair, split)


def arithmetic_demonstrations(
    *, seed: int = 0, num_train: int = 2000, num_validation: int = 300
) -> Iterator[Demonstration]:
    """Worked answers to tasks of the train split; split "validation" shares no pair of operands with the others."""
    train = split_pairs(seed)[TRAIN]
    shown, rest = train[:num_train], train[num_train:]
    seen = {frozenset(pair) for pair in shown}
    unseen = [pair for pair in rest if frozenset(pair) not in seen][:num_validation]
    for split, pairs in ((TRAIN, shown), (VALIDATION, unseen)):
        for pair in pairs:
            task = _task(pair, split)
            yield Demonstration(
                id=task.id, messages=task.messages, response=task.answer or "", answer=task.answer, split=split
            )


def write_arithmetic(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write tasks.jsonl and experts.jsonl, as `headrace load` reads them."""
    return write_rows(folder, arithmetic(seed=seed), arithmetic_demonstrations(seed=seed))


def _task(pair: Pair, split: str) -> Task:
    first, second = pair
    return Task(
        id=f"add-{first:02d}{second:02d}",
        messages=(Message(role="user", content=f"{first:02d}+{second:02d}="),),
        answer=f"{first + second:03d}"[::-1],
        split=split,
    )
