"""difficulty: a group whose episodes all got the same reward teaches nothing by comparison."""

from infra.chain.processor import Drop, processor
from schemas import Experience
from streams.processors.advantage import differ
from streams.processors.episodes import episode_rewards, is_lone

ALL_EQUAL = "all rewards equal"
TOLERANCE = 1e-9  # rewards closer than this are equal: blends differ in their last bits


@processor(version=2, of="group", inline=True)
def difficulty(group: tuple[Experience, ...]) -> tuple[Experience | Drop, ...]:
    """Drop all judged members of a group (group_size 2 or more) with equal rewards. Demonstrations pass; so do the only rated
    choice of a request, which has a running baseline, and a group whose turns differ.
    """
    found = episode_rewards(group)
    rewards = list(found.values())
    if not rewards or is_lone(group, found) or differ(group) or max(rewards) - min(rewards) > TOLERANCE:
        return group
    detail = f"{len(rewards)} episodes with reward {rewards[0]:g}"
    return tuple(Drop(ALL_EQUAL, detail) if not member.is_given else member for member in group)
