"""The gate before customers: whether a candidate version may become the stable one, decided from its evals. Pure.

A candidate is weighed once all suites of [master.gate] have a result for it. It passes where in every suite it is right
at least `at_least` of the time and not more than `max_drop` worse than the stable version was, and where it answers recorded
prompts much as the stable version did (`actors.replies`). Newer candidates come first: one
that is older than the newest decided is left out. What customers say of a version it let pass can take it back
(`actors.guard`); a version taken back is not weighed again. Every decision is an event with its numbers, so a restart
decides nothing twice.
"""

from collections.abc import Mapping

import msgspec

from actors.config import GateConfig
from actors.guard import Breach, Guard
from actors.replies import Replies
from infra.weights.channel import Stable, moved
from schemas import Closure, EvalResult, Experience, PolicyEvent


class Verdict(msgspec.Struct, frozen=True):
    """passed, and why (or why not); numbers: suite to accuracy, "stable/<suite>" to the stable version's.

    Example: Verdict(version=44, passed=False, reason="dev: 0.81, the stable version 40 has 0.88", numbers={"dev": 0.81})
    """

    version: int
    passed: bool
    reason: str
    numbers: dict[str, float]


class Gate:
    """What is known of candidates and of the stable channel."""

    def __init__(self, config: GateConfig, *, policy: str) -> None:
        self._config = config
        self._policy = policy
        self._results: dict[int, dict[str, float]] = {}
        self._decided = -1
        self._replies = None if config.replies is None else Replies(config.replies)
        self._compared = "" if config.replies is None else config.replies.suite
        self._required = set(config.suites)
        self._guard = None if config.guard is None else Guard(config.guard)
        self._before = -1
        self.stable = Stable()

    def result(self, result: EvalResult) -> None:
        """An eval result of any suite."""
        if result.policy == self._policy and result.suite in (*self._config.suites, self._compared):
            self._required.add(result.suite)  # recorded prompts are waited for once there are some
            self._results.setdefault(result.version, {})[result.suite] = result.accuracy

    def event(self, event: PolicyEvent) -> None:
        """A record of `policies`: what the channel is at, and what was decided before."""
        was, self.stable = self.stable, moved(self.stable, event, self._policy)
        if self.stable.version != was.version:
            self._before = was.version if event.event == "promoted" else -1
        if event.policy == self._policy and event.channel == "stable" and event.event in ("promoted", "held"):
            self._decided = max(self._decided, event.version)
            self._forget()

    def reply(self, experience: Experience) -> None:
        """An answer to an eval task."""
        version = experience.max_version
        if self._replies is not None and (version >= self.stable.version or version == self._before):
            self._replies.take(experience)

    def closure(self, closure: Closure) -> None:
        """What became of an answer, and what people said of it."""
        if self._guard is not None:
            self._guard.closure(closure)

    def breaches(self) -> list[Breach]:
        """Rollbacks to publish now; they count as published. A pinned version is its pinner's business."""
        if self._guard is None or self.stable.pinned:
            return []
        breach = self._guard.breach(self.stable.version, self._before)
        if breach is None:
            return []
        self.event(breach_event(breach, self._policy))
        return [breach]

    def verdicts(self) -> list[Verdict]:
        """Decisions to publish now, oldest candidate first; they count as published."""
        ready = sorted(
            version
            for version, found in self._results.items()
            if version > self._decided and found.keys() >= self._required
        )
        if not ready:
            return []
        verdict = self._weigh(ready[-1])
        self.event(verdict_event(verdict, self._policy))
        return [verdict]

    def _weigh(self, version: int) -> Verdict:
        found = self._results[version]
        before: Mapping[str, float] = self._results.get(self.stable.version, {})
        numbers = found | {f"stable/{suite}": share for suite, share in before.items()}
        faults = []
        for suite, bar in self._config.suites.items():
            share = found[suite]
            if share < bar.at_least:
                faults.append(f"{suite}: {share:.3f}, expected at least {bar.at_least:g}")
            elif suite in before and share < before[suite] - bar.max_drop:
                faults.append(f"{suite}: {share:.3f}, the stable version {self.stable.version} has {before[suite]:.3f}")
        if self._replies is not None:
            compared, against = self._replies.weigh(version, self.stable.version)
            numbers |= compared
            faults += against
        passed = [f"{suite} {found[suite]:.3f}" for suite in self._config.suites]
        if prompts := numbers.get(f"{self._compared}/prompts"):
            passed.append(f"{prompts:.0f} recorded prompts compared")
        reason = "; ".join(faults) or ", ".join(passed)
        return Verdict(version=version, passed=not faults, reason=reason, numbers=dict(numbers))

    def _forget(self) -> None:
        """Drop what nothing is compared with any more."""
        kept = (self.stable.version, self._before)
        for old in [version for version in self._results if version < self._decided and version not in kept]:
            del self._results[old]
        if self._replies is not None:
            self._replies.forget(
                [version for version in self._replies.versions() if version < self._decided and version not in kept]
            )


def verdict_event(verdict: Verdict, policy: str) -> PolicyEvent:
    """The decision as a record of `policies`."""
    return PolicyEvent(
        event="promoted" if verdict.passed else "held",
        policy=policy,
        version=verdict.version,
        channel="stable",
        reason=verdict.reason,
        owner="gate",
        stats=verdict.numbers,
    )


def breach_event(breach: Breach, policy: str) -> PolicyEvent:
    """A rollback by the guard as a record of `policies`."""
    return PolicyEvent(
        event="rolled_back",
        policy=policy,
        version=breach.before,
        channel="stable",
        reason=breach.reason,
        owner="guard",
        stats=breach.numbers,
    )
