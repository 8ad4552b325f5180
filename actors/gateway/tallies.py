"""What this gateway served of each version: counts for the gate, of every answer, and of nobody's words."""

from collections.abc import Sequence

import msgspec

from actors.config import any_of
from schemas import Answered

MAX_VERSIONS = 32
OPENING_CHARS = 200  # a refusal is one at the beginning of an answer


class Tallies:
    """Counts by version and trial, of the newest versions. refusals: regular expressions."""

    def __init__(self, refusals: Sequence[str]) -> None:
        self._refusal = any_of(refusals) if refusals else None
        self._known: dict[tuple[int, int], Answered] = {}

    def answered(self, version: int, trial: int, texts: Sequence[str]) -> None:
        """Answers that came to their end."""
        refused = 0 if self._refusal is None else sum(bool(self._refusal.search(one[:OPENING_CHARS])) for one in texts)
        self._add(Answered(version=version, trial=trial, answers=len(texts), refused=refused))

    def failed(self, version: int, trial: int, count: int) -> None:
        """Answers that the engine did not bring to their end."""
        self._add(Answered(version=version, trial=trial, answers=count, failed=count))

    def told(self) -> tuple[Answered, ...]:
        """As it is told to the others."""
        return tuple(self._known.values())

    def _add(self, more: Answered) -> None:
        place = (more.version, more.trial)
        known = self._known.get(place, Answered(version=more.version, trial=more.trial))
        self._known[place] = msgspec.structs.replace(
            known,
            answers=known.answers + more.answers,
            failed=known.failed + more.failed,
            refused=known.refused + more.refused,
        )
        if len(self._known) > MAX_VERSIONS:
            del self._known[min(self._known)]
