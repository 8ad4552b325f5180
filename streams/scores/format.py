"""format: the whole response has the shape that was asked for (matched in a child process)."""

import re

from infra.chain.processor import score
from schemas import Experience
from schemas.errors import ConfigError
from streams.scores.child import ScoreChild
from streams.scores.pattern_worker import compiled

MAX_CHARS = 65_536


@score(version=1)
class Format:
    r"""1.0 where the regular expression matches the whole response, else 0.0. pattern: it, as Python writes it. dotall: "."
    matches line ends too.

    The whole response, not a part of it: an answer that quotes the shape on the way has not kept to it. Longer responses than
    65,536 characters have not either. timeout_s: seconds for a match; a pattern that backtracks without end, such as (a+)+b,
    holds nothing but its own process, and the answer is dropped as "score timed out".

    Example: pattern = "<think>(?:(?!</?think>).)*</think>\\s*<answer>(?:(?!</?answer>).)*</answer>"
    """

    def __init__(self, *, pattern: str, dotall: bool = True, timeout_s: float = 2.0) -> None:
        try:
            compiled(pattern, dotall)
        except re.error as error:
            raise ConfigError(f"pattern: got {pattern!r}, which is no regular expression: {error}") from error
        self.pattern = pattern
        self.dotall = dotall
        self.timeout_s = timeout_s
        self._child = ScoreChild("streams.scores.pattern_worker")

    def __call__(self, experience: Experience) -> float:
        response = experience.response.strip()
        if len(response) > MAX_CHARS:
            return 0.0
        asked = {"pattern": self.pattern, "dotall": self.dotall, "text": response}
        return float(self._child.ask(asked, self.timeout_s)["matches"])

    def close(self) -> None:
        self._child.close()


format = Format  # the name that settings use
