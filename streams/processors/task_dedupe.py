"""dedupe: each question once, and none that is nearly another.

Two questions are near each other where the MinHash estimate (Broder 1997, "On the resemblance and containment of
documents", section 3) of the Jaccard similarity of their shingles reaches `near`, and split, workflow, answer and every
number in them are equal: a question with other numbers is another question.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from infra.chain.processor import Drop, Memory, processor
from schemas import Task

DUPLICATE = "duplicate task"
NEAR = "near duplicate task"
MEMORY = 1_000_000
SHINGLE = 5  # characters
NUM_HASHES = 64
BAND = 4  # hashes of a band: two questions meet in one of the 16 bands with probability 1 - (1 - s^4)^16
_PRIME = np.uint64((1 << 31) - 1)
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
_BLANKS = re.compile(r"[\W_]+")


@processor(version=1, of="task", memory=MEMORY)
def dedupe(task: Task, *, memory: Memory, by: Literal["question", "task"], near: float) -> Task | Drop:
    """Drop a task whose question came before under another id; the same id passes again (a redelivery, a repair).

    by: "task" also compares answer and meta, for environments whose prompts are all the same. near: minimum similarity, 0 for
    an exact comparison.
    """
    question = fingerprint(task, by)
    first = memory.get(question)
    if first is not None and first != task.id:
        return Drop(DUPLICATE, f"task {task.id}: the same question as {first}")
    if near > 0:
        signature = minhash(shingles(_text(task)))
        keys = bands(signature, _context(task, by))
        if other := _nearest(task, signature, keys, memory, near):
            return Drop(NEAR, f"task {task.id}: nearly the same question as {other}")
        memory.set(f"signature/{task.id}", signature.tolist())
        for key in keys:
            memory.set(key, task.id)
    memory.set(question, task.id)
    return task


def fingerprint(task: Task, by: str = "question") -> str:
    hidden = (task.answer, sorted(task.meta.items())) if by == "task" else ()
    asked = (task.split, task.workflow, task.messages, hidden)
    return hashlib.sha256(msgspec.msgpack.encode(asked)).hexdigest()[:32]


def shingles(text: str) -> set[str]:
    """Runs of 5 characters of the words alone, case and punctuation aside.

    >>> sorted(shingles("To be!"))
    ['to be']
    """
    words = _BLANKS.sub(" ", text.lower()).strip()
    return {words[start : start + SHINGLE] for start in range(max(1, len(words) - SHINGLE + 1))}


def minhash(runs: set[str]) -> npt.NDArray[np.uint32]:
    """For each of 64 hash functions the smallest value over the shingles: uint32 [64]."""
    values = np.array([int.from_bytes(hashlib.blake2b(run.encode(), digest_size=4).digest(), "big") for run in runs])
    random = np.random.default_rng(0)
    factors = random.integers(1, int(_PRIME), size=(NUM_HASHES, 1), dtype=np.uint64)
    offsets = random.integers(0, int(_PRIME), size=(NUM_HASHES, 1), dtype=np.uint64)
    hashed = (factors * (values.astype(np.uint64) % _PRIME) + offsets) % _PRIME
    smallest: npt.NDArray[np.uint32] = hashed.min(axis=1).astype(np.uint32)
    return smallest


def bands(signature: npt.NDArray[np.uint32], context: str) -> list[str]:
    keys = []
    for start in range(0, NUM_HASHES, BAND):
        meeting = signature[start : start + BAND].tobytes() + context.encode()
        keys.append(f"band/{start}/{hashlib.blake2b(meeting, digest_size=8).hexdigest()}")
    return keys


def similarity(first: Sequence[float | int | str], second: Sequence[float | int | str]) -> float:
    """Share of equal hashes: the estimate of the Jaccard similarity."""
    return sum(mine == other for mine, other in zip(first, second, strict=True)) / NUM_HASHES


def _nearest(
    task: Task, signature: npt.NDArray[np.uint32], keys: Sequence[str], memory: Memory, near: float
) -> str | None:
    mine = signature.tolist()
    for key in keys:
        other = memory.get(key)
        known = memory.get(f"signature/{other}") if isinstance(other, str) and other != task.id else None
        if isinstance(known, list) and similarity(mine, known) >= near:
            return str(other)
    return None


def _text(task: Task) -> str:
    return "\n".join(message.content for message in task.messages)


def _context(task: Task, by: str) -> str:
    hidden = sorted(task.meta.items()) if by == "task" else []
    shown = [image.sha256 for message in task.messages for image in message.images]
    numbers = _NUMBERS.findall(_text(task))
    return msgspec.json.encode((task.split, task.workflow, task.answer, numbers, hidden, shown)).decode()
