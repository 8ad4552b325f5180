"""Records of the log, except the block and the journal's records.

Evolution: new fields come last and have defaults; nothing is reordered, retyped or reused; readers ignore fields they
do not know. An incompatible change raises `MAJOR`, which stops older readers before they acknowledge anything.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta as Bounds

from schemas.fields import (
    Channel,
    Count,
    Counts,
    DirectiveKind,
    FeedbackKind,
    Finite,
    Id,
    Ids,
    Lane,
    Life,
    MasterPhase,
    Meta,
    Number,
    Numbers,
    Outcome,
    PolicyEventKind,
    Struct,
)
from schemas.journal import Batch, Fence, Rollback, Saved, Skip


class Client(Struct, frozen=True):
    """Sessions of one tenant that one gateway answered with one version since it started. client: the tenant, as ids name it.
    sessions: or users, or requests that named neither. failed, refused: sessions in which an answer did or was; see Answered.
    """

    client: str
    sessions: Count = 0
    failed: Count = 0
    refused: Count = 0


class Answered(Struct, frozen=True):
    """Answers of one version that one gateway served since it started. version: of the policy. trial: as in a Closure. answers:
    how many. failed: answers the engine did not bring to an end. refused: answers that began as a refusal. clients: their
    tenants, those past 63 together under no name; () for versions without recent answers and from older gateways.
    """

    version: Count
    trial: Number = -1
    answers: Count = 0
    failed: Count = 0
    refused: Count = 0
    clients: Annotated[tuple[Client, ...], Bounds(max_length=64)] = ()


class MasterState(Struct, frozen=True):
    """Progress of the master, for roles that wait for it. state: see `MasterPhase`. outstanding: groups that were issued and
    neither drawn nor given up. drained_to: offset in `policies` of the newest drain, pause or continue it read, -1 for none.
    """

    state: MasterPhase
    outstanding: Count = 0
    drained_to: Number = -1

    @property
    def issues_no_more(self) -> bool:
        """True if no group comes that is not outstanding already, unless an operator lets it go on."""
        return self.state in ("draining", "drained", "evaluating", "done")

    @property
    def is_drained(self) -> bool:
        """True if an operator's drain has come to its end, or everything has."""
        return self.state in ("drained", "done")


class FeedbackWait(Struct, frozen=True):
    """Answers that wait for feedback at a stream worker. answers: their number. first_ms: end of the first window to close, by
    the log's clock; 0 for none.
    """

    answers: Count = 0
    first_ms: Count = 0


MAX_HELD = 16_384
MAX_REFUSED = 8


def together(waits: Iterable[FeedbackWait]) -> FeedbackWait:
    """Sum of the answers that wait for feedback at several places.

    >>> together([FeedbackWait(2, 7000), FeedbackWait(), FeedbackWait(3, 5000)])
    FeedbackWait(answers=5, first_ms=5000)
    """
    found = [wait for wait in waits if wait.answers]
    return FeedbackWait(sum(wait.answers for wait in found), min((wait.first_ms for wait in found), default=0))


