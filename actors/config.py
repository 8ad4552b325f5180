"""Settings of the actors: the [explore] and [master] tables of the TOML."""

import re
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from infra.settings.config import (
    Duration,
    Name,
    NonNegative,
    OpenDuration,
    Positive,
    Seconds,
    Section,
    Table,
    Use,
    UsePath,
    duration_s,
)

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
Chance = Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, description="a temperature, 0 or above")]

REFUSALS = (r"\bI(?: am|'m|’m) (?:sorry|unable)\b", r"\bI (?:can(?:not|'t|’t)|won(?:'t|’t)) \w+ (?:with|you)\b")
CONVERSE = "actors.rollout.workflow:converse"


class EvalSuite(Section, frozen=True):
    """[[master.evals]]: suite for versions 0, `first_version`, every `every`-th version, and the last.

    Example: EvalSuite(suite="held-out", every=10, tasks=500)
    """

    suite: Name
    """Split whose tasks are the suite."""
    every: Positive = 10
    """Versions between two evaluations."""
    tasks: Positive = 500
    """Maximum tasks of the suite, in the order of their ids."""
    score: str = "exact"
    """Name of the score that measures accuracy, 1.0 for a correct answer. Scores of single turns are summed."""
    samples: Positive = 1
    """Answers per task. With 2 or more, results have pass@k for k = 1, 2, 4, …, and `temperature` must be above 0."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(f"got samples = {self.samples} at temperature 0, expected a temperature above 0")


class StopRule(Section, frozen=True):
    """[master.stop]: conditions that end the run. At the first, issuing stops, groups drain, and the last version is evaluated.

    Example: StopRule(suite="dev", at=0.93, after="5m")
    """

    suite: str = ""
    """Suite whose accuracy ends the run, "" for none."""
    at: Share = 1.0
    """Accuracy on `suite` that ends the run, 0 to 1."""
    versions: NonNegative = 0
    """Published versions that end the run, 0 for no limit."""
    groups: NonNegative = 0
    """Issued groups that end the run, 0 for no limit."""
    after: OpenDuration = ""
    """Time since the first issued group, or the first closed production answer, that ends the run. "" for no limit."""


class GateSuite(Section, frozen=True):
    """[master.gate.suites.<suite>]: results that a candidate must reach in a suite.

    Example: GateSuite(at_least=0.8, max_drop=0.02)
    """

    at_least: Share = 0.0
    """Minimum share of right answers."""
    max_drop: Share = 0.02
    """Maximum drop of a candidate's accuracy below the stable version's. The gate holds a candidate with a significantly larger
    drop; it compares the results on the same tasks task by task."""
    alpha: Chance = 0.01
    """Maximum probability of holding a candidate whose drop is within `max_drop`, over all tests of the candidate."""
    total_drop: Share = 0.02
    """Maximum drop of the mean accuracy of the last `window` passed versions below the best such mean, so that small drops do
    not add up."""
    window: Positive = 8
    """Number of consecutive versions in the mean. A version promoted by hand starts a new window. Until a window is full,
    candidates are compared with the stable version alone."""


class PeopleConfig(Section, frozen=True):
    """[master.gate.people]: evaluation of ratings in the tests of [master.gate.canary].

    Example: PeopleConfig(bad_below=3.0, block="1m")
    """

    bad_below: float = 0.5
    """Rating below which a rating is a complaint, on the scale of its source."""
    bad_below_by_source: dict[str, float] = {}
    """Threshold of a complaint for single sources, by source name, if scales differ."""
    rating_window: OpenDuration = ""
    """Maximum delay of a rating that counts; the gate compares answers after this time. Default "": the longest [[feedback]]
    window plus [collect] session_s. A shorter time makes decisions depend on how fast people rate."""
    block: Duration = "10m"
    """Length of a block of time. The gate compares people within the same block, and decides after each block. A block
    contributes at most a quarter of the evidence for a decision."""
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, 1 at most")] = 0.5
    """Maximum share of the evidence that a tenant contributes if there are several tenants; with two tenants both must agree.
    1 lets a tenant decide alone. A tenant with nine of ten people also decides alone."""

    def __post_init__(self) -> None:
        if duration_s(self.block) < 0.001:
            raise ValueError(f'block: got "{self.block}", expected a millisecond or more')


class CanaryConfig(Section, frozen=True):
    """[master.gate.canary]: trial of a version on a share of sessions ([gateway.canary]), after it passed the suites. After a
    promotion the previous version keeps that share during the watch. A sequential test compares people served at the same time
    by both versions: the shares of complaints, of sessions with a failed answer, and of sessions with a refusal (`[gateway]
    refusals`).

    Example: CanaryConfig(margin=0.01, max_duration="14d")
    """

    margin: Chance = 0.02
    """Maximum rise of each share, absolute."""
    relative_margin: Annotated[float, msgspec.Meta(ge=0, le=10, description="a number from 0 to 10")] = 0.3
    """Maximum rise as a fraction of the older version's share. The larger of the two margins counts."""
    alpha: Chance = 0.01
    """Maximum probability of rejecting or rolling back a version whose rise is within the margin."""
    beta: Chance = 0.05
    """Maximum probability that the tests pass a version whose rise exceeds the margin."""
    max_duration: Duration = "7d"
    """Maximum duration of a trial; only one trial runs at a time."""
    undecided: Literal["promote", "hold"] = "promote"
    """Decision after a trial without a result. The gate holds a version that served nobody."""
    watch: OpenDuration = "3d"
    """Maximum time after a promotion in which the previous version keeps its share and the gate can roll back. The watch ends
    early when the test excludes a rise beyond the margin. "" for no watch."""


