"""The report of a reprocessing: totals, and differences from the record by kind and reason, with a few examples each."""

import hashlib
import sqlite3
from collections.abc import Iterator, Mapping

import msgspec

from schemas import BadFrame, Closure, DropMarker, Experience, Score
from streams.processors.filter import dedupe_key

ENDING = "closure "
_encoder = msgspec.msgpack.Encoder()


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of an experience or a closure.

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
    reason = closure.reason if closure.outcome == "dropped" else ""
    if closure.drops and not reason:
        reason = max(sorted(closure.drops), key=lambda label: closure.drops[label])
    return Outcome(key=f"left out of {_ending_key(closure)}", dropped=reason or "left out in collect")


def _ending_key(closure: Closure) -> str:
    return f"{ENDING}{closure.group} {closure.attempt} {closure.revision}"


def differences(old: Outcome, new: Outcome) -> list[Difference]:
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
    return hashlib.blake2b(_encoder.encode((*bulk, experience.spans)), digest_size=12).hexdigest()


EXAMPLES = 3
_decoder = msgspec.msgpack.Decoder(Outcome)


class OutcomeTable:
    """Recorded outcomes by key, on disk, the first of each key. Not safe for concurrent use."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect("", isolation_level=None)  # a file without a name, which ends with it
        self._connection.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE recorded (key TEXT PRIMARY KEY, parent TEXT NOT NULL, data BLOB NOT NULL) WITHOUT ROWID;"
            "CREATE TABLE met (key TEXT PRIMARY KEY) WITHOUT ROWID; BEGIN;"
        )

    def put(self, outcome: Outcome) -> None:
        row = (outcome.key, outcome.parent, _encoder.encode(outcome))
        self._connection.execute("INSERT OR IGNORE INTO recorded VALUES (?, ?, ?)", row)

    def get(self, key: str) -> Outcome | None:
        row = self._connection.execute("SELECT data FROM recorded WHERE key = ?", (key,)).fetchone()
        return None if row is None else _decoder.decode(row[0])

    def meet(self, key: str) -> bool:
        """Note that the range has an outcome `key`; False if that was known."""
        return self._connection.execute("INSERT OR IGNORE INTO met VALUES (?)", (key,)).rowcount == 1

    def orphans(self) -> Iterator[Outcome]:
        rows = self._connection.execute(
            "SELECT data FROM recorded WHERE parent != '' AND parent IN (SELECT key FROM met)"
            " AND key NOT IN (SELECT key FROM met)"
        )
        for (data,) in rows:
            yield _decoder.decode(data)

    def close(self) -> None:
        self._connection.close()


class Example(msgspec.Struct, frozen=True):
    key: str
    old: str
    new: str


class Change(msgspec.Struct):
    kind: str
    reason: str
    count: int = 0
    examples: list[Example] = []


class ReprocessReport(msgspec.Struct):
    """The result of a reprocessing.

    stage: that was run. records: read from the range. kept: experiences that go on. dropped: the others, by reason.
    repeated: experiences that came out before. compared: experiences that the log has a record of; unrecorded: the others.
    behind: records of the range that the workers have not committed yet, left out of a comparison. open_groups: groups that
    wait for records behind the range. reused_scores: verdicts taken from the log instead of being asked for again.
    changes: differences from the record, the most frequent first.
    """

    stage: str
    records: int = 0
    kept: int = 0
    dropped: dict[str, int] = {}
    repeated: int = 0
    compared: int = 0
    unrecorded: int = 0
    behind: int = 0
    open_groups: int = 0
    reused_scores: int = 0
    changes: list[Change] = []

    @property
    def is_same(self) -> bool:
        return not self.changes

    def take(self, kept: int, dropped: Mapping[str, int], records: int) -> None:
        self.records += records
        self.kept += kept
        for reason, count in dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def compare(self, table: OutcomeTable, new: Outcome, absent: Outcome | None = None) -> None:
        """Compare with the record; absent: the outcome that is meant if nothing is recorded under the key."""
        if not table.meet(new.key):
            self.repeated += 1
            return
        old = table.get(new.key) or absent
        if old is None:
            if new.parent and table.get(new.parent) is not None:
                self.note(Difference("newly made", "", "", f"from {new.parent}"), new.key)
            else:
                self.unrecorded += 1
            return
        self.compared += 1
        for difference in differences(old, new):
            self.note(difference, new.key)

    def note(self, difference: Difference, key: str) -> None:
        for change in self.changes:
            if (change.kind, change.reason) == (difference.kind, difference.reason):
                break
        else:
            change = Change(difference.kind, difference.reason)
            self.changes.append(change)
        change.count += 1
        if len(change.examples) < EXAMPLES:
            change.examples.append(Example(key, difference.old, difference.new))

    def finish(self, table: OutcomeTable) -> None:
        for gone in table.orphans():
            self.note(Difference("no longer made", "", f"from {gone.parent}", ""), gone.key)
        self.changes.sort(key=lambda change: (-change.count, change.kind, change.reason))
