"""What the benchmark of overlap plays: sizes, times, and its cases. `infra.cli.bench.overlap` says what they mean."""

import msgspec

SYNCHRONOUS = 0  # versions of staleness


class OverlapPlan(msgspec.Struct, frozen=True):
    """What is played. groups, size: of a step, and answers of a group. waves: answers of a step for each place of the engine.
    sigmas: of the logarithm of an answer's length. staleness: versions that an answer may be old. mean: tokens of an answer.
    longest: so many times `mean` at most. token_s: of the engine. publish_s: of a version, from the step's end to its event.
    load_s: of a version in the engine. first: steps before those that are measured. steps: that are measured. seeds: of
    lengths.

    Example: OverlapPlan(steps=10, seeds=(0,))
    """

    groups: int = 8
    size: int = 8
    waves: tuple[int, ...] = (1, 4)
    sigmas: tuple[float, ...] = (0.5, 1.0)
    staleness: int = 2
    mean: int = 48
    longest: int = 8
    token_s: float = 0.2
    publish_s: float = 0.5
    load_s: float = 0.1
    first: int = 6
    steps: int = 24
    seeds: tuple[int, ...] = (0, 1)


class OverlapCase(msgspec.Struct, frozen=True):
    """One run. sigma, waves: see OverlapPlan. staleness: versions, 0 for the synchronous mode. seed: of the lengths."""

    sigma: float
    waves: int
    staleness: int
    seed: int

    def places(self, plan: OverlapPlan) -> int:
        """Of the engine."""
        return max(1, plan.groups * plan.size // self.waves)

    def step_s(self, plan: OverlapPlan) -> float:
        """Of the learner: as long as the engine samples for a step."""
        return plan.groups * plan.size * plan.mean * plan.token_s / self.places(plan)
