"""Evaluations pinned to a version: requests and their results. State without clock, task or client.

A request is a suite answered by exactly one version, with a group per task and an episode per sample:

    eval-<suite>-<version>.<index>

Guarantees: a (suite, version) has one result, also after a restart (the log counts). Repeated records count a task once. An
answer with a token of another version makes the request missed, so it never gives a wrong number.
"""

from collections.abc import Iterable, Sequence
from math import comb, fsum, sqrt
from typing import Any, ClassVar

import msgspec

from actors.config import EvalSuite
from schemas import Closure, EvalResult, Experience, Issued
from schemas.fields import VERSION_PASSED

_PREFIX = "eval-"


def eval_group(suite: str, version: int, index: int) -> str:
    """Group id of an eval task.

    >>> eval_group("held-out", 40, 7)
    'eval-held-out-40.7'
    """
    return f"{_PREFIX}{suite}-{version}.{index}"


def parse_eval_group(group: str) -> tuple[str, int, int] | None:
    """(suite, version, index) of an eval's group id, None for any other.

    >>> parse_eval_group("eval-held-out-40.7")
    ('held-out', 40, 7)
    """
    if not group.startswith(_PREFIX):
        return None
    name, dot, index = group.removeprefix(_PREFIX).rpartition(".")
    suite, dash, version = name.rpartition("-")
    if not (dot and dash and suite and index.isdecimal() and version.isdecimal()):
        return None
    return suite, int(version), int(index)


class Request(msgspec.Struct):
    """A suite at a version.

    attempts: index to newest attempt. answers: index to sample to score. issued_at: in the caller's units. tasks: a digest of
    which tasks. missed: whether it ended without a result.
    """

    suite: str
    version: int
    attempts: dict[int, int] = {}
    answers: dict[int, dict[int, float]] = {}
    issued_at: float = 0.0
    num_tasks: int = 0
    tasks: str = ""
    missed: bool = False
    result: bool = False

    @property
    def open(self) -> bool:
        return not (self.missed or self.result)


