"""The demo's run as its log tells it: reports of the roles, versions, evals, moves of the stable channel."""

import time
from contextlib import aclosing
from dataclasses import dataclass, field

from infra.log.log import Log, LogMessage
from infra.policies.fold import Stable, fenced, moved
from schemas import Directive, EvalResult, PolicyEvent, Progress, topics

READ = (topics.REPORTS, topics.POLICIES, topics.EVALS)


@dataclass
class RunRecord:
    """A run, folded from its log. `read_on` takes in the newer records.

    results: of the evaluations, suite → version → result. reports: newest of each process. newest: newest of each role.
    stable: moves of the stable channel, in seconds since the start, and to which version. num_held: candidates that the gate
    held back. history: gauges of the trainer's reports. done: the master of this start has reported it.
    """

    started_s: float
    results: dict[str, dict[int, EvalResult]] = field(default_factory=dict)
    reports: dict[str, Progress] = field(default_factory=dict)
    newest: dict[str, Progress] = field(default_factory=dict)
    published: dict[int, PolicyEvent] = field(default_factory=dict)
    stable: list[tuple[float, int]] = field(default_factory=list)
    num_held: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    done: bool = False
    _channel: Stable = field(default_factory=Stable)
    _nexts: dict[str, dict[int, int]] = field(default_factory=dict)

    async def read_on(self, log: Log) -> None:
        """Take in the records since the last call."""
        for topic in READ:
            begins, ends = await log.bounds(topic)
            read = self._nexts.get(topic.name, {})
            starts = {index: max(begin, read.get(index, 0)) for index, begin in begins.items()}
            async with aclosing(log.scan(topic, starts, ends)) as messages:
                async for message in messages:
                    self.take(message)
            self._nexts[topic.name] = dict(ends)

    def take(self, message: LogMessage) -> None:
        """Take in one record."""
        record, at_s = message.value, message.timestamp_ms / 1000
        if isinstance(record, Progress):
            self.reports[record.instance] = self.newest[record.role] = record
            if record.role == "train":
                gauges = {name: value for name, value in record.gauges.items() if "{" not in name}
                self.history.append({"elapsed_s": at_s - self.started_s, "version": float(record.version)} | gauges)
            is_done = record.master is not None and record.master.state == "done"
            self.done |= is_done and at_s >= self.started_s  # an earlier process says nothing about this start
        elif isinstance(record, EvalResult):
            self.results.setdefault(record.suite, {})[record.version] = record
        elif isinstance(record, Directive):
            self._channel = fenced(self._channel, record, message.offset)
        elif isinstance(record, PolicyEvent) and record.channel == "stable":
            before, self._channel = self._channel, moved(self._channel, record, record.policy)
            self.num_held += record.event == "held"
            if self._channel.version != before.version:
                self.stable.append((at_s - self.started_s, self._channel.version))
        elif isinstance(record, PolicyEvent) and record.event == "published":
            self.published.setdefault(record.version, record)

    def accuracy(self, suite: str) -> dict[int, float]:
        """Share of right answers by version, in their order."""
        return {version: result.accuracy for version, result in sorted(self.results.get(suite, {}).items())}

    def counter(self, role: str, name: str) -> float:
        """A counter, added up over all processes that the role has had."""
        return sum(report.counters.get(name, 0.0) for report in self.reports.values() if report.role == role)

    def gauge(self, role: str, name: str) -> float | None:
        """A gauge of the role's newest report."""
        report = self.newest.get(role)
        return None if report is None else report.gauges.get(name)

    def elapsed_s(self) -> float:
        """Seconds since the command was typed."""
        return time.time() - self.started_s

    def line(self, phase: str = "") -> str:
        """The line of progress. phase: by default the master's state."""
        master = self.newest.get("master")
        found = sorted(self.results.items())
        suites = "".join(f"; {suite} {by[max(by)].accuracy:.1%} at v{max(by)}" for suite, by in found)
        version = max(self.published, default=-1)
        refused = [f", refused: {role.refused[version]}" for role in self.newest.values() if version in role.refused]
        newest = "".join([f"v{version}", *refused[:1]]) if self.published else "no version yet"
        return (
            f"{self.elapsed_s():5.0f} s  {phase or (master.state if master else 'starting')}: "
            f"{self.counter('train', 'steps'):,.0f} steps, "
            f"{self.counter('train', 'experiences_trained'):,.0f} experiences trained, {newest}{suites}"
        )
