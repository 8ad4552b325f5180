"""The gate before customers: whether a candidate version may become the stable one, decided from its evals. Pure.

A candidate is weighed once all suites of [master.gate] have a result for it. It passes where in every suite it is right at
least `at_least` of the time, not worse than the stable version was, task by task, and the run not worse than it once was
(`actors.master.gate.suites`), and where it answers recorded prompts much as the stable version did
(`actors.master.gate.replies`). Newer candidates come first: one that is older than the newest decided is left out. With
[master.gate.canary] what passes begins a trial in the canary channel, and becomes stable by what people say of it there
(`actors.master.gate.trial`). What customers say of a version it let pass can take it back (`actors.master.gate.guard`); a
version taken back, or tried once, is not weighed again. Every decision is an event with its numbers, so a restart decides
nothing twice.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from actors.config import GateConfig
from actors.master.gate.guard import Breach
from actors.master.gate.people import People
from actors.master.gate.replies import Replies
from actors.master.gate.suites import drop, total_drop
from infra.policies.channel import MASTERS, Stable, fenced, is_overtaken, moved
from schemas import Closure, Directive, EvalResult, Experience, PolicyEvent, Progress
from schemas.fields import Channel

REMEMBERED = 1000  # decided versions whose results are kept: an operator may go back to one


class GateDecision(msgspec.Struct, frozen=True):
    """What the gate says of a version.

    version: of the policy. passed: whether it may be served. reason: why, or why not. numbers: suite to accuracy,
    "stable/<suite>" to the stable version's; of a trial what it was decided on. channel: where a version that passed is
    served. owner: who decided.

    Example: GateDecision(version=44, passed=False, reason="dev: 0.81, the stable version 40 has 0.88", numbers={"dev": 0.81})
    """

    version: int
    passed: bool
    reason: str
    numbers: dict[str, float]
    channel: Channel = "stable"
    owner: str = "gate"


class Gate:
    """What is known of candidates and of the stable channel."""

    KEPT: ClassVar[dict[str, Any]] = {
        "_results": dict[int, dict[str, EvalResult]], "_decided": int, "_required": set[str], "_since": int,
        "_refused": str, "_before": int, "stable": Stable,
    }  # fmt: skip
    PARTS: ClassVar[tuple[str, ...]] = ("people", "_replies")

    def __init__(self, config: GateConfig, *, policy: str, token: int = 0) -> None:
        self._config = config
        self._policy = policy
        self._token = token
        self._results: dict[int, dict[str, EvalResult]] = {}
        self._decided = -1
        self._replies = None if config.replies is None else Replies(config.replies)
        self._compared = "" if config.replies is None else config.replies.suite
        self._required = set(config.suites)
        self._since = -1  # the run is compared with itself from this version on
        self.people = People(config)
        self._weighs_people = config.guard is not None or config.canary is not None
        self._refused = ""  # why the version on trial cannot be served
        self._before = -1
        self.stable = Stable()

    def result(self, result: EvalResult) -> None:
        """An eval result of any suite."""
        if result.policy == self._policy and result.suite in (*self._config.suites, self._compared):
            self._required.add(result.suite)  # recorded prompts are waited for once there are some
            self._results.setdefault(result.version, {})[result.suite] = result

    def directive(self, directive: Directive, offset: int) -> None:
        """A directive of `policies`, and where it lies there."""
        self.stable = fenced(self.stable, directive, offset)

    def event(self, event: PolicyEvent, at_ms: int | None = None) -> None:
        """A record of `policies`: what the channel is at, and what was decided before. at_ms: when it was logged."""
        if is_overtaken(self.stable, event):
            return
        was, self.stable = self.stable, moved(self.stable, event, self._policy)
        self.people.moved(was, self.stable, at_ms)
        if self.stable.version != was.version:
            self._before = was.version if event.event == "promoted" else -1
        if self.stable.trial != was.trial:
            self._refused = ""
        if event.policy != self._policy:
            return
        if event.event == "refused" and event.version == self.stable.trial:
            self._refused = f"{event.owner} refused it: {event.reason}"
        if event.channel == "stable" and event.event == "promoted" and event.owner not in MASTERS:
            self._since = max(self._since, event.version)
        if event.channel != "candidate" and event.event in ("promoted", "held"):
            self._decided = max(self._decided, event.version)
            self._forget()

    def reply(self, experience: Experience) -> None:
        """An answer to an eval task."""
        version = experience.max_version
        if self._replies is not None and (version >= self.stable.version or version == self._before):
            self._replies.take(experience)

    def closure(self, closure: Closure, at_ms: int | None = None) -> None:
        """What became of an answer, and what people said of it. at_ms: when it was logged."""
        if self._weighs_people:
            self.people.closure(closure, at_ms)

    def progress(self, progress: Progress, at_ms: int | None = None) -> None:
        """What a gateway served."""
        if self._weighs_people:
            self.people.progress(progress, at_ms)

    def alarms(self) -> list[str]:
        """What an operator should look at: where the assumptions of a test fail."""
        return self.people.alarms(self.stable) if self._weighs_people else []

    def breaches(self) -> list[Breach]:
        """Rollbacks to publish now. A pinned version is its pinner's business."""
        if self._config.guard is None or self.stable.pinned:
            return []
        found = self.people.breached(self.stable.version, self._before)
        return [] if found is None else [found]

    def decisions(self) -> list[GateDecision]:
        """Decisions to publish now, as `record` makes them; they count once they are an `event`."""
        if self.stable.trial >= 0:
            tried = self._tried(self.stable.trial)
            return [] if tried is None else [tried]
        ready = sorted(
            version
            for version, found in self._results.items()
            if version > self._decided and found.keys() >= self._required
        )
        return [self._weigh(ready[-1])] if ready else []

    def record(self, decision: GateDecision | Breach) -> PolicyEvent:
        """A decision as this master publishes it, under its lease."""
        return policy_event(decision, self._policy, self._token)

    def _tried(self, version: int) -> GateDecision | None:
        """The result of a trial, None while it lasts. Without [master.gate.canary] a person ends it."""
        if self._refused:
            return GateDecision(version=version, passed=False, reason=self._refused, numbers={}, owner="canary")
        if self._config.canary is None:
            return None
        found = self.people.tried(self.stable)
        if not found.ended:
            return None
        passed = found.ended == "passed"
        return GateDecision(version=version, passed=passed, reason=found.reason, numbers=found.numbers, owner="canary")

    def _weigh(self, version: int) -> GateDecision:
        found = self._results[version]
        before: Mapping[str, EvalResult] = self._results.get(self.stable.version, {})
        numbers = {suite: one.accuracy for suite, one in found.items()}
        numbers |= {f"stable/{suite}": one.accuracy for suite, one in before.items()}
        faults = []
        for suite, bar in self._config.suites.items():
            share = found[suite].accuracy
            if share < bar.at_least:
                faults.append(f"{suite}: {share:.3f}, expected at least {bar.at_least:g}")
            elif suite in before and drop(bar, found[suite], before[suite]):
                stable = f"{before[suite].accuracy:.3f}"
                faults.append(f"{suite}: {share:.3f}, the stable version {self.stable.version} has {stable}")
            elif less := total_drop(bar, self._history(suite, version)):
                faults.append(f"{suite}: the last {bar.over} candidates are {less:.3f} below the best {bar.over}")
        if self._replies is not None:
            compared, against = self._replies.weigh(version, self.stable.version)
            numbers |= compared
            faults += against
        passed = [f"{suite} {found[suite].accuracy:.3f}" for suite in self._config.suites]
        if prompts := numbers.get(f"{self._compared}/prompts"):
            passed.append(f"{prompts:.0f} recorded prompts compared")
        reason = "; ".join(faults) or ", ".join(passed)
        trial = not faults and self._config.canary is not None and self.stable.version >= 0
        channel: Channel = "canary" if trial else "stable"
        return GateDecision(version=version, passed=not faults, reason=reason, numbers=dict(numbers), channel=channel)

    def _history(self, suite: str, version: int) -> list[EvalResult]:
        """Results of a suite up to a version, since an operator last said that all is well."""
        return [
            results[suite]
            for known, results in sorted(self._results.items())
            if suite in results and self._since <= known <= version
        ]

    def _forget(self) -> None:
        """Drop what nothing is compared with any more."""
        kept = (self.stable.version, self._before, self.stable.trial)
        self.people.ratings.forget(set(kept))
        old = sorted(version for version in self._results if version < self._decided and version not in kept)
        for version in old[:-REMEMBERED]:
            del self._results[version]
        if self._replies is not None:
            self._replies.forget(
                [version for version in self._replies.versions() if version < self._decided and version not in kept]
            )


def policy_event(decision: GateDecision | Breach, policy: str, token: int) -> PolicyEvent:
    """A decision, or a rollback by the guard, as a record of `policies`. token: of the master's lease."""
    if isinstance(decision, Breach):
        return PolicyEvent(
            event="rolled_back", policy=policy, token=token, version=decision.before, channel="stable",
            reason=decision.reason, owner="guard", stats=decision.numbers,
        )  # fmt: skip
    return PolicyEvent(
        event="promoted" if decision.passed else "held", policy=policy, token=token, version=decision.version,
        channel=decision.channel, reason=decision.reason, owner=decision.owner, stats=decision.numbers,
    )  # fmt: skip
