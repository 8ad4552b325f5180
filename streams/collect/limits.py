"""What one rater and one tenant can move in a day: of how many answers their feedback may decide how they are learned from.

Feedback moves the answer it is about, and each turn before it that is credited. Of a UTC day of log time, on one partition, a
rater moves at most max(rater_answers, rater_share of all that is moved there), and at most `MAX_TURNS` more; a tenant, and
so each of its keys, likewise. Of P partitions that is P · rater_answers + rater_share of all. A tenant whose users are alone
that day and the day before has no bound: there is no other tenant to protect.

Guarantees: what is beyond counts for nothing, neither for learning nor as a rating, and has a reason; a retraction
is never held; the decision follows from the records before it on its partition and their times, and what is remembered is
bounded: of more than `MAX_RATERS` raters or `MAX_TENANTS` tenants those that began longest ago begin anew.
"""

import msgspec

from infra.chain.processor import Memory

DAY_MS = 86_400_000
RATERS, TENANTS = "moved by raters", "moved by tenants"
MAX_RATERS = 4096
MAX_TENANTS = 1024
RATER_LIMIT = "more from one rater than trains in a day"
TENANT_LIMIT = "more from one tenant than trains in a day"
OF_KEY = "key "  # what the gateway calls the rater where a key names none
_ALL = ""


class DayLimits(msgspec.Struct, frozen=True):
    """What one rater and one tenant can move in a UTC day on one partition. See [collect.limits].

    rater_answers: answers that a named rater moves in any case. rater_share: of all that is moved, where that is more.
    tenant_answers: answers that a tenant moves in any case. tenant_share: of all that is moved, where that is more.

    Example: DayLimits(rater_answers=100, rater_share=0.01)
    """

    rater_answers: int = 500
    rater_share: float = 0.1
    tenant_answers: int = 10_000
    tenant_share: float = 0.5


def limit_memories() -> dict[str, Memory]:
    """What has to be remembered."""
    return {RATERS: Memory(MAX_RATERS), TENANTS: Memory(MAX_TENANTS)}


def beyond(memories: dict[str, Memory], limits: DayLimits, tenant: str, rater: str, time_ms: int) -> str:
    """Why one more feedback does not count, "" if it does. tenant: "" for answers that the gateway did not give."""
    day, tenants = time_ms // DAY_MS, _memory(memories, TENANTS, MAX_TENANTS)
    total, before = _moved(tenants, _ALL, day)
    if is_somebody(rater):
        own, _ = _moved(_memory(memories, RATERS, MAX_RATERS), _name(tenant, rater), day)
        if own >= max(limits.rater_answers, limits.rater_share * (total + 1)):
            return RATER_LIMIT
    own, own_before = _moved(tenants, f"t{tenant}", day)
    is_alone = (own, own_before) == (total, before)
    if not is_alone and own >= max(limits.tenant_answers, limits.tenant_share * (total + 1)):
        return TENANT_LIMIT
    return ""


def charge(memories: dict[str, Memory], tenant: str, rater: str, time_ms: int, moved: int) -> None:
    """Count what a feedback moved."""
    day, tenants = time_ms // DAY_MS, _memory(memories, TENANTS, MAX_TENANTS)
    if is_somebody(rater):
        _add(_memory(memories, RATERS, MAX_RATERS), _name(tenant, rater), day, moved)
    _add(tenants, f"t{tenant}", day, moved)
    _add(tenants, _ALL, day, moved)


def is_somebody(rater: str) -> bool:
    """Whether a rater is named: feedback without one is the tenant's."""
    return bool(rater) and not rater.startswith(OF_KEY)


def _memory(memories: dict[str, Memory], name: str, limit: int) -> Memory:
    return memories.setdefault(name, Memory(limit))


def _name(tenant: str, rater: str) -> str:
    return f"{tenant}\x00{rater}"


def _moved(memory: Memory, key: str, day: int) -> tuple[int, int]:
    """Moved on `day`, and on the day before."""
    known = memory.get(key)
    if not isinstance(known, list):
        return 0, 0
    last, count, before = (int(number) for number in known)
    if last == day:
        return count, before
    return 0, count if last == day - 1 else 0


def _add(memory: Memory, key: str, day: int, moved: int) -> None:
    count, before = _moved(memory, key, day)
    if not count:
        memory.discard(key)  # so that what is in use is not the first to be forgotten
    memory.set(key, [day, count + moved, before])
