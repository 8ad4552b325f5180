"""Advantages turn by turn: what a token is credited with is what came behind it, compared with the turns of the group.

    r~_j = (r_j - mean) / (std + epsilon) over the turn rewards of all episodes of the group
    A_t  = Σ r~_j of the turns that end at token t or later, across the parts of the episode

This is the advantage of GRPO with process supervision (arXiv 2402.03300, section 4.1.3): a turn that spoilt what went well
before it pays for it alone. It does not compare like with like: episodes of more turns sum more terms, which is right where
rewards tell progress and the mean is near what a turn usually brings.
"""

import math
from collections.abc import Sequence

import msgspec

from schemas import Experience, Stretch
from streams.processors.episodes import by_episode


def with_turns(group: Sequence[Experience], name: str, epsilon: float, *, scaled: bool) -> dict[str, Experience]:
    """By id, the members of episodes that have a score `name` given turn by turn (`Score.at`), each with `advantages` of its
    turns and their mean over its sampled tokens as `advantage`. scaled: divided by the std, else only less the mean.

    A score of the whole of an episode counts as given at its last token.
    """
    episodes = {episode: parts for episode, parts in by_episode(group).items() if _rewards(parts, name)}
    values = [value for parts in episodes.values() for given in _rewards(parts, name) for _, value in given]
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    over = std + epsilon if scaled else 1.0
    found: dict[str, Experience] = {}
    for parts in episodes.values():
        behind = 0.0
        for part, given in zip(reversed(parts), reversed(_rewards(parts, name)), strict=True):
            stretches, behind = _stretches(part, [(at, (value - mean) / over) for at, value in given], behind)
            found[part.id] = msgspec.structs.replace(part, advantages=stretches, advantage=_mean(part, stretches))
    return found


def _rewards(parts: Sequence[Experience], name: str) -> list[list[tuple[int, float]]]:
    given = [
        sorted(
            (part.num_tokens - 1 if score.at is None else score.at, score.value)
            for score in part.scores
            if score.name == name
        )
        for part in parts
    ]
    return given if any(given) else []


def _stretches(
    part: Experience, given: Sequence[tuple[int, float]], behind: float
) -> tuple[tuple[Stretch, ...], float]:
    ends: dict[int, float] = {}
    for at, value in given:
        ends[at + 1] = ends.get(at + 1, 0.0) + value
    ends.setdefault(part.num_tokens, 0.0)
    found: list[Stretch] = []
    for stop in sorted(ends, reverse=True):
        behind += ends[stop]
        found.append(Stretch(stop, behind))
    return tuple(reversed(found)), behind


def _mean(part: Experience, stretches: Sequence[Stretch]) -> float:
    total, start = 0.0, 0
    for stretch in stretches:
        within = sum(max(0, min(stretch.stop, span.stop) - max(start, span.start)) for span in part.spans)
        total, start = total + within * stretch.advantage, stretch.stop
    return total / max(1, part.num_sampled)


def differ(group: Sequence[Experience]) -> bool:
    """Return True if turns of the group have advantages of their own, so that it teaches even if all rewards are equal."""
    return any(stretch.advantage for member in group for stretch in member.advantages)
