"""length: a score that likes the shorter of the right answers to one question, and none of the long wrong ones."""

import msgspec

from infra.chain.processor import processor
from schemas import Experience, Score
from streams.processors.episodes import by_episode

NAME = "length"


@processor(version=1, of="group", inline=True)
def length(group: tuple[Experience, ...], *, correct: str = "exact", least: float = 1.0) -> tuple[Experience, ...]:
    """Score `length` of each episode: λ = 0.5 - (len - shortest) / (longest - shortest) where its score `correct` is at least
    `least`, min(0, λ) where it is not, 0 where all are as long.

    The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3). len: sampled tokens over all parts. Goes before
    `reward` in stage collect, and takes a small weight above 0 in `[reward] blend`; the paper leaves it out at first.
    correct: name of the score that says which are right. least: its value from which one is.

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
