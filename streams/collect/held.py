"""Feedback held back: more from one rater than its source takes, and the same text over and over.

A rater is one of its tenant; who is not named is one rater too, so that leaving the name out lifts no cap.

Guarantees: what is held back counts for nothing and has a reason; a retraction is never held back; the decision follows from
the records before it on its partition and their log-append times, and what is remembered lies in the state, so that a rebuild
holds back the same again. Partitions do not know of each other: a rater is counted on each.
"""

from collections.abc import Mapping

from infra.chain.processor import Memory
from schemas import Feedback
from streams.collect.credit import FeedbackRules
from streams.processors.task_dedupe import bands, minhash, shingles, similarity

RATERS = "feedback raters"
TEXTS = "feedback words"
MAX_RATERS = 4096
MAX_TEXTS = 16_384  # 17 entries and a counter for each text
NEAR = 0.8  # estimated similarity from which two texts say the same
RATER_CAP = "more from one rater than counts"
BURST = "burst of near duplicates"


def held_memories(sources: Mapping[str, FeedbackRules]) -> dict[str, Memory]:
    """What has to be remembered for these sources."""
    memories = {}
    if any(source.per_rater for source in sources.values()):
        memories[RATERS] = Memory(MAX_RATERS)
    if any(source.alike for source in sources.values()):
        memories[TEXTS] = Memory(MAX_TEXTS)
    return memories


def held_back(
    memories: dict[str, Memory], feedback: Feedback, source: FeedbackRules | None, time_ms: int, tenant: str = ""
) -> str:
    """Why this feedback does not count, "" if it does; it is remembered either way. tenant: whose answer it is about."""
    if source is None or feedback.type == "retraction":
        return ""
    if source.per_rater:
        raters = memories.setdefault(RATERS, Memory(MAX_RATERS))
        name = f"{feedback.source}\x00{tenant}\x00{feedback.rater}"
        if _count(raters, name, time_ms, source.within_ms) > source.per_rater:
            return RATER_CAP
    if source.alike and feedback.text:
        texts = memories.setdefault(TEXTS, Memory(MAX_TEXTS))
        same = _alike(texts, feedback)
        if _count(texts, f"count/{same}", time_ms, source.within_ms) > source.alike:
            return BURST
    return ""


def _count(memory: Memory, key: str, time_ms: int, within_ms: int) -> int:
    """How often this was called for `key`, counted anew `within_ms` after the first."""
    known = memory.get(key)
    since, count = (int(known[0]), int(known[1])) if isinstance(known, list) else (time_ms, 0)
    if time_ms - since >= within_ms:
        since, count = time_ms, 0
        memory.discard(key)  # so that what is new is not the first to be forgotten
    memory.set(key, [since, count + 1])
    return count + 1


def _alike(memory: Memory, feedback: Feedback) -> str:
    """Name of the first text that says nearly the same under this source and type, which may be this one."""
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
