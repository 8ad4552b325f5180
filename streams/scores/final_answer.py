r"""The final answer of a response: what a reader would take it to be, or none where it hedges.

Guarantee: of several statements the last counts; a line that names none as its answer counts only as a whole, so that a
right word inside a longer text is no answer.
"""

import re

_MARKER = re.compile(r"\b(?:final\s+answer|correct\s+answer|answer)\s*(?:is|would\s+be|:|=)\s*:?\s*", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_DENIED = re.compile(r"\b(?:not|n't|isn't|never|neither|nor)\b", re.IGNORECASE)


def final_text(response: str) -> str | None:
    r"""The last \boxed{…}; else what follows the last "answer is" or "answer:" in its line; else the last line.

    None for an answer that is denied ("the answer is not 4"), or where there is nothing.

    >>> final_text("Let me see. The answer is **Paris**.")
    'Paris'
    >>> final_text("The answer is not Paris.") is None
    True
    """
    boxed = _BOXED.findall(response)
    if boxed:
        return _bare(boxed[-1])
    lines = [line for line in response.splitlines() if line.strip()]
    marked = [line for line in lines if _MARKER.search(line)]
    if not marked and not lines:
        return None
    if not marked:
        return _bare(lines[-1])
    line = marked[-1]
    last = list(_MARKER.finditer(line))[-1]
    before = re.split(r"[.;!?]", line[: last.start()])[-1]
    answer = _bare(line[last.end() :])
    if not answer and line is not lines[-1]:  # "The answer is:" with the answer on a line of its own
        answer = _bare(lines[lines.index(line) + 1])
    return None if not answer or _DENIED.match(answer) or _DENIED.search(before) else answer


def _bare(text: str) -> str:
    return text.strip().strip("*_$`\"'“”‘’ ").rstrip(".!").strip("*_$`\"'“”‘’ ")