class EvalBook:
    """Requests of a run and their answers; `num_tasks` of a request is set when all of it is issued."""

    KEPT: ClassVar[dict[str, Any]] = {"requests": dict[tuple[str, int], Request]}

    def __init__(self, suites: Sequence[EvalSuite], *, policy: str) -> None:
        self.suites = {suite.suite: suite for suite in suites}
        self._policy = policy
        self._newest: dict[str, Request] = {}
        self._open: dict[tuple[str, int], Request] = {}
        self.requests: dict[tuple[str, int], Request] = {}

    def request(self, suite: str, version: int) -> Request:
        """The request for a suite at a version; made if it does not exist."""
        key = (suite, version)
        request = self.requests.get(key)
        if request is None:
            request = self.requests[key] = self._open[key] = Request(suite, version)
            if suite not in self._newest or self._newest[suite].version < version:
                self._newest[suite] = request
        return request

    def put_back(self) -> None:
        """Rebuild the state that follows from `requests` of an earlier life; open requests are issued as a whole again."""
        self._open = {key: request for key, request in self.requests.items() if request.open}
        for request in self.requests.values():
            request.num_tasks, request.tasks = 0, ""
        self._newest = {
            suite: request for (suite, _), request in sorted(self.requests.items(), key=lambda known: known[0])
        }

    def issued(self, issued: Issued, at: float) -> None:
        """Count a task as issued; the same record twice changes nothing."""
        request, index = self._asked(issued.group)
        if request is None or not request.open:
            return
        request.issued_at = max(request.issued_at, at)
        request.attempts[index] = max(request.attempts.get(index, 0), issued.attempt)

    def held(self, group: str, at: float) -> None:
        """Note that an explorer holds a task of a request: none of the request is issued again meanwhile."""
        suite, version, _ = parse_eval_group(group) or ("", -1, -1)
        if (request := self._open.get((suite, version))) is not None:
            request.issued_at = max(request.issued_at, at)

    def reset_waits(self, at: float) -> None:
        """Count the waiting time of all open requests from `at`."""
        for request in self._open.values():
            request.issued_at = at

    def complete(self, suite: str, version: int, num_tasks: int, tasks: str = "") -> None:
        """Note that all `num_tasks` tasks of a request are issued, or more if an earlier life of the master issued more.

        tasks: digest of the tasks.
        """
        request = self.request(suite, version)
        request.tasks = tasks
        request.num_tasks = max(num_tasks, 1 + max(request.attempts, default=-1))

    def scored(self, experience: Experience) -> None:
        """Count an answer from verify. The last part of an episode holds the verdict. A failed episode is wrong; one without a
        sampled token does not count if its task was issued again.
        """
        request, index = self._asked(experience.group)
        if request is None or not request.open:
            return
        if any(span.version != request.version for span in experience.spans):
            self._close(request, missed=True)
            return
        if experience.failure and not experience.spans and experience.attempt < request.attempts.get(index, 0):
            return
        if experience.last:
            value = 0.0 if experience.failure else verdict(experience, self.suites[request.suite].score)
            request.answers.setdefault(index, {}).setdefault(experience.episode, value)

    def closed(self, closure: Closure) -> None:
        """Note that a task ended without an answer: its explorer was past the version, or it was dropped and counts as 0."""
        request, index = self._asked(closure.group)
        if request is None or not request.open or self._answered(request, index) or closure.outcome == "buffered":
            return
        if closure.reason == VERSION_PASSED:
            self._close(request, missed=True)
        elif closure.attempt >= request.attempts.get(index, 0):
            given = request.answers.setdefault(index, {})
            for sample in range(self.suites[request.suite].samples):
                given.setdefault(sample, 0.0)

    def published(self, result: EvalResult) -> None:
        """Note that a result is in the log."""
        if result.policy == self._policy:
            self._close(self.request(result.suite, result.version), missed=False)

    def ready(self) -> list[EvalResult]:
        """Results that are complete and not yet in the log."""
        return [
            self._result(request)
            for request in self._open.values()
            if request.num_tasks
            and sum(self._answered(request, index) for index in request.answers) >= request.num_tasks
        ]

    def due(self, *, newest: int, first_version: int, lead: int) -> list[tuple[str, int]]:
        """Requests to make now, (suite, version), given the newest published version.

        Requests name versions up to `lead` ahead, since an explorer cannot go back; a missed suite gets a later version.
        """
        due: list[tuple[str, int]] = []
        for name, suite in self.suites.items():
            ahead = range(newest, newest + lead + 1)
            coming = [version for version in ahead if _wanted(version, suite.every, first_version)]
            due += [(name, version) for version in coming if (name, version) not in self.requests]
            last = self._newest.get(name)
            if last is not None and last.missed and not coming:
                due.append((name, newest + max(1, lead)))
        return due

    def incomplete(self) -> list[Request]:
        """Requests whose tasks are not all issued: new requests, and requests that a restart cut short."""
        return [request for request in self._open.values() if not request.num_tasks]

    def overdue(self, now: float, limit: float, *, newest: int) -> list[tuple[Request, list[int]]]:
        """Tasks of requests for versions that are there, unanswered for `limit` since their issue."""
        return [
            (request, [index for index in sorted(request.attempts) if not self._answered(request, index)])
            for request in self._open.values()
            if request.num_tasks and request.version <= newest and now - request.issued_at >= limit
        ]

    def done(self, keys: Iterable[tuple[str, int]]) -> bool:
        """True if each of these requests has a result, or was missed."""
        return all(key in self.requests and not self.requests[key].open for key in keys)

    def _asked(self, group: str) -> tuple[Request | None, int]:
        parsed = parse_eval_group(group)
        if parsed is None or parsed[0] not in self.suites:
            return None, -1
        return self.request(parsed[0], parsed[1]), parsed[2]

    def _close(self, request: Request, *, missed: bool) -> None:
        request.missed, request.result = missed, not missed
        request.answers, request.attempts = {}, {}
        self._open.pop((request.suite, request.version), None)

    def _answered(self, request: Request, index: int) -> bool:
        return len(request.answers.get(index, ())) >= self.suites[request.suite].samples

    def _result(self, request: Request) -> EvalResult:
        suite = self.suites[request.suite]
        right = [sum(value >= 1.0 for value in given.values()) for _, given in sorted(request.answers.items())]
        values = [value for given in request.answers.values() for value in given.values()]
        powers = [1 << power for power in range(suite.samples.bit_length()) if 1 << power <= suite.samples]
        return EvalResult(
            policy=self._policy, version=request.version, suite=request.suite, num_tasks=len(right), num_correct=sum(right),
            mean_score=sum(values) / len(values), request=f"{request.version}/{request.suite}", num_samples=suite.samples,
            pass_at={str(k): pass_at(k, right, suite.samples) for k in powers} if suite.samples > 1 else {},
            interval=interval(right, suite.samples), right=tuple(right),
            tasks=request.tasks if len(right) == request.num_tasks else "",
        )  # fmt: skip


def _wanted(version: int, every: int, first_version: int) -> bool:
    return version in (0, first_version) or (version > first_version and version % every == 0)


def pass_at(k: int, right: Sequence[int], num_samples: int) -> float:
    """Mean over tasks of the chance that any of k answers, drawn from its num_samples, is right.

    right: right answers of each task. Unbiased: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).
    """
    return sum(1.0 - comb(num_samples - count, k) / comb(num_samples, k) for count in right) / len(right)


def verdict(experience: Experience, name: str) -> float:
    """The newest score of that name on the whole answer, else the sum of its scores of turns, as in [reward]."""
    values = [(score.at, score.value) for score in experience.scores if score.name == name]
    whole = [value for at, value in values if at is None]
    return whole[-1] if whole else fsum(value for _, value in values)


def interval(right: Sequence[int], num_samples: int) -> tuple[float, float]:
    """95 % confidence of the share of right answers. Each task counts as one answer: answers to one task are alike."""
    return wilson(sum(right) / num_samples, len(right))


def wilson(happened: float, of: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval (1927) of the share `happened / of`; neither needs to be whole."""
    if of <= 0:
        return 0.0, 1.0
    share = happened / of
    centre = share + z * z / (2 * of)
    half = z * sqrt(max(0.0, share * (1 - share)) / of + z * z / (4 * of * of))
    return max(0.0, (centre - half) / (1 + z * z / of)), min(1.0, (centre + half) / (1 + z * z / of))
