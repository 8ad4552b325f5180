"""The plan: the master's knowledge and its decisions. State without clock, task or client.

Inputs are records of the log in the order of their topics. `decide` returns the records to publish and changes nothing; `apply`
counts them as published. Time is the log's: the newest log-append timestamp. Reissues count only the time in which explorers
reported, so a fleet that starts or is down makes no group overdue; the stop rule counts the time in which any role reported. A
restart recounts everything from the log except the waiting times of groups, which start again.
"""

import logging
from collections.abc import Container, Iterable
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from actors.config import EvalSuite, MasterConfig
from actors.master.admission import Admission, AdmissionLimits
from actors.master.evaluation import EvalBook, eval_group, parse_eval_group
from actors.master.gate.gate import Gate
from actors.master.taskbook import TaskBook, chosen, task_digest
from infra.policies.fold import PolicyFeed
from infra.roles.process import Absence
from infra.settings.config import Pacing, duration_s
from schemas import Closure, Directive, Drawn, EvalResult, Issued, PolicyEvent, Progress, Task
from schemas.errors import FencedOut
from schemas.fields import MasterPhase
from schemas.ids import group_id, task_of

_log = logging.getLogger(__name__)

_SILENT_MS = 15_000  # gateways report every few seconds: a longer silence is absence
_MAX_GAP_MS = 5_000  # explorers report every few seconds: a longer silence is absence
_SETTLED_MS = 3_000  # nothing new for so long: a taskset is loaded, a drained trainer is through
_STUCK_MS = 10_000

# Attempts of one group under one lease; far more than there is time for, so that no two masters ever use the same number.
ATTEMPTS_PER_LEASE = 1000


class EvalRequest(msgspec.Struct, frozen=True):
    """A suite to be answered by a version.

    suite: its name. version: of the policy. missing: tasks to issue. num_tasks, digest: of the whole suite; 0 and "" while its
    tasks are still being loaded.
    """

    suite: str
    version: int
    missing: tuple[Task, ...] = ()
    num_tasks: int = 0
    digest: str = ""


class Decisions(msgspec.Struct, frozen=True):
    """Records to publish now, each kind in order.

    results: of evals. channels: moves of a channel. rollouts: new groups. reissues: groups and eval tasks that were not
    finished in time. evals: requests to issue as a whole.
    """

    results: tuple[EvalResult, ...] = ()
    channels: tuple[PolicyEvent, ...] = ()
    rollouts: tuple[Task, ...] = ()
    reissues: tuple[Task, ...] = ()
    evals: tuple[EvalRequest, ...] = ()

    @property
    def tasks(self) -> dict[str, tuple[Task, ...]]:
        evals = tuple(task for request in self.evals for task in request.missing)
        return {"rollout": self.rollouts, "reissue": self.reissues, "eval": evals}


NOTHING = Decisions()


