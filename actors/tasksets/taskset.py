"""The taskset: where tasks come from, and the rows they and demonstrations are read as.

A taskset is a function or struct named by `use`; called, it yields tasks, the same ones in the same order every time.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from schemas import Message, Task
from schemas.fields import Meta, Struct


class Taskset(Protocol):
    """Yields tasks; options are keyword-only parameters."""

    def __call__(self) -> Iterator[Task]:
        """All tasks. Raises ConfigError for a source that cannot be read, naming the line."""


class Demonstration(Struct, frozen=True):
    """A worked answer.

    id: unique. messages: the prompt. response: the answer to learn. answer: the reference answer, None where there is none.
    split: "validation" is never trained on, it decides when a warm-up stops. subject: person whose data it is, "" for none.
    meta: the user's own.

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
    """Two answers to one prompt, of which people preferred the first.

    id: unique. messages: the prompt. chosen, rejected: the answers. subject: person whose data it is, "" for none. meta: the
    user's own.

    Example: Preference(id="q-17", messages=(Message(role="user", content="Hello?"),), chosen="Hello!", rejected="What.")
    """

    id: str
    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    subject: str = ""
    meta: Meta = msgspec.field(default_factory=dict)


def write_rows(folder: Path, tasks: Iterable[Task], demonstrations: Iterable[Demonstration]) -> tuple[Path, Path]:
    """Write tasks.jsonl and experts.jsonl, as `headrace load` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "tasks.jsonl", folder / "experts.jsonl"
    for path, rows in zip(paths, (tasks, demonstrations), strict=True):
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return paths
