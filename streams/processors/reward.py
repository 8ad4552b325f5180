"""Reward of an episode: a number blended from its scores, the same for all its parts."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from infra.chain.processor import Drop, processor
from schemas import Experience
from streams.processors.episodes import by_episode

UNLABELLED = "unlabelled"
INCOMPLETE = "incomplete episode"


@processor(version=3, of="group", inline=True)
def reward(
    group: tuple[Experience, ...], *, blend: Mapping[str, float] | None, require: Sequence[str], discount: float
) -> tuple[Experience | Drop, ...]:
    """Weighted mean of the scores in `blend`; the weights of absent scores are redistributed. A negative weight is a penalty,
    subtracted from the mean of the other scores.

    Without a blend: all scores of the whole with equal weights; without such scores, all scores given turn by turn.

    A score given turn by turn (`at`) counts as its discounted sum over the episode, across its parts, unless the whole has a
    score of that name. An episode without any of the scores, or without a required score, is dropped as unlabelled; an episode
    counted by turns that misses a part, as incomplete. Demonstrations pass.
    """
    verdicts: dict[int, float | Drop] = {}
    for episode, parts in by_episode(group).items():
        scores = {score.name: score.value for part in parts for score in part.scores if score.at is None}
        by_turn = {name: value for name, value in returns(parts, discount).items() if name not in scores}
        weights = blend or dict.fromkeys(scores or by_turn, 1.0)
        scores |= by_turn
        if not is_whole(parts) and any(name in by_turn for name in (*weights, *require)):
            verdicts[episode] = Drop(INCOMPLETE, f"episode {episode} has parts {[part.part for part in parts]}")
        else:
            verdicts[episode] = blended(scores, weights, require)
    return tuple(_with_reward(member, verdicts) for member in group)


def returns(parts: Sequence[Experience], discount: float) -> dict[str, float]:
    """Σ_k discount^k · r_k of each score given turn by turn, k counting that score's own turns over all parts."""
    values: dict[str, list[float]] = {}
    for part in parts:
        turns = [(score.at, score.name, score.value) for score in part.scores if score.at is not None]
        for _, name, value in sorted(turns, key=lambda turn: turn[0]):
            values.setdefault(name, []).append(value)
    return {
        name: math.fsum(discount**turn * value for turn, value in enumerate(given)) for name, given in values.items()
    }


def is_whole(parts: Sequence[Experience]) -> bool:
    return parts[-1].last and [part.part for part in parts] == list(range(len(parts)))


def blended(scores: Mapping[str, float], weights: Mapping[str, float], require: Sequence[str] = ()) -> float | Drop:
    """Weighted mean of the present scores, Σ w · s over the sum of the positive weights, or the reason for its absence. A
    penalty alone is no verdict.
    """
    missing = [name for name in require if name not in scores]
    if missing:
        return Drop(UNLABELLED, f"no score {', '.join(missing)}")
    present = {name: weight for name, weight in weights.items() if name in scores}
    total = sum(weight for weight in present.values() if weight > 0)
    if total <= 0:
        return Drop(UNLABELLED, f"no score of {', '.join(weights) or 'any name'}")
    return sum(weight * scores[name] for name, weight in present.items()) / total


def _with_reward(member: Experience, verdicts: Mapping[int, float | Drop]) -> Experience | Drop:
    if member.is_given:
        return member
    verdict = verdicts[member.episode]
    return verdict if isinstance(verdict, Drop) else msgspec.structs.replace(member, reward=verdict)
