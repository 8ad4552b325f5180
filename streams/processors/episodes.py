"""Episodes of a group: all parts of an episode share its reward and its advantage. Demonstrations have neither."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from schemas import Experience, ids


def by_episode(group: Iterable[Experience]) -> dict[int, list[Experience]]:
    """Judged members of each episode, in the order of their parts."""
    episodes: dict[int, list[Experience]] = {}
    for experience in group:
        if not experience.is_given:
            episodes.setdefault(experience.episode, []).append(experience)
    for parts in episodes.values():
        parts.sort(key=lambda part: part.part)
    return episodes


def episode_rewards(group: Iterable[Experience]) -> dict[int, float]:
    """Return the reward of each judged episode that has one: the reward of its latest part."""
    rewards: dict[int, float] = {}
    for episode, parts in by_episode(group).items():
        for part in parts:
            if part.reward is not None:
                rewards[episode] = part.reward
    return rewards


def is_lone(group: Sequence[Experience], rewards: Mapping[int, float]) -> bool:
    """True if the group has nothing to compare with: a single answer, or choices of a request with a single rating."""
    return group[0].group_size == 1 or (group[0].lane == "live" and len(rewards) == 1)


def derive(source: Experience, processor: str, index: int, **fields: Any) -> Experience:
    """Return a copy of an answer in a group of its own, with these fields; a retry gives it the same id.

    index: number of the copy among the copies that a processor makes of one answer.
    """
    group = ids.synthetic_group((source.id,), processor, index)
    own = {
        "id": ids.experience_id(group, 0, fields.get("episode", 0)), "group": group, "episode": 0, "group_size": 1,
        "attempt": 0, "sequence": -1, "advantage": None, "advantages": (), "parent": source.id, "turn": -1, "carried": 0,
        "trial": -1, "ends_session": False, "retrained": 0,
    }  # fmt: skip
    return msgspec.structs.replace(source, **own | fields)
