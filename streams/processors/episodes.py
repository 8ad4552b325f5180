"""Episodes of a group: the parts of one episode share its reward and its advantage."""

from collections.abc import Iterable, Mapping, Sequence

from schemas import Experience


def is_judged(experience: Experience) -> bool:
    return not experience.is_given


def by_episode(group: Iterable[Experience]) -> dict[int, list[Experience]]:
    """Judged members of each episode, in the order of their parts."""
    episodes: dict[int, list[Experience]] = {}
    for experience in group:
        if is_judged(experience):
            episodes.setdefault(experience.episode, []).append(experience)
    for parts in episodes.values():
        parts.sort(key=lambda part: part.part)
    return episodes


def episode_rewards(group: Iterable[Experience]) -> dict[int, float]:
    """Reward of each judged episode that has one: that of its latest part."""
    rewards: dict[int, float] = {}
    for episode, parts in by_episode(group).items():
        for part in parts:
            if part.reward is not None:
                rewards[episode] = part.reward
    return rewards


def is_lone(group: Sequence[Experience], rewards: Mapping[int, float]) -> bool:
    """Return True if the group holds nothing to compare with: one answer, or choices of production of which one was rated."""
    return group[0].group_size == 1 or (group[0].lane == "live" and len(rewards) == 1)
