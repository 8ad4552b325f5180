"""Why an episode failed, so that causes can be counted apart."""

from typing import Literal

Cause = Literal["agent", "environment", "engine", "tool", "reward", "timeout", "workflow"]


class EpisodeFailed(Exception):
    """Raised by a workflow that knows whose failure it is."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause
