"""Score that prefers the shorter of the right answers to a question."""

import msgspec

from infra.chain.processor import processor
from schemas import Experience, Score
from streams.processors.episodes import by_episode

NAME = "length"


@processor(version=1, of="group", inline=True)
def length(group: tuple[Experience, ...], *, correct: str = "exact", least: float = 1.0) -> tuple[Experience, ...]:
    """Length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3), as the score `length` of each episode.

    λ = 0.5 - (len - shortest) / (longest - shortest) if the episode is correct, else min(0, λ); 0 if all lengths are equal. len
    counts sampled tokens over all parts. Insert it before `reward` in stage collect, with a small positive weight in `[reward]
    blend`; the paper starts training without it.

    correct: Name of the score that decides correctness. least: Minimum of that score for a correct episode.

    Example: use = "streams.processors.length:length", stage = "collect", before = "reward"
    """
    episodes = by_episode(group)
    lengths = {episode: sum(part.num_sampled for part in parts) for episode, parts in episodes.items()}
    if not lengths:
        return group
    shortest, longest = min(lengths.values()), max(lengths.values())
    values = {}
    for episode, parts in episodes.items():
        share = 0.5 - (lengths[episode] - shortest) / (longest - shortest) if longest > shortest else 0.0
        is_right = any((part.score(correct) or 0.0) >= least for part in parts)
        values[episode] = share if is_right else min(0.0, share)
    return tuple(_with_score(member, values) for member in group)


def _with_score(member: Experience, values: dict[int, float]) -> Experience:
    if member.is_given:
        return member
    others = tuple(score for score in member.scores if score.name != NAME)
    return msgspec.structs.replace(member, scores=(*others, Score(NAME, values[member.episode])))
