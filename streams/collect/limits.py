"""Limits against raters and tenants: the answers that each moves by feedback in a UTC day of log time.

A rater belongs to a tenant; feedback without a rater is its tenant's. Moved are the answer that feedback names, if what counts
on it changes, and each credited turn before it. A rater moves at most max(rater_answers, rater_share of all that is moved),
and at most `MAX_TURNS` more; a tenant likewise, except a tenant whose users are alone that day and the day before. Each
partition counts for itself: P partitions allow P · rater_answers + rater_share of all.

Guarantees: feedback beyond a limit counts neither for learning nor as a rating, and has a reason; a retraction is never
held back; a decision follows from the records before it on its partition and their times, and the counters are in the state,
so a rebuild decides alike. Counters are bounded: beyond the number of entries the counters that began longest ago restart.
"""

from infra.chain.processor import Memory
from schemas.ids import is_person
from streams.config import LimitsConfig

DAY_MS = 86_400_000
MOVED_BY_RATERS, MOVED_BY_TENANTS = "moved by raters", "moved by tenants"
SIZES = {MOVED_BY_RATERS: 4096, MOVED_BY_TENANTS: 1024}  # entries of each memory
RATER_LIMIT = "over a rater's daily limit"
TENANT_LIMIT = "over a tenant's daily limit"
_ALL = ""


def limit_memories() -> dict[str, Memory]:
    return {name: Memory(size) for name, size in SIZES.items()}


def beyond(memories: dict[str, Memory], limits: LimitsConfig, tenant: str, rater: str, time_ms: int) -> str:
    """Return why one more feedback does not count, "" if it does. tenant: "" for answers that no gateway gave."""
    day, tenants = time_ms // DAY_MS, _memory(memories, MOVED_BY_TENANTS)
    total, total_before = _counted(tenants, _ALL, day)
    if is_person(rater):
        own, _ = _counted(_memory(memories, MOVED_BY_RATERS), f"{tenant}\x00{rater}", day)
        if own >= max(limits.rater_answers, limits.rater_share * (total + 1)):
            return RATER_LIMIT
    own, own_before = _counted(tenants, f"t{tenant}", day)
    is_alone = (own, own_before) == (total, total_before)
    if not is_alone and own >= max(limits.tenant_answers, limits.tenant_share * (total + 1)):
        return TENANT_LIMIT
    return ""


def charge(memories: dict[str, Memory], tenant: str, rater: str, time_ms: int, moved: int) -> None:
    day, tenants = time_ms // DAY_MS, _memory(memories, MOVED_BY_TENANTS)
    if is_person(rater):
        _add(_memory(memories, MOVED_BY_RATERS), f"{tenant}\x00{rater}", day, moved)
    _add(tenants, f"t{tenant}", day, moved)
    _add(tenants, _ALL, day, moved)


def _memory(memories: dict[str, Memory], name: str) -> Memory:
    return memories.setdefault(name, Memory(SIZES[name]))


def _counted(memory: Memory, key: str, day: int) -> tuple[int, int]:
    known = memory.get(key)
    if not isinstance(known, list):
        return 0, 0
    last, count, before = (int(number) for number in known)
    if last == day:
        return count, before
    return 0, count if last == day - 1 else 0


def _add(memory: Memory, key: str, day: int, more: int) -> None:
    count, before = _counted(memory, key, day)
    if not count:
        memory.discard(key)  # so that a key in use is not the first to be forgotten
    memory.set(key, [day, count + more, before])
