"""A score by lot: what a group is compared by, so that most groups have something to teach."""

import hashlib

from headrace import Experience, score


@score(version=1, inline=True)
def coin(experience: Experience) -> float:
    """0 or 1, by the experience's id."""
    return float(hashlib.sha256(experience.id.encode()).digest()[0] % 2)
