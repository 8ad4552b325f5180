"""novelty: what was seen often is drawn less. Place it behind `prioritize`, whose priority it multiplies."""

import hashlib
import math
from typing import Literal

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience
from schemas.ids import task_of
from streams.processors.episodes import is_judged
from streams.processors.prioritize import MIN_PRIORITY

REMEMBERED = 262_144


@processor(version=1, of="group", memory=REMEMBERED)
def novelty(
    group: tuple[Experience, ...],
    *,
    memory: Memory,
    of: Literal["task", "answer"] = "task",
    min_factor: float = MIN_PRIORITY,
) -> tuple[Experience, ...]:
    """Priority times the mean of 1/√n over what was seen the nth time (Bellemare et al., arXiv 1606.01868, section 4).

    of: the task of the group, or each answer to it by its text (whose bulk is then decoded). Counted on this partition;
    a later revision of a group is not seen again. min_factor: the smallest factor.
    """
    judged = [member for member in group if is_judged(member)]
    if not judged:
        return group
    is_new = judged[0].revision == 0
    keys = [task_of(judged[0].group)] if of == "task" else [_answer_key(member) for member in judged]
    bonus = math.fsum(1.0 / math.sqrt(_seen(key, memory, is_new)) for key in keys) / len(keys)
    factor = max(min_factor, bonus)
    return tuple(msgspec.structs.replace(m, priority=m.priority * factor) if is_judged(m) else m for m in group)


def _seen(key: str, memory: Memory, is_new: bool) -> int:
    """How often, this time included."""
    before = memory.get(key, 0)
    assert isinstance(before, int)
    count = before + is_new
    memory.set(key, count)
    return max(1, count)


def _answer_key(member: Experience) -> str:
    text = f"{task_of(member.group)}\x00{member.response}"
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()
