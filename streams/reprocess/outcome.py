"""What became of one experience, small enough to compare millions: as the log records it, or as it would be.

Guarantee: two outcomes without a difference are equal in fate, scores, reward, advantage, priority, lane, tokens,
logprobs and text, to the bit.
"""

import hashlib

import msgspec

from schemas import BadFrame, Closure, DropMarker, Experience, Score, Task
from streams.processors.dedupe import dedupe_key

ENDING = "closure "
_encoder = msgspec.msgpack.Encoder()


class Reprocessed(msgspec.Struct, frozen=True, array_like=True):
    """One experience (or task, or closure) as it is compared.

    key: what it is known by in both runs. dropped: reason, "" for kept. scores: in the order given. reward, advantage,
    priority, lane: as the experience has them. content: hash of what it holds, or what a closure says. parent: the experience
    it was made from.

    Example: Reprocessed("add-3745.2.0-7-0", dropped="too short")
    """

    key: str
    dropped: str = ""
    scores: tuple[Score, ...] = ()
    reward: float | None = None
    advantage: float | None = None
    priority: float = 1.0
    lane: str = ""
    content: str = ""
    parent: str = ""


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as recorded.

    kind: "re-scored", "newly dropped" and the like. reason: of a drop, or the name of a score. old: as recorded, for people.
    new: as it comes out now.

    Example: Difference("re-scored", "judge", "0.4", "0.7")
    """

    kind: str
    reason: str
    old: str
    new: str


def kept(experience: Experience) -> Reprocessed:
    """An experience that is kept. An eval answer that the chain dropped is kept as failed, and counts as dropped."""
    if experience.suite and experience.failure:
        return dropped(experience, experience.failure)
    return Reprocessed(
        key=dedupe_key(experience),
        scores=experience.scores,
        reward=experience.reward,
        advantage=experience.advantage,
        priority=experience.priority,
        lane=experience.lane,
        content=_content(experience),
        parent=experience.parent,
    )


def dropped(experience: Experience | DropMarker, reason: str) -> Reprocessed:
    """An experience that goes no further."""
    key = f"{experience.id}/{experience.revision}" if experience.revision else experience.id
    return Reprocessed(key=key, dropped=reason)


def ending(closure: Closure) -> Reprocessed:
    """How a group ended."""
    drops = ", ".join(f"{count} {label}" for label, count in sorted(closure.drops.items()))
    ending = f"{closure.outcome} {closure.experiences}{' ' + closure.reason if closure.reason else ''}"
    reward = "" if closure.mean_reward is None else f", mean reward {closure.mean_reward:.9g}"
    rated = (
        ""
        if not closure.ratings
        else f", rated {', '.join(f'{one.source} {one.value:.9g}' for one in closure.ratings)}"
    )
    return Reprocessed(key=ending_key(closure), content=f"{ending}{f' ({drops})' if drops else ''}{reward}{rated}")


def left_out(closure: Closure) -> Reprocessed:
    """Why a member of the group is not in the buffer, as far as its closure tells."""
    reason = closure.reason if closure.outcome == "dropped" else ""
    if closure.drops and not reason:
        reason = max(sorted(closure.drops), key=lambda label: closure.drops[label])
    return Reprocessed(key=f"left out of {ending_key(closure)}", dropped=reason or "left out in collect")


def ending_key(closure: Closure) -> str:
    """The key of the closure of one attempt at one revision."""
    return f"{ENDING}{closure.group} {closure.attempt} {closure.revision}"


def task_content(task: Task) -> str:
    """Hash of all a task says."""
    return _hash(_encoder.encode(task))


def differences(old: Reprocessed, new: Reprocessed) -> list[Difference]:
    """What is not as recorded, most telling first; empty for the same."""
    if old.dropped or new.dropped:
        if old.dropped == new.dropped:
            return []
        if not old.dropped:
            return [Difference("newly dropped", new.dropped, _text(old), new.dropped)]
        kind = "dropped for another reason" if new.dropped else "no longer dropped"
        return [Difference(kind, old.dropped, old.dropped, new.dropped or _text(new))]
    found: list[Difference] = []
    before, after = _values(old), _values(new)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            found.append(Difference("re-scored", name, _number(before.get(name)), _number(after.get(name))))
    for kind, was, now in (
        ("re-rewarded", old.reward, new.reward),
        ("other advantage", old.advantage, new.advantage),
        ("re-prioritized", old.priority, new.priority),
    ):
        if was != now:
            found.append(Difference(kind, "", _number(was), _number(now)))
    if old.lane != new.lane:
        found.append(Difference("other lane", "", old.lane, new.lane))
    if old.content != new.content:
        is_ending = old.key.startswith(ENDING)
        texts = (old.content, new.content) if is_ending else ("", "")
        found.append(Difference("other ending" if is_ending else "other content", "", *texts))
    return found


def _values(outcome: Reprocessed) -> dict[str, float]:
    return {score.name if score.at is None else f"{score.name}@{score.at}": score.value for score in outcome.scores}


def _text(outcome: Reprocessed) -> str:
    return "kept" if outcome.reward is None else f"kept, reward {outcome.reward:g}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _content(experience: Experience) -> str:
    try:
        bulk = (experience.tokens.tobytes(), experience.logprobs.tobytes(), experience.messages)
    except BadFrame:
        return "unreadable"
    return _hash(_encoder.encode((*bulk, experience.spans)))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()
