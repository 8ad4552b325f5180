"""Limits against raters: events of one rater, near duplicates, and the answers that a rater or a tenant moves.

A rater belongs to a tenant; feedback without a rater is its tenant's. `held_back` counts events of a rater and of similar texts
in windows of `within_ms`. `beyond` counts answers moved in a UTC day: the answer that feedback names, and each credited turn
before it. A rater moves at most max(rater_answers, rater_share of all that is moved), and at most `MAX_TURNS` more; a tenant
likewise, except a tenant whose users are alone that day and the day before. Windows are of log time. Each partition counts for
itself: P partitions allow P · rater_answers + rater_share of all.

Guarantees: feedback beyond a limit counts neither for learning nor as a rating, and has a reason; a retraction is never held
back; a decision follows from the records before it on its partition and their times, and the counters are in the state, so a
rebuild decides alike. Counters are bounded: beyond the number of entries those that began longest ago start again.
"""

from collections.abc import Mapping

from infra.chain.processor import Memory
from schemas import Feedback
from streams.collect.feedback import FeedbackRules
from streams.config import LimitsConfig
from streams.processors.task_dedupe import bands, minhash, shingles, similarity

DAY_MS = 86_400_000
RATERS, TEXTS = "feedback raters", "feedback words"
MOVED_BY_RATERS, MOVED_BY_TENANTS = "moved by raters", "moved by tenants"
# Entries of each memory; a text has 17 entries and a counter.
SIZES = {RATERS: 4096, TEXTS: 16_384, MOVED_BY_RATERS: 4096, MOVED_BY_TENANTS: 1024}
NEAR = 0.8  # estimated similarity from which two texts are near duplicates
RATER_CAP = "more from one rater than counts"
BURST = "burst of near duplicates"
RATER_LIMIT = "more from one rater than trains in a day"
TENANT_LIMIT = "more from one tenant than trains in a day"
OF_KEY = "key "  # prefix of the gateway's name for feedback whose key names no rater
_ALL = ""


def limit_memories(sources: Mapping[str, FeedbackRules]) -> dict[str, Memory]:
    """Return empty memories for all counters that these sources need."""
    names = [MOVED_BY_RATERS, MOVED_BY_TENANTS]
    names += [RATERS] if any(source.per_rater for source in sources.values()) else []
    names += [TEXTS] if any(source.alike for source in sources.values()) else []
    return {name: Memory(SIZES[name]) for name in names}


def held_back(
    memories: dict[str, Memory], feedback: Feedback, source: FeedbackRules | None, time_ms: int, tenant: str = ""
) -> str:
    """Count a feedback; return why it does not count, "" if it does. tenant: of the answer it names."""
    if source is None or feedback.type == "retraction":
        return ""
    window = time_ms // max(1, source.within_ms)
    if source.per_rater:
        name = f"{feedback.source}\x00{tenant}\x00{feedback.rater}"
        if _add(_memory(memories, RATERS), name, window) > source.per_rater:
            return RATER_CAP
    if source.alike and feedback.text:
        texts = _memory(memories, TEXTS)
        if _add(texts, f"count/{_first_alike(texts, feedback)}", window) > source.alike:
            return BURST
    return ""


def beyond(memories: dict[str, Memory], limits: LimitsConfig, tenant: str, rater: str, time_ms: int) -> str:
    """Return why one more feedback does not count, "" if it does. tenant: "" for answers that no gateway gave."""
    day, tenants = time_ms // DAY_MS, _memory(memories, MOVED_BY_TENANTS)
    total, total_before = _counted(tenants, _ALL, day)
    if is_named(rater):
        own, _ = _counted(_memory(memories, MOVED_BY_RATERS), f"{tenant}\x00{rater}", day)
        if own >= max(limits.rater_answers, limits.rater_share * (total + 1)):
            return RATER_LIMIT
    own, own_before = _counted(tenants, f"t{tenant}", day)
    is_alone = (own, own_before) == (total, total_before)
    if not is_alone and own >= max(limits.tenant_answers, limits.tenant_share * (total + 1)):
        return TENANT_LIMIT
    return ""


def charge(memories: dict[str, Memory], tenant: str, rater: str, time_ms: int, moved: int) -> None:
    """Count the answers that a feedback moved."""
    day, tenants = time_ms // DAY_MS, _memory(memories, MOVED_BY_TENANTS)
    if is_named(rater):
        _add(_memory(memories, MOVED_BY_RATERS), f"{tenant}\x00{rater}", day, moved)
    _add(tenants, f"t{tenant}", day, moved)
    _add(tenants, _ALL, day, moved)


def is_named(rater: str) -> bool:
    """True if feedback names a rater."""
    return bool(rater) and not rater.startswith(OF_KEY)


def _memory(memories: dict[str, Memory], name: str) -> Memory:
    return memories.setdefault(name, Memory(SIZES[name]))


def _counted(memory: Memory, key: str, window: int) -> tuple[int, int]:
    known = memory.get(key)
    if not isinstance(known, list):
        return 0, 0
    last, count, before = (int(number) for number in known)
    if last == window:
        return count, before
    return 0, count if last == window - 1 else 0


def _add(memory: Memory, key: str, window: int, more: int = 1) -> int:
    count, before = _counted(memory, key, window)
    if not count:
        memory.discard(key)  # so that a key in use is not the first to be forgotten
    memory.set(key, [window, count + more, before])
    return count + more


def _first_alike(memory: Memory, feedback: Feedback) -> str:
    signature = minhash(shingles(feedback.text or ""))
    keys = bands(signature, f"{feedback.source}\x00{feedback.type}")
    mine = signature.tolist()
    for key in keys:
        other = memory.get(key)
        known = memory.get(f"signature/{other}") if isinstance(other, str) else None
        if isinstance(known, list) and similarity(mine, known) >= NEAR:
            return str(other)
    name = f"{feedback.source}/{feedback.id}"
    memory.set(f"signature/{name}", mine)
    for key in keys:
        memory.set(key, name)
    return name
