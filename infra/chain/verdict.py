"""Hashes of the input of a score, so that a recorded verdict is used instead of asking again.

Only scores that are not inline have one: a judge, a sandbox, a model. What is computed here and now is computed again.
"""

import ast
import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from infra.chain.calls import Failure
from infra.chain.processor import Verdict
from infra.settings.plugin import option_defaults
from schemas import Experience

HASH_CHARS = 16
CODE_CHARS = 8
_encoder = msgspec.msgpack.Encoder(enc_hook=repr, order="deterministic")


class Question(msgspec.Struct, frozen=True):
    """One experience put before one score.

    input: hash of all the score could see, and of its options; ":" and the code's hash.
    """

    id: str
    name: str
    version: str
    input: str


# The verdict on record, or how the call failed then; None where nothing is.
Recorded = Callable[[Question], Verdict | Failure | None]


def options_hash(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Hash of a score's options: its own as far as they can be read back, and those it was given; ":" and `code_hash`."""
    options = hashlib.blake2b(_encoder.encode((option_defaults(function), given))).hexdigest()[:HASH_CHARS]
    return f"{options}:{code_hash(function)}"


def code_hash(function: Callable[..., Any]) -> str:
    """Hash of a function's (or class's) source without comments, docstrings and layout; "" where none can be read."""
    bare = getattr(function, "func", function)
    try:
        source = inspect.getsource(bare if inspect.isroutine(bare) or inspect.isclass(bare) else type(bare))
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.blake2b(ast.unparse(tree).encode()).hexdigest()[:CODE_CHARS]


def input_hash(question: str, experience: Experience) -> str:
    """Hash of what a score may read: options, text, tokens, reference answer, and how the episode ended. Raises BadFrame.

    question: `options_hash`. What follows its ":" is no part of the hash and follows it as it is: a verdict is looked
    for by the hash alone, and whether the code is still the same is known beside it.
    """
    options, colon, code = question.partition(":")
    seen = hashlib.blake2b(options.encode())
    seen.update(_encoder.encode((experience.messages, experience.meta, experience.end, experience.part)))
    seen.update(_encoder.encode((experience.answer, experience.task, experience.notes)))
    seen.update(experience.tokens.tobytes())
    return f"{seen.hexdigest()[:HASH_CHARS]}{colon}{code}"


def has_score(experience: Experience, name: str, version: int) -> bool:
    """True if it has this version's score already, from any model."""
    return any(found.name == name and found.version.partition("+")[0] == str(version) for found in experience.scores)


def read_verdict(result: object) -> Verdict | str:
    """A score's result with plain, finite numbers, or its fault. Raises what the result itself raises."""
    verdict = result if isinstance(result, Verdict) else None
    value = result if verdict is None else verdict.value
    number = None if value is None else _finite(value)
    if value is not None and number is None:
        shown = f"{str(value)[:60]!r} " if isinstance(value, str | float) else ""
        return f"got {shown}({type(value).__name__}), expected a finite number or None"
    if verdict is None:
        return Verdict(value=number)
    return msgspec.structs.replace(verdict, value=number, cost_usd=_finite(verdict.cost_usd))


def _finite(value: object) -> float | None:
    """The value as a finite number, or None."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
