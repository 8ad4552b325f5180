"""The taskset: the source of tasks, and the rows of tasks and demonstrations.

A taskset is a function or struct named by `use`; called, it yields tasks, the same ones in the same order every time.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from schemas import Message, Task
from schemas.fields import Meta, Struct

TRAIN, DEV, HELD_OUT, VALIDATION = "train", "dev", "held-out", "validation"  # splits


class Taskset(Protocol):
    """Yields tasks; options are keyword-only parameters."""

    def __call__(self) -> Iterator[Task]:
        """Yield all tasks. Raises ConfigError with the line for a source that cannot be read."""


class Demonstration(Struct, frozen=True):
    """A worked answer to learn from.

    id: id, unique in its file. messages: prompt. response: answer to learn. answer: reference answer, None for none. split:
    "validation" is never trained; its accuracy ends a warm-up. subject: user whose data it is, "" for none. meta: the user's
    own data.

    Example: Demonstration(id="add-37-45", messages=(Message(role="user", content="37+45="),), response="280",
                           answer="280")
    """

    id: str
    messages: tuple[Message, ...]
    response: str
    answer: str | None = None
    split: str = "train"
    subject: str = ""
    meta: Meta = msgspec.field(default_factory=dict)


class Preference(Struct, frozen=True):
    """Two answers to a prompt, the first preferred to the second.

    id: id, unique in its file. messages: prompt. chosen: preferred answer. rejected: other answer. subject: user whose data it
    is, "" for none. meta: the user's own data.

    Example: Preference(id="q-17", messages=(Message(role="user", content="Hello?"),), chosen="Hello!", rejected="What.")
    """

    id: str
    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    subject: str = ""
    meta: Meta = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chosen == self.rejected:
            raise ValueError(f"pair {self.id}: got equal sides, expected one that is preferred to the other")


def write_rows(folder: Path, tasks: Iterable[Task], demonstrations: Iterable[Demonstration]) -> tuple[Path, Path]:
    """Write tasks.jsonl and experts.jsonl, as `headrace load` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "tasks.jsonl", folder / "experts.jsonl"
    for path, rows in zip(paths, (tasks, demonstrations), strict=True):
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return paths
