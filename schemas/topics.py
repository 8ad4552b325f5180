"""The topics of one app: the only place that knows their names, records, keys, partitions and retention.

Every topic uses LogAppendTime: the broker's clock is the only clock in the log.
"""

from typing import Literal

import msgspec

from schemas import records

Retention = Literal["keep", "forever", "compact", "day", "trimmed"]


class Topic(msgspec.Struct, frozen=True):
    """One topic: the records it may hold, its key and its cleanup.

    name: without the app's prefix. holds: class names of its records; "Block" is the experience block. key: meaning of its
    records' keys. partitions: None takes the app's configured number, 1 gives a total order. retention: "keep" for the time of
    [keep], "day" for one day, "trimmed" until the trainer removes records that no kept checkpoint needs.
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
# No retention: a repeated load reads which demonstrations are there.
EXPERTS = Topic("experts", ("Block",), "group", None, "forever")
FEEDBACK = Topic("feedback", ("Received",), "group", None, "keep")
VERIFIED = Topic("verified", ("Block", "DropMarker", "Feedback", "Tick"), "group", None, "keep")
# Trimmed by delete_records below the oldest kept checkpoint, so time alone never removes records that a resume needs.
BUFFER = Topic("buffer", ("Block",), "group", 1, "trimmed")
# No retention: a master without a valid snapshot reads it from the beginning, and the gate compares with results of the stable
# version, which in a quiet app are older than any retention.
EVALS = Topic("evals", ("EvalResult", "Block"), "policy", 1, "forever")
BATCHES = Topic("batches", ("Batch", "Fence", "Skip", "Rollback", "Saved"), "run", 1, "trimmed")
PROGRESS = Topic("progress", ("Closure", "Drawn"), "run", 1, "keep")
REPORTS = Topic("reports", ("Progress",), "instance", 1, "day")
# No retention: its first record identifies the log (`infra.roles.identity`), and in a quiet app the newest and the stable
# version are older than any retention.
POLICIES = Topic("policies", ("PolicyEvent", "Directive"), "policy", 1, "forever")
DEAD_LETTERS = Topic("dead-letters", ("DeadLetter",), "original", None, "keep")

ALL: tuple[Topic, ...] = (
    TASKSET_RAW, TASKSET, TASKS, EXPERIENCES, EXPERTS, FEEDBACK, VERIFIED, BUFFER, EVALS, BATCHES, PROGRESS, REPORTS,
    POLICIES, DEAD_LETTERS,
)  # fmt: skip

MAX_FRAME_BYTES = 768 * 1024  # larger frames go to the store by content hash (claim check)
DAY_MS = 86_400_000
SEGMENT_MS = 3_600_000  # a broker removes whole segments, so at most 25 hours of reports are there
MAX_RECORD_BYTES = 8 * 1024 * 1024  # a broker's limit; journal records of large batches need it


def topic_name(app: str, topic: Topic) -> str:
    """Full name of a topic in the broker.

    >>> topic_name("support-bot", BUFFER)
    'support-bot.buffer'
    """
    return f"{app}.{topic.name}"


def by_name(name: str) -> Topic:
    """The topic called `name` (without the app's prefix). Raises ValueError, which lists the topics."""
    for topic in ALL:
        if topic.name == name:
            return topic
    raise ValueError(f"no topic {name!r}: expected one of {', '.join(topic.name for topic in ALL)}")


def topic_config(topic: Topic, keep_ms: int, replication: int = 0) -> dict[str, str]:
    """Broker settings of a topic at creation. replication: number of copies; a broker confirms a record when all copies but one
    have it, so the topic survives the loss of one broker. 0 leaves both to the brokers' defaults.
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
