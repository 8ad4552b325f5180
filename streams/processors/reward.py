"""reward: one number per episode, blended from its scores; every part of the episode gets it."""

from collections.abc import Mapping, Sequence

import msgspec

from infra.processor import Drop, processor
from schemas import Experience
from streams.processors.episodes import by_episode

UNLABELLED = "unlabelled"


@processor(version=1, inline=True)
def reward(
    group: tuple[Experience, ...], *, blend: Mapping[str, float] | None = None, require: Sequence[str] = ()
) -> tuple[Experience | Drop, ...]:
    """Weighted mean of the scores in `blend`; the weights of absent ones go to the others. No blend: every score alike.

    An episode without any of them, or without one that is required, is dropped as unlabelled. Scores of a token
    (`at`) do not count here. Demonstrations pass.
    """
    verdicts: dict[int, float | Drop] = {}
    for episode, parts in by_episode(group).items():
        scores = {score.name: score.value for part in parts for score in part.scores if score.at is None}
        verdicts[episode] = blended(scores, blend or dict.fromkeys(scores, 1.0), require)
    return tuple(_with_reward(member, verdicts) for member in group)


def blended(scores: Mapping[str, float], weights: Mapping[str, float], require: Sequence[str] = ()) -> float | Drop:
    """Weighted mean over the scores that are there, or why there is none."""
    missing = [name for name in require if name not in scores]
    if missing:
        return Drop(UNLABELLED, f"no score {', '.join(missing)}")
    present = {name: weight for name, weight in weights.items() if name in scores}
    total = sum(present.values())
    if total <= 0:
        return Drop(UNLABELLED, f"no score of {', '.join(weights) or 'any name'}")
    return sum(weight * scores[name] for name, weight in present.items()) / total


def _with_reward(member: Experience, verdicts: Mapping[int, float | Drop]) -> Experience | Drop:
    if member.lane == "expert":
        return member
    verdict = verdicts[member.episode]
    return verdict if isinstance(verdict, Drop) else msgspec.structs.replace(member, reward=verdict)
