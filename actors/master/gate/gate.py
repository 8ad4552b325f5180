"""The gate: chooses the stable version and decides if it stays. Pure.

The gate decides on a candidate once all suites of [master.gate] have its results (`actors.master.gate.suites`). Newer
candidates come first: a candidate older than the newest decided version is skipped. With [master.gate.canary] a passing version
first goes to a share of the sessions, and after a promotion the previous version keeps that share for a time; the same test
compares both sides (`actors.master.gate.trial`). Every decision is an event with its numbers, so a restart decides nothing
twice. The gate does not decide again on a version that was rolled back or tried.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from actors.config import CanaryConfig, GateConfig
from actors.master.evaluation import wilson
from actors.master.gate.counts import Counts
from actors.master.gate.suites import drop, total_drop
from actors.master.gate.trial import MEASURES, Evidence, ending, evidence, power, strata
from infra.policies.fold import MASTERS, Stable, fenced, is_overtaken, moved
from infra.settings.config import duration_s
from schemas import Closure, Directive, EvalResult, PolicyEvent, Progress
from schemas.fields import Channel, Numbers, PolicyEventKind

USUAL_SHARE = 0.1  # share of sessions in a trial, for the forecast of its power: the default of [gateway.canary]
REMEMBERED = 1000  # decided versions whose results are kept: an operator may go back to one


class Gate:
    """Decides about candidates, trials and watches. State without clock or task."""

    KEPT: ClassVar[dict[str, Any]] = {
        "_results": dict[int, dict[str, EvalResult]], "_passed": set[int], "_revoked": set[int], "_decided": int,
        "_refused": str, "_began_ms": int, "stable": Stable,
    }  # fmt: skip
    PARTS: ClassVar[tuple[str, ...]] = ("counts",)

    def __init__(self, config: GateConfig, *, policy: str, token: int = 0) -> None:
        self._config = config
        self.policy = policy
        self._token = token
        self._results: dict[int, dict[str, EvalResult]] = {}
        self._passed: set[int] = set()  # since a person last promoted a version
        self._revoked: set[int] = set()
        self._decided = -1
        self.counts = Counts(config.people)
        self._refused = ""  # why the version on trial cannot be served
        self._began_ms = 0  # when canaries began to serve their present version
        self._known: tuple[tuple[object, ...], dict[str, Evidence]] | None = None
        self.stable = Stable()

    # ---- records of the log

    def result(self, result: EvalResult) -> None:
        if result.policy == self.policy and result.suite in self._config.suites:
            self._results.setdefault(result.version, {})[result.suite] = result

    def directive(self, directive: Directive, offset: int) -> None:
        self.stable = fenced(self.stable, directive, offset)

    def event(self, event: PolicyEvent, at_ms: int | None = None) -> None:
        """Take a record of `policies`: the version of a channel, and earlier decisions. at_ms: its log-append time."""
        at_ms = self.counts.tick(at_ms)
        if is_overtaken(self.stable, event):
            return
        was, self.stable = self.stable, moved(self.stable, event, self.policy)
        if self.stable.trial != was.trial:
            self._refused = ""
        # A decision counts once it is made, and at its time in the log once it is read there.
        if self.stable.trial != was.trial or (event.channel == "canary" and event.version == self.stable.trial):
            self._began_ms = at_ms
            if self.stable.trial >= 0:
                self.counts.comparison(self.stable.trial).restart(at_ms, self.counts.block(at_ms))
        if event.policy != self.policy:
            return
        if event.channel == "stable" and event.event == "promoted" and event.owner not in MASTERS:
            self._passed.clear()
        if event.channel != "candidate" and event.event == "promoted":
            self._passed.add(event.version)
        elif event.channel == "stable" and event.event == "held":
            self._passed.discard(event.version)
        elif event.event == "rolled_back" and was.version != event.version:  # a decision comes twice: made, and read
            self._passed.discard(was.version)
        if event.channel != "candidate" and event.event in ("promoted", "held"):
            self._decided = max(self._decided, event.version)
            self._forget()

    def revoke(self, version: int) -> None:
        """Promote this version never: the trainer took it back, so no engine loads it."""
        self._revoked.add(version)
        if version == self.stable.trial:
            self._refused = "the trainer took it back"

    def closure(self, closure: Closure, at_ms: int | None = None) -> None:
        """Take the outcome of an answer, with its ratings. at_ms: log-append time of the closure."""
        self.counts.closure(closure, self.counts.tick(at_ms), self.stable.trial)

    def progress(self, progress: Progress, at_ms: int | None = None) -> None:
        """Take a gateway's counts of answers, and whether a canary refuses the version on trial."""
        at_ms = self.counts.tick(at_ms)
        self.counts.progress(progress, at_ms, self.stable.trial)
        if progress.is_canary and self.stable.trial in progress.refused and at_ms >= self._began_ms:
            self._refused = f"{progress.instance} refused it: {progress.refused[self.stable.trial]}"

    # ---- decisions

    def alarms(self) -> list[str]:
        """Sentences for an operator: complaints rose after a promotion, and no other version served at the same time. Version
        or time may be the cause, so the gate takes nothing back. It compares ends of 99.9 % intervals, with the margin.
        """
        past, config, stable = self.counts.comparison(-1), self._config.canary or CanaryConfig(), self.stable
        bad, people = _total(past.rated.get(stable.version, {}).values())
        bad_before, people_before = _total(past.rated.get(stable.before, {}).values())
        if stable.before < 0 or not people or not people_before:
            return []
        high = wilson(bad_before, people_before, 3.29)[1]
        if wilson(bad, people, 3.29)[0] <= max(high + config.margin, high * (1.0 + config.relative_margin)):
            return []
        return [
            f"version {stable.version} is rated down {bad} of {people} times, version {stable.before} {bad_before} of "
            f"{people_before} times before. Customers stay with it: time may be the cause, as no other version served then. "
            f"Look, and `headrace rollback {stable.before}`; [master.gate.canary] with a canary gateway compares at once"
        ]

    def decisions(self) -> list[PolicyEvent]:
        """Decisions to publish now, under this master's lease; they count once they are an `event`."""
        config = self._config.canary
        if self.stable.trial >= 0:
            found = self._ended(config)
            return [] if found is None else [found]
        if config is not None and config.watch and self.stable.before >= 0:
            why = f"keeps a share for {config.watch}, to compare version {self.stable.version} with it"
            return [self._event("promoted", self.stable.before, why, "watch", channel="canary")]
        if config is not None and self.stable.pinned:
            return []  # a trial would take its share of the sessions from the pinned version
        ready = [
            version
            for version, found in self._results.items()
            if version > self._decided and version not in self._revoked and found.keys() >= self._config.suites.keys()
        ]
        return [self._weighed(max(ready))] if ready else []

    def _event(
        self, event: PolicyEventKind, version: int, reason: str, owner: str, numbers: Numbers | None = None,
        channel: Channel = "stable",
    ) -> PolicyEvent:  # fmt: skip
        return PolicyEvent(
            event=event, policy=self.policy, version=version, channel=channel, reason=reason, owner=owner,
            token=self._token, stats=numbers or {},
        )  # fmt: skip

    def _ended(self, config: CanaryConfig | None) -> PolicyEvent | None:
        """The end of a trial or of a watch, None while it lasts. Without [master.gate.canary] a person ends it."""
        trial, version, watched = self.stable.trial, self.stable.version, self.stable.watched
        if self._refused:
            return self._stopped(self._refused) if watched else self._event("held", trial, self._refused, "canary")
        if config is None:
            return None
        measures = self._evidence(config)
        ended = ending(measures)
        longest = (config.watch or "0s") if watched else config.max_duration
        if not ended and self.counts.clock_ms - self._began_ms < duration_s(longest) * 1000:
            return None
        verdict = {"": f"undecided after {longest}", "worse": "worse by more than the margin"}.get(ended, ended)
        reason, numbers = f"{verdict}: {_in_words(measures, trial if watched else version)}", _numbers(measures)
        if watched:
            if ended == "worse":
                return self._event("rolled_back", trial, reason, "watch", numbers)
            return self._stopped(reason, numbers)
        was_served = any(found.new for found in measures.values())
        passes = ended == "not worse" or (not ended and config.undecided == "promote" and was_served)
        return self._event("promoted" if passes else "held", trial, reason, "canary", numbers)

    def _stopped(self, reason: str, numbers: Numbers | None = None) -> PolicyEvent:
        """The end of a watch: canaries serve the stable version again."""
        return self._event("promoted", self.stable.version, reason, "watch", numbers, channel="canary")

    def _evidence(self, config: CanaryConfig) -> dict[str, Evidence]:
        """Evidence of the comparison by measure, up to the last whole block of time."""
        stable, counts = self.stable, self.counts
        now, rated_up_to = counts.block(counts.clock_ms), counts.rated_up_to
        key = (stable.trial, stable.version, self._began_ms, now, rated_up_to)
        if self._known is None or self._known[0] != key:
            new, old = (stable.version, stable.trial) if stable.watched else (stable.trial, stable.version)
            first, sums = counts.block(self._began_ms), counts.comparison(stable.trial)
            found, share = {}, self._config.people.tenant_share
            for number, measure in enumerate(MEASURES):
                known, end, column = (sums.served, now, number) if number else (sums.rated, rated_up_to, 1)
                new_side, old_side = (
                    {
                        place: (row[0], row[column])
                        for place, row in known.get(version, {}).items()
                        if first <= place[1] < end
                    }
                    for version in (new, old)
                )
                found[measure] = evidence(config, strata(new_side, old_side), share)
            self._known = key, found
        return self._known[1]

    def _weighed(self, version: int) -> PolicyEvent:
        found = self._results[version]
        before: Mapping[str, EvalResult] = self._results.get(self.stable.version, {})
        numbers = {suite: result.accuracy for suite, result in found.items()}
        numbers |= {f"stable/{suite}": result.accuracy for suite, result in before.items()}
        passed = [self._results[known] for known in sorted(self._passed & self._results.keys())]
        faults = []
        num_tests = 2 * len(self._config.suites)
        for suite, bar in self._config.suites.items():
            share = found[suite].accuracy
            if share < bar.at_least:
                faults.append(f"{suite}: {share:.3f}, expected at least {bar.at_least:g}")
            elif suite in before and drop(bar, found[suite], before[suite], num_tests):
                stable = f"{before[suite].accuracy:.3f}"
                faults.append(f"{suite}: {share:.3f}, the stable version {self.stable.version} has {stable}")
            elif less := total_drop(bar, [known[suite] for known in passed if suite in known], found[suite], num_tests):
                faults.append(f"{suite}: the last {bar.window} versions are {less:.3f} below the best {bar.window}")
        reason = "; ".join(faults) or ", ".join(f"{suite} {found[suite].accuracy:.3f}" for suite in self._config.suites)
        if faults:
            return self._event("held", version, reason, "gate", numbers)
        if self._config.canary is None or self.stable.version < 0:
            return self._event("promoted", version, reason, "gate", numbers)
        reason += f"; {self._prospect(self._config.canary, numbers)}"
        return self._event("promoted", version, reason, "gate", numbers, channel="canary")

    def _prospect(self, config: CanaryConfig, numbers: Numbers) -> str:
        """Describe the power of a trial at the traffic of the stable version, and add it to the numbers."""
        sums = self.counts.comparison(-1).rated.get(self.stable.version, {})
        people = sum(row[0] for row in sums.values())
        if not people:
            return "nobody has rated the stable version outside of a trial, so the power of a trial is unknown"
        blocks = [block for _, block in sums]
        hours = (max(blocks) + 1 - min(blocks)) * duration_s(self._config.people.block) / 3600.0
        base, per_hour = sum(row[1] for row in sums.values()) / people, people / hours
        passes, finds = power(config, base=base, per_hour=per_hour, share=USUAL_SHARE)
        numbers |= {"trial/base": base, "trial/people an hour": per_hour, "trial/passes": passes, "trial/finds": finds}
        return (
            f"at {per_hour:.3g} people an hour and {base:.1%} complaints a trial of {config.max_duration} with a share of "
            f"{USUAL_SHARE:g} passes {passes:.0%} of equal versions and finds {finds:.0%} of those with twice the odds"
        )

    def _forget(self) -> None:
        kept = {self.stable.version, self.stable.before, self.stable.trial}
        self.counts.forget(kept)
        old = sorted(version for version in self._results if version < self._decided and version not in kept)
        for version in old[:-REMEMBERED]:
            del self._results[version]
            self._passed.discard(version)
        self._revoked = {version for version in self._revoked if version > self._decided}


def _total(sums: Iterable[Sequence[int]]) -> tuple[int, int]:
    known = list(sums)
    return sum(bad for _, bad in known), sum(people for people, _ in known)


def _in_words(measures: Mapping[str, Evidence], old: int) -> str:
    new_side = ", ".join(f"{name} {found.new_bad} of {found.new}" for name, found in measures.items())
    old_side = ", ".join(f"{found.old_bad} of {found.old}" for found in measures.values())
    return f"{new_side}; version {old} {old_side}"


def _numbers(measures: Mapping[str, Evidence]) -> Numbers:
    """By measure: people and the share of bad ones on both sides, and the evidence, 1 where it decides."""
    found: Numbers = {}
    for name, known in measures.items():
        found |= {
            f"{name}": known.new_bad / max(1, known.new), f"stable/{name}": known.old_bad / max(1, known.old),
            f"{name}/people": float(known.new), f"stable/{name}/people": float(known.old),
            f"{name}/worse": known.worse, f"{name}/not worse": known.not_worse,
        }  # fmt: skip
    return found
