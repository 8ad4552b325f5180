"""Score of the response's format by a regular expression, matched in a child process."""

import re

from infra.chain.processor import score
from schemas import Experience
from schemas.errors import ConfigError
from streams.scores.child import ScoreChild
from streams.scores.pattern_worker import compiled

MAX_CHARS = 65_536


@score(version=1)
class Format:
    r"""1.0 if the regular expression matches the whole response, else 0.0; also 0.0 for responses above 65,536 characters.

    pattern: Regular expression in Python syntax. dotall: Whether "." matches line ends. timeout_s: Maximum seconds of a match,
    in a process of its own, so that a pattern such as (a+)+b blocks nothing; after them the answer is dropped as "score timed
    out".

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
