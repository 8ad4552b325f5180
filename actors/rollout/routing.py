"""The experts that an episode's tokens went to, from the engine into its experiences."""

import msgspec
import numpy as np
import numpy.typing as npt

from schemas import Experience
from schemas.wire.routing import with_routing

TOO_LARGE = "too large"

Rows = npt.NDArray[np.unsignedinteger]


class RoutedTokens(msgspec.Struct):
    """The experts of one growing token sequence, turn by turn. A token keeps those that it went to first: when its
    successor was sampled, or, of what no engine sampled, when the next turn was. given: whether every turn's engine
    gave them. rows: of each turn those that are new. num: tokens that they cover.
    """

    rows: list[Rows] = []
    num: int = 0
    given: bool = True

    def add(self, found: Rows | None) -> None:
        """What a turn's engine recorded of the whole sequence so far, None where it records nothing."""
        self.given = self.given and found is not None
        if found is not None:
            self.rows.append(found[self.num :])
            self.num = len(found)

    def all(self) -> Rows | None:
        """[tokens, layers, k], None where some of them, or all, were not given."""
        return np.concatenate(self.rows) if self.rows and self.given else None


def with_recorded(experience: Experience, rows: Rows | None, max_bytes: int) -> tuple[Experience, str]:
    """The experience with its experts, and "" or why it goes without them. rows: of its first tokens."""
    if rows is None:
        return experience, ""
    if rows.nbytes > max_bytes:
        return experience, TOO_LARGE
    return with_routing(experience, rows), ""
