"""Tasks of reasoning-gym generators. Only this module imports reasoning-gym."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from schemas import Message, Task
from schemas.errors import ConfigError


def reasoning_gym(
    *, generator: str, size: int = 1000, seed: int = 0, split: str = "train", options: dict[str, Any] | None = None
) -> Iterator[Task]:
    """Tasks of a reasoning-gym generator. Raises ConfigError for an unknown generator or option.

    generator: Name of the generator, such as "chain_sum". size: Number of tasks. split: Split of all tasks. options: Options of
    the generator. Use another seed for another split.
    """
    dataset = open_dataset(generator, size=size, seed=seed, options=options or {})
    for index in range(size):
        entry = dataset[index]
        yield Task(
            id=f"{generator}-{seed}-{index}",
            messages=(Message(role="user", content=str(entry["question"])),),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            split=split,
            meta={"generator": generator, "seed": seed, "index": index},
        )


def open_dataset(generator: str, *, size: int, seed: int, options: Mapping[str, Any]) -> Any:
    """A generator's dataset; its entries follow from seed and index. Raises ConfigError."""
    with warnings.catch_warnings():  # one of its dependencies has a literal comparison that Python warns of
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS, create_dataset
    if generator not in DATASETS:
        known = ", ".join(sorted(DATASETS))
        raise ConfigError(f"reasoning_gym: got generator {generator!r}, expected one of {known}")
    try:
        return create_dataset(generator, size=size, seed=seed, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning_gym: {generator}: {error}") from error
