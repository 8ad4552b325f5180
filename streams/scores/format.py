"""format: the whole response has the shape that was asked for."""

import functools
import re

from infra.processor import score
from schemas import Experience

MAX_CHARS = 65_536


@score(version=1, inline=True)
def format(experience: Experience, *, pattern: str, dotall: bool = True) -> float:
    r"""1.0 where `pattern` matches the whole response, else 0.0. dotall: "." matches line ends too.

    The whole response, not a part of it: an answer that quotes the shape on the way has not kept to it. Longer
    responses than 65,536 characters have not either. A match cannot be interrupted: write no pattern that backtracks
    without end, such as (a+)+b; possessive quantifiers (a++b) and atomic groups help.

    Example: pattern = "<think>(?:(?!</?think>).)*</think>\\s*<answer>(?:(?!</?answer>).)*</answer>"
    """
    response = experience.response.strip()
    if len(response) > MAX_CHARS:
        return 0.0
    return float(_compiled(pattern, dotall).fullmatch(response) is not None)


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str, dotall: bool) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL if dotall else 0)
