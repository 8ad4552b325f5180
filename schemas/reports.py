"""Reports of roles: for people, and for roles that decide from them. Evolution: see `schemas.records`."""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta as Bounds

from schemas.fields import Count, Id, Life, MasterPhase, Number, Numbers, Struct


class Client(Struct, frozen=True):
    """Sessions of one tenant that one gateway answered with one version since it started.

    client: the tenant, as ids name it. sessions: or users, or requests that named neither. failed, refused: sessions in which
    an answer did or was; see Answered.

    Example: Client(client="mddrffqv", sessions=120, refused=4)
    """

    client: str
    sessions: Count = 0
    failed: Count = 0
    refused: Count = 0


class Answered(Struct, frozen=True):
    """Answers of one version that one gateway served since it started. version: of the policy. trial: as in a Closure. answers:
    how many. failed: answers the engine did not bring to an end. refused: answers that began as a refusal. clients: whom, those
    past 63 are one, of no name; () of versions that answered nothing lately, and from gateways of older releases.

    Example: Answered(version=44, answers=480, failed=1, refused=12)
    """

    version: Count
    trial: Number = -1
    answers: Count = 0
    failed: Count = 0
    refused: Count = 0
    clients: Annotated[tuple[Client, ...], Bounds(max_length=64)] = ()


class MasterState(Struct, frozen=True):
    """Progress of the master, for roles that wait for it.

    state: see `MasterPhase`. outstanding: groups that were issued and neither drawn nor given up. drained_to: offset in
    `policies` of the newest drain, pause or continue it has read, -1 for none.

    Example: MasterState(state="draining", outstanding=17, drained_to=31)
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
    """Answers that wait for feedback at a stream worker.

    answers: how many. first_ms: when the window of the one that has waited longest passes, by the log's clock; 0 for none.

    Example: FeedbackWait(answers=386, first_ms=1763715600000)
    """

    answers: Count = 0
    first_ms: Count = 0


MAX_HELD = 16_384


def together(waits: Iterable[FeedbackWait]) -> FeedbackWait:
    """Sum of the answers that wait for feedback at several places.

    >>> together([FeedbackWait(2, 7000), FeedbackWait(), FeedbackWait(3, 5000)])
    FeedbackWait(answers=5, first_ms=5000)
    """
    found = [wait for wait in waits if wait.answers]
    return FeedbackWait(sum(wait.answers for wait in found), min((wait.first_ms for wait in found), default=0))


class Progress(Struct, frozen=True, tag_field="kind", tag="progress"):
    """A role's report of itself, every few seconds; what `status` and the demo screen show.

    What other roles decide from has a field of its own, which is None in logs written before it.

    role: its name. instance: its name for one run of the process. version: that it holds, -1 for none.
    counters: for people alone, by the names of the Prometheus metrics; they only grow within one `instance`. gauges: likewise,
    of now. state: likewise, in a word. life: where the role is between start and end. is_canary: of a gateway. master: of the
    master. waits: of a stream worker.
    chains: of a stream worker, stage to its steps with their versions. partitions: stage to the partitions it holds; of an
    explorer those of `tasks` that it reads, from which the master decides what it gets.
    holds: of an explorer, the groups and eval tasks it runs or waits with, to their attempts; in some reports only, and at
    most MAX_HELD of them. answered: of a gateway, its newest versions. reason: why a role that says "failed" has ended.
    alarms: what an operator should look at, a sentence each. release: of headrace, "" of older ones.

    Example: Progress(role="explore", instance="explore-0/4711", version=12, counters={"tokens": 81200.0})
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
    reason: str = ""
    life: Life | None = None
    is_canary: bool | None = None
    master: MasterState | None = None
    alarms: Annotated[tuple[str, ...], Bounds(max_length=64)] = ()
    holds: Annotated[dict[Id, Count], Bounds(max_length=MAX_HELD)] | None = None
    release: str = ""
    waits: FeedbackWait | None = None
