"""What people say of the versions they are served, as far as it can be decided on by now. State without clock or task.

Time is that of the log: the newest record of `progress`. Evidence is weighed when a block of time is complete, once:
what is revised later counts with the next block.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from actors.config import GateConfig
from actors.master.gate import guard, trial
from actors.master.gate.ratings import Ratings, Voices
from infra.policies.channel import Stable
from infra.settings.config import duration_s
from schemas import Closure, Progress

MANY = 200  # ratings, or people, of which something can be said
CROWDED = 5.0  # ratings of one person, on average, above which there are few people
LATE = 0.2  # share of ratings that come too late to count
MAX_GONE = 100  # versions taken back that are known as such
MOST = 0.8  # this share of the people counts as all of them


class People:
    """Ratings, and since when the channel has not moved."""

    KEPT: ClassVar[dict[str, Any]] = {"_now_ms": int, "_trial_ms": int, "_stable_ms": int, "_gone": set[int]}
    PARTS: ClassVar[tuple[str, ...]] = ("ratings",)

    def __init__(self, config: GateConfig) -> None:
        self.ratings = Ratings(config.people)
        self._config = config
        self._block_ms = int(duration_s(config.people.block) * 1000)
        self._now_ms = 0
        self._trial_ms = 0  # when the trial began
        self._stable_ms = 0  # when the stable version became it
        self._gone: set[int] = set()  # versions that customers were taken back from
        self._of_trial: tuple[tuple[int, int, int], trial.TrialEvidence] | None = None
        self._of_stable: tuple[tuple[int, int, int], guard.GuardEvidence] | None = None
        self._several: tuple[int, bool] | None = None
        self._alarms: tuple[tuple[int, int, int], list[str]] | None = None

    def closure(self, closure: Closure, at_ms: int | None = None) -> None:
        """What became of an answer, and what people said of it. at_ms: when that was logged."""
        self._tick(at_ms)
        self.ratings.closure(closure, self._now_ms if at_ms is None else at_ms)

    def progress(self, progress: Progress, at_ms: int | None = None) -> None:
        """What a gateway served."""
        self._tick(at_ms)
        self.ratings.progress(progress)

    def moved(self, was: Stable, now: Stable, at_ms: int | None = None) -> None:
        """The channel moved; again in the log it is at the same place."""
        at_ms = self._now_ms if at_ms is None else at_ms
        if now.version != was.version:
            self._stable_ms = at_ms
            self._gone.discard(now.version)
            if now.version < was.version:
                self._gone.add(was.version)
                if len(self._gone) > MAX_GONE:
                    self._gone.remove(min(self._gone))
        if now.trial != was.trial:
            self._trial_ms = at_ms

    def tried(self, stable: Stable) -> trial.TrialResult:
        """The state of the trial. Only with [master.gate.canary]."""
        assert self._config.canary is not None
        version = stable.trial
        return trial.outcome(
            self._config.canary,
            self._config.people,
            self.of_trial(version, stable.version),
            self.ratings.of_arm(version, version),
            self.ratings.of_arm(stable.version, version),
            self._now_ms - self._trial_ms,
        )

    def breached(self, version: int, before: int) -> guard.Breach | None:
        """Whether the stable version is to give way to the one before it. Only with [master.gate.guard]."""
        config = self._config.guard
        assert config is not None
        if self._now_ms - self._stable_ms > duration_s(config.watch) * 1000:
            return None
        served = self.ratings.of_version(version), self.ratings.of_version(before)
        return guard.breach(config, self._config.people, (version, before), self.of_stable(version), *served)

    def of_trial(self, version: int, stable: int) -> trial.TrialEvidence:
        """The evidence of a trial up to the last block."""
        assert self._config.canary is not None
        key = (version, stable, self._before_ms)
        if self._of_trial is None or self._of_trial[0] != key:
            voices = self.ratings.of_trial(version)
            blocks = trial.blocks_of(voices, version, stable, self._block_ms, self._before_ms)
            evidence = trial.evidence_of(self._config.canary, self._config.people, blocks, several=self._are_several())
            self._of_trial = key, evidence
        return self._of_trial[1]

    def of_stable(self, version: int) -> guard.GuardEvidence:
        """The evidence against the stable version up to the last block."""
        assert self._config.guard is not None
        key = (version, self._stable_ms, self._before_ms)
        if self._of_stable is None or self._of_stable[0] != key:
            new, old = guard.hours_of(self.ratings, version, self._stable_ms, self._before_ms, self._gone)
            before = guard.before_of(old)
            evidence = guard.compared(self._config.guard, self._config.people, new, before, several=self._are_several())
            self._of_stable = key, evidence
        return self._of_stable[1]

    def alarms(self, stable: Stable) -> list[str]:
        """Where an assumption of the tests fails, a sentence each with what to do; looked at as often as is decided."""
        key = (stable.version, stable.trial, self._before_ms)
        if self._alarms is None or self._alarms[0] != key:
            self._alarms = key, self._found(stable)
        return self._alarms[1]

    def _found(self, stable: Stable) -> list[str]:
        found: list[str] = []
        if self._config.canary is not None and stable.trial >= 0:
            found += few_people(stable.trial, self.ratings.of_trial(stable.trial))
        if self._config.guard is not None and stable.version >= 0:
            evidence = self.of_stable(stable.version)
            if evidence.unrest >= guard.RESTLESS:
                found.append(
                    f"what people say of the stable versions changes by itself from day to day ({evidence.unrest:.1f} "
                    "standard deviations): the guard compares no hours with the days before while that is so; "
                    "[master.gate.canary] compares at the same time"
                )
            if guard.is_worse(self._config.guard, evidence):
                found.append(
                    f"version {stable.version} is {guard.evidence_text(evidence)}, and customers stay with it: it is "
                    "pinned, or there is none to go back to; where they came back to it, what they came from may not have "
                    "been the cause"
                )
        days = self.ratings.of_days().values()
        return found + late_ratings([voices.counts for voices in days]) + self._one_tenant(days)

    def _one_tenant(self, days: Iterable[Voices]) -> list[str]:
        share = self._config.people.tenant_share
        if share >= 1.0 or not self._are_several():
            return []
        count: dict[str, int] = {}
        for voices in days:
            for voice in voices:
                count[voice.tenant] = count.get(voice.tenant, 0) + 1
        tenant, most = max(count.items(), key=lambda one: one[1])
        if sum(count.values()) < MANY or most < MOST * sum(count.values()):
            return []
        return [
            f"{most} of {sum(count.values())} people heard are of tenant {tenant}, which gives at most {share:g} of what "
            "decides: [master.gate.people] tenant_share = 1 lets it decide alone"
        ]

    def _are_several(self) -> bool:
        if self._several is None or self._several[0] != self._before_ms:
            self._several = self._before_ms, self.ratings.several()
        return self._several[1]

    @property
    def _before_ms(self) -> int:
        """Answers given before it are old enough to count."""
        return (self._now_ms - self.ratings.mature_ms) // self._block_ms * self._block_ms

    def _tick(self, at_ms: int | None) -> None:
        if at_ms is not None:
            self._now_ms = max(self._now_ms, at_ms)


def few_people(version: int, voices: Voices) -> list[str]:
    """Ratings of a trial that few people gave."""
    ratings, people = sum(voices.counts[:2]), sum(1 for _ in voices)
    if ratings < MANY or ratings < CROWDED * people:
        return []
    return [
        f"trial of version {version}: {ratings} ratings are of {people} people, and one word of each counts: name raters "
        "one by one in feedback (`rater`), or give a trial a larger share of the sessions"
    ]


def late_ratings(counts: Sequence[Sequence[int]]) -> list[str]:
    """Ratings that come too late to count. counts: as `Voices.counts`, of each day."""
    bad, good, late_bad, late_good = (sum(one[kind] for one in counts) for kind in range(4))
    late = late_bad + late_good
    if bad + good + late < MANY or late < LATE * (bad + good + late):
        return []
    return [
        f"{late_bad} of {bad + late_bad} complaints and {late_good} of {good + late_good} words of praise come later than "
        "[master.gate.people] mature after their answer and count for nothing: make it longer"
    ]