class Plan:
    """Decides which rollouts, reissues and evals to issue, and which results and channel moves to publish.

    token: of this master's lease. Attempts are numbered from it, so a master that was overtaken and did not notice yet
    issues other attempts than its successor, and collect keeps the first that completes.
    """

    KEPT: ClassVar[dict[str, Any]] = {
        "drained_by": str, "paused": bool, "drain_offset": int, "clock_ms": int, "active_s": float, "running_ms": int,
        "_explorer_ms": int | None, "_canary_ms": int | None, "_task_ms": int, "_moved_ms": int, "_begun_any": bool,
        "_stopped_ms": int | None, "_reached": bool,
    }  # fmt: skip
    PARTS: ClassVar[tuple[str, ...]] = ("book", "feed", "evals", "gate", "admission")

    def __init__(self, config: MasterConfig, pacing: Pacing, *, policy: str, token: int = 0) -> None:
        self.config = config
        self.pacing = pacing
        self.token = token
        self.drained_by = ""
        self.paused = False
        self.drain_offset = -1
        self.book = TaskBook()
        self.feed = PolicyFeed(policy)
        self.evals = EvalBook(config.evals, policy=policy)
        self.gate = Gate(config.gate, policy=policy, token=token)
        self.admission = Admission(
            AdmissionLimits(
                groups_per_step=pacing.groups_per_step, max_staleness=pacing.max_staleness,
                steps_per_version=pacing.steps_per_version, first_version=config.first_version,
                in_flight=pacing.groups_in_flight,
            )
        )  # fmt: skip
        self.clock_ms = 0
        self.active_s = 0.0
        self.running_ms = 0
        self._explorer_ms: int | None = None
        self._canary_ms: int | None = None
        self.canary = Absence()
        self._task_ms = 0
        self._moved_ms = 0
        self._begun_any = False
        self._stopped_ms: int | None = None
        self._reached = False
        self._finish = False

    # ---- records of the log

    def tick(self, timestamp_ms: int) -> None:
        """Advance the clock to the append time of a record."""
        if self._begun_any and self.clock_ms:
            self.running_ms += max(0, min(timestamp_ms - self.clock_ms, _MAX_GAP_MS))
        self.clock_ms = max(self.clock_ms, timestamp_ms)
        if self._stopped_ms is None and self._ended:
            self._stopped_ms = self.clock_ms

    def caught_up(self) -> None:
        """Start the waiting of outstanding groups: the log is read as it was at the start."""
        self.admission.reset_waits(self.active_s)
        self.evals.reset_waits(self.active_s)

    def task(self, task: Task) -> None:
        self.book.add(task)
        self._task_ms = self.clock_ms

    def issued(self, issued: Issued) -> None:
        """Take a record of `tasks`, ours or of an earlier master."""
        if issued.suite:
            self.evals.issued(issued, self.active_s)
            return
        self.admission.issued(issued, self.active_s)
        self.book.issued(task_of(issued.group), group_round(issued.group))
        self._begun_any = True

    def issued_since(self, records: Iterable[Issued]) -> None:
        """Take records of `tasks` that this master, or a master it replaced, issued after the records it has counted.

        A known group that is not outstanding has ended: it stays ended, and no other group gets its number.
        """
        for issued, is_new in [(record, self._is_new(record)) for record in records]:
            if is_new:
                self.issued(issued)
            else:
                self.admission.number(issued)

    def _is_new(self, issued: Issued) -> bool:
        if issued.suite or issued.group in self.admission.outstanding:
            return True
        return group_round(issued.group) >= self.book.next_round(task_of(issued.group))

    def closure(self, closure: Closure, timestamp_ms: int | None = None) -> bool:
        """Take a closure; True if it ended an outstanding group."""
        self._moved_ms = self.clock_ms
        if closure.sequence < 0 and parse_eval_group(closure.group) is not None:
            self.evals.closed(closure)
            return False
        self._begun_any = self._begun_any or closure.lane == "live"
        self.gate.closure(closure, timestamp_ms)
        return self.admission.closed(closure)

    def drawn(self, drawn: Drawn) -> int:
        """Take a Drawn; returns how many outstanding groups it ended."""
        self._moved_ms = self.clock_ms
        return self.admission.drawn(drawn)

    def progress(self, progress: Progress, timestamp_ms: int) -> None:
        self.gate.progress(progress, timestamp_ms)
        if progress.trains:
            self._moved_ms = self.clock_ms
        if progress.is_canary:
            self._canary_ms = max(timestamp_ms, self._canary_ms or 0)
        if progress.role != "explore" or progress.life not in ("working", None):
            return  # None, of an older explorer: a group issued again too early costs less than a group never issued again
        if self._explorer_ms is not None:
            self.active_s += max(0, min(timestamp_ms - self._explorer_ms, _MAX_GAP_MS)) / 1000
        self._explorer_ms = max(timestamp_ms, self._explorer_ms or 0)
        for group, attempt in (progress.holds or {}).items():
            if group in self.admission.outstanding:
                self.admission.held(group, attempt, self.active_s)
            else:
                self.evals.held(group, self.active_s)

    def policy(self, event: PolicyEvent, offset: int, timestamp_ms: int | None = None) -> None:
        self.gate.event(event, timestamp_ms)
        if self.feed.apply(event, offset):
            self._moved_ms = self.clock_ms
            self.feed.forget_below(self.feed.newest)
        elif event.event == "orphaned" and event.policy == self.gate.policy and self.feed.admits(event, offset):
            self.gate.revoke(event.version)

    def look_for_canary(self) -> bool:
        """True once it becomes an alarm that canaries should serve a version and no gateway does."""
        there = self._canary_ms is not None and self.clock_ms - self._canary_ms < _SILENT_MS
        return self.canary.look(self.clock_ms / 1000, wanted=self.gate.stable.trial >= 0, there=there)

    def result(self, result: EvalResult) -> None:
        self.evals.published(result)
        self.gate.result(result)
        stop = self.config.stop
        if stop.suite and result.suite == stop.suite and result.accuracy >= stop.at:
            self._reached = True

    def directive(self, directive: Directive, offset: int) -> None:
        """Take a directive. Raises FencedOut for the lease of a later master."""
        self.gate.directive(directive, offset)
        if directive.order == "lease":
            if offset > self.token:
                raise FencedOut(f"this master holds lease {self.token}, {directive.owner} took lease {offset}")
        elif directive.is_of_learning:
            self.drained_by = (directive.owner or "an operator") if directive.order == "drain" else ""
            self.paused = directive.order == "pause"
            self.drain_offset = offset

    def finish(self) -> None:
        """End the run as if the stop rule held."""
        self._finish = True

    def put_back(self) -> None:
        """Rebuild the state that follows from a snapshot: see `actors.master.snapshot`."""
        self.evals.put_back()
        if not self._ended:
            self._stopped_ms = None  # the life before was ended by an operator

    # ---- state and decisions

    @property
    def stopped(self) -> bool:
        """True if nothing new is issued: the run is over, or an operator drains or pauses it."""
        return self._ended or bool(self.drained_by) or self.paused

    @property
    def _ended(self) -> bool:
        stop = self.config.stop
        return (
            self._finish
            or self._reached
            or 0 < stop.versions <= self.feed.newest
            or 0 < stop.groups <= self.admission.next_sequence
            or (bool(stop.after) and self.running_ms >= duration_s(stop.after) * 1000)
        )

    @property
    def state(self) -> MasterPhase:
        if self.paused:
            return "paused"
        if not self.stopped:
            return "issuing" if self._begun() else "warming up"
        if not self._drained():
            return "draining"
        if not self._ended:
            return "drained"
        finals = [(suite.suite, self.feed.newest) for suite in self.config.evals]
        is_given_up = self._is_late(self._stopped_ms, 2) and self._is_late(self._moved_ms)
        return "done" if self.evals.done(finals) or is_given_up else "evaluating"

    def decide(self) -> Decisions:
        """Records to publish now, `NOTHING` for none. Results and channel moves come alone, since more follows from them."""
        if results := self.evals.ready():
            return Decisions(results=tuple(results))
        if channels := self.gate.decisions():
            return Decisions(channels=tuple(channels))
        return Decisions(rollouts=self._rollouts(), reissues=self._reissues(), evals=self._eval_requests())

    def apply(self, decisions: Decisions) -> None:
        """Count decisions as published. Read back from the log later, they change nothing."""
        for result in decisions.results:
            self.result(result)
        for channel in decisions.channels:
            self.gate.event(channel)
        for request in decisions.evals:
            self.evals.request(request.suite, request.version)
            if request.num_tasks:
                self.evals.complete(request.suite, request.version, request.num_tasks, request.digest)
        for tasks in decisions.tasks.values():
            for task in tasks:
                assert task.issued is not None
                self.issued(task.issued)

    def _rollouts(self) -> tuple[Task, ...]:
        pool = self.book.pool(self.config.split)
        if self.stopped or not self._begun() or not pool[0]:
            return ()
        room = self.admission.room
        if self.config.stop.groups:
            room = min(room, self.config.stop.groups - self.admission.next_sequence)
        new: list[Task] = []
        for _ in range(room):
            task = chosen(pool, seed=self.config.seed, sequence=self.admission.next_sequence + len(new))
            if task is None:
                break
            new.append(
                rollout(
                    task,
                    self.config,
                    round=self.book.next_round(task.id) + sum(issued.id == task.id for issued in new),
                    attempt=self._first_attempt,
                    sequence=self.admission.next_sequence + len(new),
                    min_version=self.admission.min_version(ahead=len(self.admission.outstanding) + len(new)),
                )
            )
        return tuple(new)

    def _reissues(self) -> tuple[Task, ...]:
        """Groups and eval tasks to issue again. One whose task is gone is skipped and logged."""
        again: list[Task] = []
        for name in self.admission.overdue(self.active_s, self.pacing.reissue_s):
            group = self.admission.outstanding[name]
            task = self.book.tasks.get(task_of(name))
            if task is None:
                _log.warning("reissue_without_task group=%s", name)
                continue
            again.append(
                rollout(
                    task,
                    self.config,
                    round=group_round(name),
                    attempt=max(group.attempt + 1, self._first_attempt),
                    sequence=group.sequence,
                    # The version that is there must do: waiting for a newer one could stop everything.
                    min_version=min(self.feed.newest, self.admission.min_version(ahead=self.admission.ahead(name))),
                )
            )
        return (*again, *self._eval_reissues())

    def _eval_requests(self) -> tuple[EvalRequest, ...]:
        """Requests to make, and requests to issue: just made, or cut short by a restart."""
        if not self.stopped:
            lead, first = self.config.eval_lead, self.config.first_version
            due = self.evals.due(newest=self.feed.newest, first_version=first, lead=lead)
        else:
            at_end = self.evals.suites if self._ended and self._drained() else ()
            due = [(suite, self.feed.newest) for suite in at_end]
        new = [self._eval_request(*key, {}) for key in due if key not in self.evals.requests]
        known = [self._eval_request(known.suite, known.version, known.attempts) for known in self.evals.incomplete()]
        return (*(request for request in known if request.num_tasks), *new)

    def _eval_request(self, suite: str, version: int, issued: Container[int]) -> EvalRequest:
        """issued: indexes of tasks that are on their way."""
        tasks = self._suite_tasks(suite)
        missing = [index for index in range(len(tasks)) if index not in issued]
        issuing = tuple(self._eval(suite, version, index, self._first_attempt) for index in missing)
        return EvalRequest(suite, version, issuing, len(tasks), task_digest(tasks) if tasks else "")

    @property
    def _first_attempt(self) -> int:
        return self.token * ATTEMPTS_PER_LEASE

    def _begun(self) -> bool:
        return self.feed.newest >= self.config.first_version

    def _drained(self) -> bool:
        """Nothing is outstanding and nothing moves. At the end of a run also less than a step, or when it took too long."""
        quiet_ms = self.clock_ms - self._moved_ms
        num_outstanding = len(self.admission.outstanding)
        # The stop itself counts as a move: the trainer has to hear of it before it trains less than a whole step.
        if min(quiet_ms, self.clock_ms - (self._stopped_ms or 0)) >= _SETTLED_MS and num_outstanding == 0:
            return True
        return self._ended and (
            (quiet_ms >= _STUCK_MS and num_outstanding < self.pacing.groups_per_step) or self._is_late(self._stopped_ms)
        )

    def _is_late(self, since_ms: int | None, times: int = 1) -> bool:
        return since_ms is not None and self.clock_ms - since_ms >= times * duration_s(self.config.drain) * 1000

    def _eval(self, suite: str, version: int, index: int, attempt: int) -> Task:
        task = self._suite_tasks(suite)[index]
        return evaluation(
            task, self.config, suite=self.evals.suites[suite], version=version, index=index, attempt=attempt
        )

    def _eval_reissues(self) -> list[Task]:
        overdue = self.evals.overdue(self.active_s, self.pacing.reissue_s, newest=self.feed.newest)
        return [
            self._eval(request.suite, request.version, index, max(request.attempts[index] + 1, self._first_attempt))
            for request, indexes in overdue
            for index in indexes
            if index < len(self._suite_tasks(request.suite))
        ]

    def _suite_tasks(self, suite: str) -> list[Task]:
        """Tasks of a suite: as many as are wanted, or all there are once no more arrive; none before that."""
        wanted = self.evals.suites[suite].tasks
        tasks = self.book.pool(suite)[0]
        if len(tasks) < wanted and self.clock_ms - self._task_ms < _SETTLED_MS:
            return []
        return tasks[:wanted]


def rollout(task: Task, config: MasterConfig, *, round: int, attempt: int, sequence: int, min_version: int) -> Task:
    """Issue a task as a group of episodes to learn from."""
    issued = Issued(
        group=group_id(task.id, round), attempt=attempt, sequence=sequence, min_version=min_version,
        num_episodes=config.num_episodes, max_tokens=config.max_tokens, temperature=config.temperature,
    )  # fmt: skip
    return replace(task, issued=issued)


def evaluation(task: Task, config: MasterConfig, *, suite: EvalSuite, version: int, index: int, attempt: int) -> Task:
    """Issue a task of a suite to be answered by exactly this version."""
    issued = Issued(
        group=eval_group(suite.suite, version, index), attempt=attempt, suite=suite.suite, version=version, min_version=version,
        num_episodes=suite.samples, max_tokens=config.max_tokens, temperature=suite.temperature,
    )  # fmt: skip
    return replace(task, issued=issued)


def group_round(group: str) -> int:
    """The round in a rollout's group id. Raises ValueError for an id without one."""
    return int(group.rpartition(".")[2])
