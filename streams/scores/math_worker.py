"""The child of `streams.scores.math`: compares two answers per line of JSON, on its main thread, in bounded memory.

    in   {"gold": "\\frac{1}{2}", "candidate": "0.5"}      first line out: {"ready": true}
    out  {"equal": true} | {"error": "…"}                  ends with its standard input

It runs in a process of its own because an input such as 9^{9^{9^9}} keeps sympy in one long C call that holds the interpreter
lock: no timeout and no other thread of the process runs meanwhile.
"""

import json
import logging
import resource
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 2 * 1024**3


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # math-verify warns that its own timeouts are off; the parent kills instead
    _parse("\\boxed{1}")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, str]) -> dict[str, Any]:
    try:
        from math_verify import verify

        gold = _parse(_boxed(request["gold"]))
        if not gold:
            return {"error": f"reference answer {request['gold']!r} cannot be read as mathematics"}
        candidate = _parse(_boxed(request["candidate"]))
        return {"equal": bool(candidate) and bool(verify(list(gold), list(candidate), timeout_seconds=None))}
    except (Exception, RecursionError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))


def _boxed(text: str) -> str:
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"


if __name__ == "__main__":
    main()