class Progress(Struct, frozen=True, tag_field="kind", tag="progress"):
    """A role's report of itself, every few seconds; `status` and the demo screen show it.

    A value that other roles base decisions on has a field of its own, which is None in logs written before it.

    role: its name. instance: its name for one run of the process. version: that it holds, -1 for none. counters: for people
    alone, by the names of the Prometheus metrics; they only grow within one `instance`. gauges: likewise, present values.
    state: likewise, texts. life: where the role is between start and end. is_canary: of a gateway. master: of the master.
    waits: of a stream worker. chains: of a stream worker, stage to its steps with their versions. partitions: stage to the
    partitions it holds. holds: of an explorer, the groups and eval tasks it runs or waits with, to their attempts; in some
    reports only, and at most MAX_HELD of them. answered: of a gateway, its newest versions. refused: of an engine, newest
    versions that it does not serve since its start, to the reason. reason: why a role that says "failed" has ended. alarms:
    conditions that need an operator, a sentence each. release: of headrace, "" of older ones. trains: of a trainer, True until
    the version of its newest step is published.
    """

    role: str
    instance: str
    version: int = -1
    counters: Numbers = {}
    gauges: Numbers = {}
    state: str = ""
    chains: Annotated[dict[str, str], Bounds(max_length=64)] = {}
    partitions: Annotated[dict[str, tuple[Count, ...]], Bounds(max_length=64)] = {}
    answered: Annotated[tuple[Answered, ...], Bounds(max_length=64)] = ()
    refused: Annotated[dict[Count, str], Bounds(max_length=MAX_REFUSED)] = {}
    reason: str = ""
    life: Life | None = None
    is_canary: bool | None = None
    master: MasterState | None = None
    alarms: Annotated[tuple[str, ...], Bounds(max_length=64)] = ()
    holds: Annotated[dict[Id, Count], Bounds(max_length=MAX_HELD)] | None = None
    release: str = ""
    waits: FeedbackWait | None = None
    trains: bool | None = None


MAJOR = 1


class Image(Struct, frozen=True):
    """An image, named by the hash of its bytes in the object store (`blobs/<sha256>`).

    sha256: hash of the bytes, hexadecimal. media_type: image/png, image/jpeg or image/webp. size: number of bytes.
    """

    sha256: Annotated[str, Bounds(pattern="^[0-9a-f]{64}$")]
    size: Count
    media_type: Annotated[str, Bounds(max_length=64)] = "image/png"


class Message(Struct, frozen=True):
    """One message of a conversation. role: "system", "user", "assistant" or "tool". content: text. images: images before the
    text, in order.
    """

    role: str
    content: str
    images: Annotated[tuple[Image, ...], Bounds(max_length=64)] = ()


class Issued(Struct, frozen=True):
    """The master's order to run one task.

    group: `<task>.<round>`. attempt: 0 first, +1 for each re-issue. num_episodes: runs compared with each other.
    sequence: issue order among usual groups, -1 for evals. min_version: the engine waits until it holds at least this
    version. version: the exact version of an eval, -1 for none. suite: name of the eval set, "" for rollouts.
    temperature: 0 is greedy. max_tokens: per turn.
    """

    group: Id
    attempt: Count
    num_episodes: Annotated[int, Bounds(ge=1, le=1_000_000)]
    max_tokens: Count
    sequence: Number = -1
    min_version: Count = 0
    temperature: Annotated[float, Bounds(ge=0, le=1e6)] = 1.0
    suite: str = ""
    version: Number = -1


class Task(Struct, frozen=True, tag_field="kind", tag="task"):
    """A task for the policy, with its reference answer if there is one.

    id: id, unique in its taskset, without a final ".". messages: prompt. answer: reference answer, None for none. meta: the
    user's own data, copied to the experience. issued: data of the master's issue, None in a taskset. workflow: name in
    [explore.workflows], None for the default. difficulty: 0 (easy) to 1, None if unknown. split: "train", or the name of an
    eval suite. parent: id of the task that it varies, "" for none. priority: relative frequency of its issue; 0 is never drawn.
    """

    id: Id
    messages: Annotated[tuple[Message, ...], Bounds(max_length=16_384)]
    answer: str | None = None
    workflow: str = ""
    difficulty: Finite | None = None
    split: str = "train"
    parent: str = ""
    meta: Meta = {}
    issued: Issued | None = None
    priority: Annotated[float, Bounds(ge=0, le=1e6)] = 1.0


class DropMarker(Struct, frozen=True, tag_field="kind", tag="stub"):
    """Takes the place in `verified` of an experience that was dropped, so that its group can complete.

    id, group, episode, group_size, attempt, part, last, lane, sequence, revision: of the dropped experience. stage, processor:
    that dropped it. reason: a short constant phrase, used as a label.
    """

    id: Id
    group: Id
    episode: Count
    group_size: Annotated[int, Bounds(ge=1, le=1_000_000)]
    reason: str
    attempt: Count = 0
    part: Count = 0
    last: bool = True
    lane: Lane = "usual"
    sequence: Number = -1
    stage: str = ""
    processor: str = ""
    revision: Count = 0


