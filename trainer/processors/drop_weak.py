"""drop_weak: leaves out what a step would hardly learn from, so that it costs no forward."""

from infra.processor import Drop, processor
from schemas import Experience


@processor(version=1, inline=True)
def drop_weak(experience: Experience, *, below: float = 1e-6) -> Experience | Drop:
    """Drop an experience whose advantage is smaller than `below` in size; one without an advantage passes."""
    if experience.advantage is None or abs(experience.advantage) >= below:
        return experience
    return Drop("weak advantage", f"{experience.advantage:g}, expected at least {below:g} in size")
