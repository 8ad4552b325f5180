"""Hashes of the input of a score, so that a recorded verdict is used instead of asking again.

Only scores that are not inline have such a hash: a judge, a sandbox, a model. Inline scores are computed again.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from infra.chain.calls import Failure
from infra.chain.processor import Verdict
from infra.settings.plugin import option_defaults
from schemas import Experience

HASH_CHARS = 16
_encoder = msgspec.msgpack.Encoder(enc_hook=repr, order="deterministic")


class Question(msgspec.Struct, frozen=True):
    """One experience put before one score. input: hash of all the score could see, and of its options."""

    id: str
    name: str
    version: str
    input: str


# The verdict on record, or how the call failed then; None where nothing is.
Recorded = Callable[[Question], Verdict | Failure | None]


def options_hash(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Hash of a score's options: its own as far as they can be read back, and those it was given."""
    return hashlib.blake2b(_encoder.encode((option_defaults(function), given))).hexdigest()[:HASH_CHARS]


def input_hash(question: str, experience: Experience) -> str:
    """Hash of the data open to a score: options, text, tokens, reference answer, and how the episode ended. Raises BadFrame.

    question: `options_hash`.
    """
    seen = hashlib.blake2b(question.encode())
    seen.update(_encoder.encode((experience.messages, experience.meta, experience.end, experience.part)))
    seen.update(_encoder.encode((experience.answer, experience.task, experience.notes)))
    seen.update(experience.tokens.tobytes())
    return seen.hexdigest()[:HASH_CHARS]


def read_verdict(result: object) -> Verdict | str:
    """A score's result with plain, finite numbers, or its fault. Raises the errors of the result's own methods."""
    verdict = result if isinstance(result, Verdict) else Verdict()
    value = verdict.value if result is verdict else result
    number = None if value is None else _finite(value)
    if value is not None and number is None:
        shown = f"{str(value)[:60]!r} " if isinstance(value, str | float) else ""
        return f"got {shown}({type(value).__name__}), expected a finite number or None"
    return msgspec.structs.replace(verdict, value=number)


def _finite(value: object) -> float | None:
    """The value as a finite number, or None."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