class Feedback(Struct, frozen=True, tag_field="kind", tag="feedback"):
    """Feedback of a person or a system about an answer. A newer event with the same (ref, source, rater, type) replaces the
    older; a retraction withdraws it.

    ref: id of the experience or answer. id: id of the event, unique in its source. value: 0 to 1, None for text only. source:
    name of the [[feedback]] source; its score is `scores.<source>`. type: kind, see FeedbackKind. text: label or correction.
    rater: pseudonym of the rater, "" for none.
    """

    ref: Id
    id: Id
    value: Finite | None = None
    source: str = ""
    type: FeedbackKind = "value"
    text: str | None = None
    rater: str = ""


class Tick(Struct, frozen=True, tag_field="kind", tag="tick"):
    """Time passing on an idle partition of `verified`, so that deadlines fire. Duplicates are harmless.

    due_ms: the deadline that asked for it, log-append milliseconds. partition: of `verified`.
    """

    partition: Count
    due_ms: int


class Rating(Struct, frozen=True):
    """Opinion of one rater about one answer: revised ratings are replaced, those taken back are not there.

    source: the feedback source. rater: a pseudonym, "" where none is named. value: 0 to 1, of this answer alone: credit for
    later turns is not a rating. time_ms: log-append time of the feedback.
    """

    source: str
    value: Finite
    rater: str = ""
    time_ms: int = 0


class Closure(Struct, frozen=True, tag_field="kind", tag="closure"):
    """End of one attempt's group in collect; exactly one per (group, attempt, revision).

    group, attempt, sequence, lane: of the group's experiences. revision: 0, +1 each time late feedback closes it again.
    outcome: buffered, dropped or superseded (another attempt completed first). reason: why it was dropped, a short phrase.
    experiences: how many went on. mean_reward: over the episodes that have one, before anything was dropped. drops: reason to
    count of members. version: oldest policy that sampled any of it, -1 where nothing was sampled or it is unknown. trial: the
    version that was on trial in the canary channel when the gateway drew which of the two would answer, -1 where none was.
    ratings: people's ratings of the answers themselves, at most 64, the newest; () for none, None in logs written before there
    were ratings. answered_ms: log-append time of the answer, -1 where it is not of production.
    """

    group: Id
    outcome: Outcome
    reason: str = ""
    attempt: Count = 0
    revision: Count = 0
    sequence: Number = -1
    lane: Lane = "usual"
    experiences: Count = 0
    mean_reward: Finite | None = None
    drops: Counts = {}
    version: Number = -1
    trial: Number = -1
    ratings: Annotated[tuple[Rating, ...], Bounds(max_length=64)] | None = None
    answered_ms: int = -1


class Drawn(Struct, frozen=True, tag_field="kind", tag="drawn"):
    """Groups that the trainer took from its buffer for one step, reported to the master after it is journaled.

    token: fencing token of the trainer. step: optimizer step that is about to run. version: policy version when drawn.
    groups: trained. dropped: groups the trainer will never train, with the reason.
    """

    token: Count
    step: int
    version: int
    groups: Ids
    dropped: Annotated[dict[str, str], Bounds(max_length=65_536)] = {}


class PolicyEvent(Struct, frozen=True, tag_field="kind", tag="policy"):
    """Event of a policy. Its offset orders events; a `lease` event's offset is that trainer's fencing token.

    event: promoted, held (by the gate), pinned and rolled_back are of the stable channel, promoted also of the canary
    one, the rest of the candidate one. policy: its name. channel: that the event is about. step: the optimizer step that made
    the version, -1 for none. reason: why, for people.
    version: content, never reused. parent: the version it was trained from. manifest: store key. manifest_sha256: of its
    bytes, which are checked with it. token: of the trainer that published or the master that decided, 0 on a lease itself.
    owner: the trainer, master or engine instance, or the person, that wrote it. stats: small numbers worth showing.
    """

    event: PolicyEventKind
    policy: str
    version: int = -1
    parent: int = -1
    token: int = 0
    manifest: str = ""
    manifest_sha256: str = ""
    step: int = -1
    channel: Channel = "candidate"
    reason: str = ""
    owner: str = ""
    stats: Numbers = {}


