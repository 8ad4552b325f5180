"""The topics of one app: the only place that knows their names, records, keys, partitions and retention.

Every topic uses LogAppendTime: the broker's clock is the only clock in the log.
"""

from typing import Literal

import msgspec

from schemas import records

Retention = Literal["keep", "forever", "compact", "day", "trimmed"]


class Topic(msgspec.Struct, frozen=True):
    """One topic: the records it may hold, its key and its cleanup.

    name: without the app's. holds: class names of its records; "Block" is the experience block. key: what its records are
    keyed by.
    partitions: None takes the app's configured number, 1 gives a total order. retention: "keep" for as long as [keep] says,
    "day" for a day, of what is of now, "trimmed" until the trainer removes what no kept checkpoint needs.
    """

    name: str
    holds: tuple[str, ...]
    key: str
    partitions: int | None
    retention: Retention


TASKSET_RAW = Topic("taskset.raw", ("Task",), "task", None, "keep")
TASKSET = Topic("taskset", ("Task",), "task", None, "compact")
TASKS = Topic("tasks", ("Task",), "group", None, "keep")
EXPERIENCES = Topic("experiences", ("Block",), "group", None, "keep")
# Kept for ever, as much as is loaded: loading again reads which demonstrations are there.
EXPERTS = Topic("experts", ("Block",), "group", None, "forever")
FEEDBACK = Topic("feedback", ("Received",), "group", None, "keep")
VERIFIED = Topic("verified", ("Block", "DropMarker", "Feedback", "Tick"), "group", None, "keep")
# Trimmed by delete_records below the oldest kept checkpoint, so time alone never removes what a resume needs.
BUFFER = Topic("buffer", ("Block",), "group", 1, "trimmed")
# Kept for ever: a master whose snapshot does not fit counts it from the beginning, and the gate compares with the results of
# the stable version, which in a quiet app are older than any retention.
EVALS = Topic("evals", ("EvalResult", "Block"), "policy", 1, "forever")
BATCHES = Topic("batches", ("Batch", "Fence", "Skip", "Rollback", "Saved"), "run", 1, "trimmed")
# Logs of older writers have their reports here, too: readers of reports read both topics.
PROGRESS = Topic("progress", ("Closure", "Drawn"), "run", 1, "keep")
REPORTS = Topic("reports", ("Progress",), "instance", 1, "day")
# Kept for ever: its first record says which log it is (`infra.roles.identity`), and in a quiet app the newest version and the
# stable one are older than any retention.
POLICIES = Topic("policies", ("PolicyEvent", "Directive"), "policy", 1, "forever")
DEAD_LETTERS = Topic("dead-letters", ("DeadLetter",), "original", None, "keep")

ALL: tuple[Topic, ...] = (
    TASKSET_RAW, TASKSET, TASKS, EXPERIENCES, EXPERTS, FEEDBACK, VERIFIED, BUFFER, EVALS, BATCHES, PROGRESS, REPORTS,
    POLICIES, DEAD_LETTERS,
)  # fmt: skip

MAX_FRAME_BYTES = 768 * 1024  # larger frames go to the store by content hash (claim check)
DAY_MS = 86_400_000
SEGMENT_MS = 3_600_000  # a broker removes whole segments: of a day's reports 25 hours are there at most
MAX_RECORD_BYTES = 8 * 1024 * 1024  # what the broker takes: journal records of large batches


def topic_name(app: str, topic: Topic) -> str:
    """Full name of a topic in the broker.

    >>> topic_name("support-bot", BUFFER)
    'support-bot.buffer'
    """
    return f"{app}.{topic.name}"


def by_name(name: str) -> Topic:
    """The topic called `name` (without the app); raises ValueError naming those there are."""
    for topic in ALL:
        if topic.name == name:
            return topic
    raise ValueError(f"no topic {name!r}: expected one of {', '.join(topic.name for topic in ALL)}")


def topic_config(topic: Topic, keep_ms: int, replication: int = 0) -> dict[str, str]:
    """Broker settings of a topic at creation. replication: its copies; with it, a record is confirmed once all of them but one
    have it, so that one broker may be lost. 0 leaves that to the brokers.
    """
    config = {
        "message.timestamp.type": "LogAppendTime",
        "compression.type": "producer",
        "max.message.bytes": str(MAX_RECORD_BYTES),
        "cleanup.policy": "compact" if topic.retention == "compact" else "delete",
        "retention.ms": str({"keep": keep_ms, "day": DAY_MS}.get(topic.retention, -1)),
    }
    if topic.retention == "day":
        config["segment.ms"] = str(SEGMENT_MS)
    if replication:
        config["min.insync.replicas"] = str(max(1, replication - 1))
    return config


assert all(hasattr(records, kind) or kind == "Block" for topic in ALL for kind in topic.holds)
