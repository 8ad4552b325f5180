"""Outcomes of experiences, tasks and closures, small enough to compare millions: as recorded, or as they come out now.

Guarantee: two outcomes without a difference are equal in fate, scores, reward, advantage, priority, lane, tokens,
logprobs and text, to the bit.
"""

import hashlib

import msgspec

from schemas import BadFrame, Closure, DropMarker, Experience, Score, Task
from streams.processors.filter import dedupe_key

ENDING = "closure "
_encoder = msgspec.msgpack.Encoder()


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of an experience, a task or a closure.

    key: its name in both runs. dropped: reason, "" for kept. content: hash of its content, or the text of a closure. parent:
    the experience it was made from. scores, reward, advantage, priority, lane: of the experience.
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
    """One difference from the record. kind: "re-scored", "newly dropped" and others. reason: of a drop, or the name of a score.
    old, new: for people.
    """

    kind: str
    reason: str
    old: str
    new: str


def kept_outcome(experience: Experience) -> Outcome:
    """Return the outcome of a kept experience. A dropped answer of an eval is kept as failed, and counts as dropped."""
    if experience.suite and experience.failure:
        return dropped_outcome(experience, experience.failure)
    return Outcome(
        key=dedupe_key(experience),
        scores=experience.scores,
        reward=experience.reward,
        advantage=experience.advantage,
        priority=experience.priority,
        lane=experience.lane,
        content=_content(experience),
        parent=experience.parent,
    )


def dropped_outcome(experience: Experience | DropMarker, reason: str) -> Outcome:
    key = f"{experience.id}/{experience.revision}" if experience.revision else experience.id
    return Outcome(key=key, dropped=reason)


def ending(closure: Closure) -> Outcome:
    drops = ", ".join(f"{count} {label}" for label, count in sorted(closure.drops.items()))
    ending = f"{closure.outcome} {closure.experiences}{' ' + closure.reason if closure.reason else ''}"
    reward = "" if closure.mean_reward is None else f", mean reward {closure.mean_reward:.9g}"
    rated = (
        ""
        if not closure.ratings
        else f", rated {', '.join(f'{rating.source} {rating.value:.9g}' for rating in closure.ratings)}"
    )
    return Outcome(key=_ending_key(closure), content=f"{ending}{f' ({drops})' if drops else ''}{reward}{rated}")


def left_out(closure: Closure) -> Outcome:
    """Return the reason why a member of the group is not in the buffer, as far as the closure tells."""
    reason = closure.reason if closure.outcome == "dropped" else ""
    if closure.drops and not reason:
        reason = max(sorted(closure.drops), key=lambda label: closure.drops[label])
    return Outcome(key=f"left out of {_ending_key(closure)}", dropped=reason or "left out in collect")


def _ending_key(closure: Closure) -> str:
    return f"{ENDING}{closure.group} {closure.attempt} {closure.revision}"


def task_content(task: Task) -> str:
    return _hash(_encoder.encode(task))


def differences(old: Outcome, new: Outcome) -> list[Difference]:
    """Return the differences from the record, the most telling first."""
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


def _values(outcome: Outcome) -> dict[str, float]:
    return {score.name if score.at is None else f"{score.name}@{score.at}": score.value for score in outcome.scores}


def _text(outcome: Outcome) -> str:
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