class GateConfig(Section, frozen=True):
    """[master.gate]: conditions for the promotion of a version to the stable channel."""

    suites: dict[str, GateSuite] = msgspec.field(default_factory=dict)
    """Required eval results, by suite of [[master.evals]]. Without any, only `headrace promote` moves the stable channel."""
    canary: CanaryConfig | None = None
    """Comparison on a share of sessions, before and after a promotion. None by default."""
    people: PeopleConfig = PeopleConfig()
    """Evaluation of ratings by people."""


class MasterConfig(Section, frozen=True):
    """[master]: issued tasks, their sampling, evaluations and the gate."""

    seed: int = 0
    """Seed of the task draws and of the trainer's draws."""
    split: str = "train"
    """Split of the taskset from which the master issues tasks."""
    num_episodes: Annotated[int, msgspec.Meta(ge=1, le=256, description="a whole number from 1 to 256")] = 8
    """Episodes per task (group size). Groups of more than 256 sequences or 16 MiB of tokens or text are dropped; an
    episode of a program may have several sequences."""
    max_tokens: Positive = 512
    """Maximum sampled tokens per turn."""
    temperature: Temperature = 1.0
    """Sampling temperature of episodes."""
    first_version: NonNegative = 0
    """First policy version for which the master issues groups. Set 1 to wait for a warm-up."""
    evals: tuple[EvalSuite, ...] = ()
    """Evaluation suites."""
    gate: GateConfig = GateConfig()
    """Conditions for the promotion of a version."""
    eval_lead: NonNegative = 3
    """Versions by which the master requests evals ahead, because an engine cannot load an older version."""
    stop: StopRule = StopRule()
    """Conditions that end the run."""
    drain: Duration = "10m"
    """Maximum wait for outstanding groups after the stop, and then between two answers of the last evaluation."""
    report_s: Seconds = 2.0
    """Seconds between two status reports to the log."""
    snapshot_s: Seconds = 300.0
    """Seconds between two snapshots of the master's state, from which the next start continues."""

    def __post_init__(self) -> None:
        known = sorted(suite.suite for suite in self.evals)
        if unknown := sorted(self.gate.suites.keys() - set(known)):
            raise ValueError(
                f"gate: got suite {unknown[0]}, expected one of evals: {', '.join(known) or 'there are none'}"
            )


class ReloadConfig(Section, frozen=True):
    """[reload]: hot reload of a new version in explorers and gateways.

    Example: ReloadConfig(kv="keep")
    """

    kv: Literal["rebuild", "keep"] = "rebuild"
    """KV cache of running requests at a reload. "rebuild" recomputes it with the new weights: every logprob is exactly its
    version's, at the cost of a forward pass over all running requests per version. "keep" keeps it: a logprob is the
    probability at which the token was sampled with the older cache, and spans name the cache's oldest version. New requests
    never use an older cache. With adapters in vLLM a request keeps its version, so both values mean the same. vLLM cannot keep
    the cache of a vision model."""


class ExploreConfig(Section, frozen=True):
    """[explore]: execution of tasks by explorers.

    Example: ExploreConfig(episodes_in_flight=512, linger_s=0.5)
    """

    workflow: UsePath = CONVERSE
    """Default workflow, for tasks that name none."""
    options: Table = msgspec.field(default_factory=dict)
    """Options of the default workflow."""
    workflows: dict[str, Use] = msgspec.field(default_factory=dict)
    """Further workflows, by the name in a task's `workflow`. A task with another name is dropped as "unknown workflow"."""
    episodes_in_flight: Positive = 1024
    """Maximum episodes that an explorer runs at once."""
    max_held: Positive = 4096
    """Number of waiting tasks above which an explorer stops reading."""
    linger_s: Seconds = 1.0
    """Maximum seconds that finished episodes wait for the rest of their group before they are published."""
    episode_timeout_s: Seconds = 3600.0
    """Maximum seconds of an episode; a longer episode fails."""
    eval_hold_s: Seconds = 15.0
    """Maximum seconds that a reload waits for evals of the version that it replaces."""
    drain_s: Seconds = 10.0
    """Seconds for running groups to finish at a stop."""
    report_s: Seconds = 2.0
    """Seconds between two status reports to the log."""


def check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Raises ValueError for an invalid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: got {pattern!r}, expected a regular expression: {error}") from error


def joined_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    """A case-insensitive pattern that matches if any of the patterns does."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)