class Directive(Struct, frozen=True, tag_field="kind", tag="directive"):
    """An order to or from a role, which outlives processes. The offset in `policies` orders it.

    order: lease (a master of this app begins: all earlier ones end, and its attempts are numbered from its offset), drain (no
    new groups; outstanding work is finished), pause (no new groups and no new steps; serving, recording and feedback
    continue), continue (takes a drain or a pause back), forget (a user's keys were destroyed) or open (a sealed answer was
    shown to its owner). The newest of drain, pause and continue holds. owner: the person or instance that ordered it. reason:
    why, for people. about: whom it forgets, as a keyed hash, or the answer that it opens.
    """

    order: DirectiveKind
    owner: str = ""
    about: str = ""
    reason: str = ""

    @property
    def is_of_learning(self) -> bool:
        """True if it pauses or resumes learning. The newest such record is in force."""
        return self.order in ("drain", "pause", "continue")


class EvalResult(Struct, frozen=True, tag_field="kind", tag="eval_result"):
    """A suite answered by exactly one version.

    policy, version: that answered. suite: its name. num_tasks: of the suite. num_samples: answers to each task. request: the
    order it answers, as version/suite. mean_score: of all answers. num_correct: of num_tasks * num_samples answers. pass_at: k,
    as a string, to the chance that one of k answers to a task is right. interval: 95 % confidence of the share of right
    answers, None where it was not computed. right: of each task, in order, how many of its answers are; () in old logs. tasks:
    a digest of the tasks' ids; two results of one digest can be compared task by task.
    """

    policy: str
    version: int
    suite: str
    num_tasks: Count
    num_correct: Count
    mean_score: Finite = 0.0
    request: str = ""
    num_samples: Annotated[int, Bounds(ge=1, le=1_000_000)] = 1
    pass_at: Annotated[dict[str, Finite], Bounds(max_length=64)] = {}
    interval: tuple[Finite, Finite] | None = None
    right: Annotated[tuple[Count, ...], Bounds(max_length=65_536)] = ()
    tasks: str = ""

    @property
    def accuracy(self) -> float:
        """Share of right answers; with several samples per task this is pass@1."""
        return self.num_correct / max(1, self.num_tasks * self.num_samples)


MAX_LETTER_BYTES = 64 * 1024


class DeadLetter(Struct, frozen=True, tag_field="kind", tag="dead_letter"):
    """Bytes or a record that could not be processed, where it lay, and why; `reprocess` can try it again.

    topic, partition, offset, key: of the record. stage: where it failed. reason: short constant phrase. error: the message,
    which names the field. value: the record as it was, cut to MAX_LETTER_BYTES.
    """

    topic: str
    partition: int
    offset: int
    stage: str
    reason: str
    error: str = ""
    value: bytes = b""
    key: bytes = b""


class Received(Struct, frozen=True, tag_field="kind", tag="received"):
    """Input over HTTP about answers, as it came but redacted: a feedback source reads it.

    path: endpoint that it came in by, which decides its source. body: JSON, with people's texts sealed (`infra.store.seal`).
    tenant: of the key that sent it, "" for a webhook. rater: its sender, if the gateway knows it, "" where the body names it.
    ref: the answer it is about, "" where only the body names it. id: unique; a source may use it.
    """

    path: str
    body: bytes
    id: Id
    ref: str = ""
    tenant: str = ""
    rater: str = ""


Control = (
    Task
    | DropMarker
    | Feedback
    | Tick
    | Closure
    | Drawn
    | Progress
    | PolicyEvent
    | Directive
    | Batch
    | Fence
    | Skip
    | Rollback
    | EvalResult
    | DeadLetter
    | Received
    | Saved
)
