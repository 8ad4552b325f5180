"""What the demo knows of a run, read from the log: progress of the roles, policies, evals, first experience."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.cli.exit_codes import CONFIG_ERROR
from infra.local.supervisor import ALARM_AFTER, ChildEvent, ChildState
from infra.log.log import Log, LogMessage
from infra.policies.channel import Stable, fenced, moved
from schemas import Block, Directive, EvalResult, PolicyEvent, Progress, topics


@dataclass
class Watch:
    """The state of a run. accuracy: suite → version → share correct. reports: newest per role instance.

    stable: when the stable channel moved, in seconds since the start, and to which version. num_held: candidates that the
    gate held back.
    """

    started_s: float
    phase: str = "starting"
    accuracy: dict[str, dict[int, float]] = field(default_factory=dict)
    reports: dict[str, Progress] = field(default_factory=dict)
    newest: dict[str, Progress] = field(default_factory=dict)
    published: dict[int, PolicyEvent] = field(default_factory=dict)
    stable: list[tuple[float, int]] = field(default_factory=list)
    num_held: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    first_experience_s: float | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    children: tuple[Mapping[str, ChildState], ...] = ()
    done: asyncio.Event = field(default_factory=asyncio.Event)
    # Reports of an earlier process of the same run say nothing about this one.
    caught_up: bool = False
    _channel: Stable = field(default_factory=Stable)

    def child_event(self, event: ChildEvent) -> None:
        """A process started, ended or was restarted."""
        self.restarts[event.name] = event.restarts

    def failed(self) -> list[str]:
        """Children that ended and will not be started again, without having done their work."""
        return [
            state.name
            for states in self.children
            for state in states.values()
            if state.given_up
            or state.failures >= ALARM_AFTER
            or (state.pid is None and state.exit_code == CONFIG_ERROR)
        ]

    def take(self, message: LogMessage) -> None:
        """Take one record of the topics into the state."""
        record = message.value
        if isinstance(record, Progress):
            self.reports[record.instance] = record
            self.newest[record.role] = record
            if record.role == "train":
                self._remember(record, message.timestamp_ms / 1000)
            if record.role == "master":
                self.phase = record.state
                is_done = record.master is not None and record.master.state == "done"
                if is_done and message.timestamp_ms / 1000 >= self.started_s:
                    self.done.set()
        elif isinstance(record, EvalResult):
            self.accuracy.setdefault(record.suite, {})[record.version] = record.accuracy
        elif isinstance(record, Directive):
            self._channel = fenced(self._channel, record, message.offset)
        elif isinstance(record, PolicyEvent) and record.channel == "stable":
            self._move(record, message.timestamp_ms / 1000)
        elif isinstance(record, PolicyEvent) and record.event == "published":
            self.published.setdefault(record.version, record)
        elif isinstance(record, Block) and self.first_experience_s is None:
            self.first_experience_s = message.timestamp_ms / 1000 - self.started_s

    def counter(self, role: str, name: str) -> float:
        """A counter, added up over all processes that the role has had."""
        return sum(one.counters.get(name, 0.0) for one in self.reports.values() if one.role == role)

    def counters(self, name: str) -> dict[str, float]:
        """Counters `name{label=…}` of all roles by their labels, added up."""
        found: dict[str, float] = {}
        for one in self.reports.values():
            for key, value in one.counters.items():
                if key.startswith(name + "{"):
                    found[key[len(name) + 1 : -1]] = found.get(key[len(name) + 1 : -1], 0.0) + value
        return found

    def drops(self) -> dict[str, float]:
        """Experiences dropped by any role so far: reason → count."""
        return {labels.removeprefix("reason="): count for labels, count in self.counters("dropped").items()}

    def gauge(self, role: str, name: str) -> float | None:
        """A gauge of the role's newest report."""
        report = self.newest.get(role)
        return None if report is None else report.gauges.get(name)

    def elapsed_s(self) -> float:
        """Seconds since the command was typed."""
        return time.time() - self.started_s

    def _move(self, event: PolicyEvent, at_s: float) -> None:
        before, self._channel = self._channel, moved(self._channel, event, event.policy)
        self.num_held += event.event == "held"
        if self._channel.version != before.version:
            self.stable.append((at_s - self.started_s, self._channel.version))

    def _remember(self, report: Progress, at_s: float) -> None:
        row = {"elapsed_s": at_s - self.started_s, "version": float(report.version)}
        row |= {name: value for name, value in report.gauges.items() if "{" not in name}
        self.history.append(row)


async def follow_log(log: Log, watch: Watch, *, until_end: bool = False) -> None:
    """Read the small topics, for ever or to their present end; `experiences` only until its first record."""

    async def follow(topic: topics.Topic) -> None:
        async with contextlib.aclosing(log.read_all(topic, until_end=until_end)) as messages:
            async for message in messages:
                watch.take(message)
                if topic is topics.EXPERIENCES:
                    return

    async with asyncio.TaskGroup() as tasks:
        for topic in (topics.PROGRESS, topics.REPORTS, topics.POLICIES, topics.EVALS, topics.EXPERIENCES):
            tasks.create_task(follow(topic))
