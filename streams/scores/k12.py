"""Score of school questions: multiple choice, fill-in, and numbers with units.

Guarantees: only the last stated answer counts; an answer that is negated or next to another answer is wrong; units are
converted within their kind, and a number in a unit of another kind is wrong.
"""

import json
from typing import Literal

from infra.chain.processor import score
from schemas import Experience
from streams.scores.final_answer import final_text
from streams.scores.multiple_choice import is_right_choice
from streams.scores.quantity import Quantity, read_quantity, same_quantity
from streams.scores.words import is_variant

MAX_CHARS = 20_000
KINDS = ("choice", "fill", "number")


@score(version=1, inline=True)
def k12(
    experience: Experience,
    *,
    kind: Literal["auto", "choice", "fill", "number"] = "auto",
    answer: str = "answer",
    options: str = "options",
    variants: str = "variants",
    tolerance: float = 0.01,
) -> float | None:
    """1.0 if the final answer is right, else 0.0. None without a reference.

    kind: Kind of question. "auto": meta["kind"], else "choice" if meta[options] exists, else "number" if the reference is a
    number, else "fill". answer: Source of the reference, see `Experience.reference`. options: Key in meta of the choices, a
    JSON list of texts or object from letter to text; the reference is a letter or a text. variants: Key in meta of further
    right fill-in answers, a JSON list. Fill-ins ignore case, articles, encodings of accents, hyphens and number words.
    tolerance: Relative tolerance of numbers with a fraction or a unit; whole numbers are exact.
    """
    reference = experience.reference(answer)
    if reference is None:
        return None
    wanted = str(reference).strip()
    listed = experience.meta.get(options)
    chosen_kind = kind if kind != "auto" else _kind(experience, wanted, listed is not None)
    response = experience.response
    if len(response) > MAX_CHARS:
        return 0.0
    if chosen_kind == "choice":
        return float(is_right_choice(response, wanted, listed))
    final = final_text(response)
    if final is None:
        return 0.0
    if chosen_kind == "number":
        return float(_number(final, wanted, tolerance))
    accepted = [wanted, *_texts(experience.meta.get(variants), variants)]
    return float(is_variant(final, accepted))


def _kind(experience: Experience, wanted: str, has_options: bool) -> str:
    kind = experience.meta.get("kind")
    if kind in KINDS:
        return str(kind)
    if has_options:
        return "choice"
    return "number" if read_quantity(wanted) is not None else "fill"


def _number(final: str, wanted: str, tolerance: float) -> bool:
    expected = read_quantity(wanted)
    if expected is None:
        raise ValueError(f"the reference {wanted!r} cannot be read as a number with a unit")
    got: Quantity | None = read_quantity(final)
    return got is not None and same_quantity(expected, got, tolerance)


def _texts(written: object, key: str) -> list[str]:
    if written is None:
        return []
    try:
        read = json.loads(str(written))
    except ValueError as error:
        raise ValueError(f"meta.{key}: {error}, expected a JSON list of texts") from error
    if not isinstance(read, list) or not all(isinstance(text, str) for text in read):
        raise ValueError(f"meta.{key}: got {str(written)[:60]!r}, expected a JSON list of texts")
    return read
