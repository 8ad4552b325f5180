"""Priorities of groups, for lanes with draw = "priority"."""

import hashlib
import math
from typing import Literal

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience
from schemas.ids import task_of
from streams.processors.episodes import episode_rewards

MIN_PRIORITY = 0.1


@processor(version=1, of="group", inline=True)
def prioritize(group: tuple[Experience, ...], *, min_priority: float = MIN_PRIORITY) -> tuple[Experience, ...]:
    """Priority from the spread of the group's rewards: 1 for half right and half wrong, `min_priority` for all alike.

    2·std of rewards in [0, 1], cut to [min_priority, 1]; a lone answer takes its |advantage| cut alike. Whole groups
    are drawn, so all judged members get the same.
    """
    rewards = list(episode_rewards(group).values())
    if len(rewards) >= 2:
        mean = math.fsum(rewards) / len(rewards)
        spread = 2 * math.sqrt(math.fsum((value - mean) ** 2 for value in rewards) / len(rewards))
    else:
        spread = max((abs(member.advantage or 0.0) for member in group), default=0.0)
    priority = min(1.0, max(min_priority, spread))
    return tuple(msgspec.structs.replace(m, priority=priority) if not m.is_given else m for m in group)


REMEMBERED = 262_144


@processor(version=1, of="group", memory=REMEMBERED)
def novelty(
    group: tuple[Experience, ...],
    *,
    memory: Memory,
    of: Literal["task", "answer"] = "task",
    min_factor: float = MIN_PRIORITY,
) -> tuple[Experience, ...]:
    """Multiply the priority by the mean of 1/√n, where n counts earlier occurrences (Bellemare et al., arXiv 1606.01868,
    section 4). Each partition counts by itself; a later revision of a group does not count again.

    of: Counted object: the group's task, or the text of each answer, which costs its decoding. min_factor: Minimum factor.
    """
    judged = [member for member in group if not member.is_given]
    if not judged:
        return group
    is_new = judged[0].revision == 0
    keys = [task_of(judged[0].group)] if of == "task" else [_answer_key(member) for member in judged]
    bonus = math.fsum(1.0 / math.sqrt(_seen(key, memory, is_new)) for key in keys) / len(keys)
    factor = max(min_factor, bonus)
    return tuple(msgspec.structs.replace(m, priority=m.priority * factor) if not m.is_given else m for m in group)


def _seen(key: str, memory: Memory, is_new: bool) -> int:
    before = memory.get(key, 0)
    assert isinstance(before, int)
    count = before + is_new
    memory.set(key, count)
    return max(1, count)


def _answer_key(member: Experience) -> str:
    text = f"{task_of(member.group)}\x00{member.response}"
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()
