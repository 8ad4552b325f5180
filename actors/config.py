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

CurriculumKind = Literal["uniform", "success", "variance"]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
Chance = Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, description="a temperature, 0 or above")]

REFUSALS = (
    r"\bI(?: am|'m|’m) (?:sorry|unable)\b",
    r"\bI (?:can(?:not|'t|’t)|won(?:'t|’t)) \w+ (?:with|you)\b",
)
CONVERSE = "actors.rollout.workflow:converse"


class EvalSuite(Section, frozen=True):
    """[[master.evals]]: a suite answered by versions 0, `first_version`, each `every`-th, and the last.

    Example: EvalSuite(suite="held-out", every=10, tasks=500)
    """

    suite: Name
    """Split whose tasks are the suite."""
    every: Positive = 10
    """Versions from one evaluation to the next."""
    tasks: Positive = 500
    """Maximum tasks; the first in the order of their ids."""
    score: str = "exact"
    """Name of the score that counts, 1.0 for a correct answer. Scores given turn by turn are added up."""
    samples: Positive = 1
    """Answers per task. With several, pass@k is reported for k = 1, 2, 4, … up to it; they need a temperature above 0."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(f"got samples = {self.samples} at temperature 0, expected a temperature above 0")


class StopRule(Section, frozen=True):
    """[master.stop]: the first of these conditions ends issuing; outstanding groups drain and the last version is evaluated.

    Example: StopRule(suite="dev", at=0.93, after="5m")
    """

    suite: str = ""
    """Suite whose accuracy ends the run, "" for none."""
    at: Share = 1.0
    """Accuracy on `suite` that ends the run."""
    versions: NonNegative = 0
    """Published versions that end the run, 0 for no limit."""
    groups: NonNegative = 0
    """Issued groups that end the run, 0 for no limit."""
    after: OpenDuration = ""
    """Time from the first issued group, or the first closed answer of production, that ends the run. "" for no limit."""


class GateSuite(Section, frozen=True):
    """[master.gate.suites.<suite>]: results that a candidate must reach in a suite.

    Example: GateSuite(at_least=0.8, max_drop=0.02)
    """

    at_least: Share = 0.0
    """Minimum share of right answers."""
    max_drop: Share = 0.02
    """Largest share by which a candidate may be below the stable version. It is held where its results show a larger drop,
    beyond chance; results on the same tasks are compared task by task."""
    alpha: Chance = 0.01
    """Highest probability of holding a candidate whose drop is within `max_drop`; all tests of one candidate share it."""
    total_drop: Share = 0.02
    """Largest share by which the last `window` versions that passed may be below the best `window` on average, so that
    small drops do not add up."""
    window: Positive = 8
    """Versions in a row that are averaged. The window begins anew with a version that was promoted by hand."""


class PeopleConfig(Section, frozen=True):
    """[master.gate.people]: ratings by people, as [master.gate.canary] counts them.

    Example: PeopleConfig(bad_below=3.0, block="1m")
    """

    bad_below: float = 0.5
    """Rating below which a rating is a complaint, on the scale of its source."""
    bad_below_by_source: dict[str, float] = {}
    """The same threshold by the name of a source, where scales differ."""
    rating_window: OpenDuration = ""
    """Longest time from an answer to a rating that counts; answers are compared when it is over. "" takes the longest window
    of [[feedback]] and [collect] session_s; a shorter one makes decisions depend on how fast people rate."""
    block: Duration = "10m"
    """Length of a block of time. People whose answers were given in the same block are compared, and after each block the
    gate decides. One block gives at most a quarter of the evidence that decides."""
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, 1 at most")] = 0.5
    """Largest part of the evidence that one tenant gives where there are several, so that of two tenants both must agree.
    1 lets a tenant decide by itself, and so does having nine of ten people."""

    def __post_init__(self) -> None:
        if duration_s(self.block) < 0.001:
            raise ValueError(f'block: got "{self.block}", expected a millisecond or more')


class CanaryConfig(Section, frozen=True):
    """[master.gate.canary]: a share of sessions ([gateway.canary]) tries a version that passed the suites; after a promotion
    the version before keeps that share for a while. One test compares both sides, by people who were served at the same time:
    the shares of complaints, of sessions with a failed answer, and of sessions with a refusal (`[gateway] refusals`).

    Example: CanaryConfig(margin=0.01, max_duration="14d")
    """

    margin: Chance = 0.02
    """Largest allowed rise of such a share."""
    relative_margin: Annotated[float, msgspec.Meta(ge=0, le=10, description="a number from 0 to 10")] = 0.3
    """Largest allowed rise as a part of the older version's share; the larger of the two margins counts."""
    alpha: Chance = 0.01
    """Highest probability of turning away, or taking back, a version whose rise is within the margin."""
    beta: Chance = 0.05
    """Highest probability of passing a version whose rise is beyond the margin."""
    max_duration: Duration = "7d"
    """Longest time of a trial; no other begins meanwhile."""
    undecided: Literal["promote", "hold"] = "promote"
    """Decision at the end of a trial without a result. A version that served nobody is held."""
    watch: OpenDuration = "3d"
    """Longest time after a promotion for which the version before keeps its share, and can come back. It is shorter where a
    rise beyond the margin is excluded before. "" for none."""


class GateReplies(Section, frozen=True):
    """[master.gate.replies]: recorded production prompts (`headrace load prompts`), answered greedily by the candidate and
    compared with the stable version's answers to the same prompts. The suite is one of [[master.evals]]; its score does not
    count. A candidate is held where its answers exceed a limit by more than chance explains.

    Example: GateReplies(suite="production", form="[0-9]{3}")
    """

    suite: Name = "production"
    """Name of the suite."""
    max_longer: Annotated[float, msgspec.Meta(ge=1, description="a number of 1 or more")] = 1.5
    """Largest factor between the mean lengths of answers, longer or shorter."""
    max_failed: Share = 0.02
    """Largest rise of the share of answers that are cut off, refused or out of form."""
    max_distance: Share = 1.0
    """Largest mean distance from the stable version's answers: 0 for the same words in the same order, 1 for none in common."""
    refusals: tuple[str, ...] = REFUSALS
    """Regular expressions of a refusal, looked for at the beginning of an answer."""
    form: str = ""
    """Regular expression of a whole answer, "" for any."""
    alpha: Chance = 0.01
    """Highest probability of holding a candidate that answers as the stable version does. Prompts are taken for independent
    of each other, so near copies of a prompt count for too much. With the default at least 12 more answers must fail."""

    def __post_init__(self) -> None:
        check_patterns("refusals", self.refusals)
        check_patterns("form", (self.form,))


class GateConfig(Section, frozen=True):
    """[master.gate]: conditions for serving a version to customers.

    Example: GateConfig(suites={"held-out": GateSuite(at_least=0.8)}, canary=CanaryConfig())
    """

    suites: dict[str, GateSuite] = msgspec.field(default_factory=dict)
    """Tests by [[master.evals]]. Without any, the stable channel moves by hand alone (`headrace promote`)."""
    replies: GateReplies | None = None
    """Comparison of answers to recorded prompts; none where the table is left out."""
    canary: CanaryConfig | None = None
    """Comparison on a share of the sessions, before and after a promotion; none where the table is left out."""
    people: PeopleConfig = PeopleConfig()
    """Ratings by people."""


class MasterConfig(Section, frozen=True):
    """[master]: tasks that are issued, how they are sampled, and evaluations.

    Example: MasterConfig(num_episodes=16, max_tokens=5, evals=(EvalSuite(suite="held-out"),))
    """

    curriculum: CurriculumKind = "uniform"
    """Distribution of tasks. "uniform": all alike; "success": tasks that fail more often; "variance": tasks that succeed half
    of the time."""
    seed: int = 0
    """Seed of the draws of tasks, and of the trainer's."""
    split: str = "train"
    """Split whose tasks are issued."""
    num_episodes: Positive = 8
    """Episodes of a group."""
    enough: NonNegative = 0
    """Episodes that end a group once they have ended without failing; the others are stopped. 0 waits for all."""
    max_tokens: Positive = 512
    """Maximum tokens of a turn."""
    temperature: Temperature = 1.0
    """Sampling temperature of episodes."""
    first_version: NonNegative = 0
    """Policy version before which no group is issued: the end of a warm-up."""
    floor: Share = 0.05
    """Least weight of a task under "success" and "variance", before its own priority."""
    cap: Share = 1.0
    """Largest weight of a task under "success" and "variance", before its own priority."""
    evals: tuple[EvalSuite, ...] = ()
    """Suites to evaluate."""
    gate: GateConfig = GateConfig()
    """Conditions for serving a version to customers."""
    eval_lead: NonNegative = 3
    """Versions by which evals are requested ahead, since an engine cannot go back."""
    stop: StopRule = StopRule()
    """Conditions that end the run."""
    drain: Duration = "60s"
    """Longest wait for outstanding groups after the stop."""
    report_s: Seconds = 2.0
    """Seconds between two reports."""
    snapshot_s: Seconds = 300.0
    """Seconds between two snapshots of the state, from which the next start reads on."""

    def __post_init__(self) -> None:
        known = sorted(suite.suite for suite in self.evals)
        asked = {*self.gate.suites, *((self.gate.replies.suite,) if self.gate.replies else ())}
        if unknown := sorted(asked - set(known)):
            raise ValueError(
                f"gate: got suite {unknown[0]}, expected one of evals: {', '.join(known) or 'there are none'}"
            )
        if self.enough > self.num_episodes:
            raise ValueError(
                f"got enough = {self.enough}, expected at most num_episodes = {self.num_episodes}, or 0 for all"
            )
        if not self.floor <= self.cap or not self.cap:
            raise ValueError(f"got floor = {self.floor} and cap = {self.cap}, expected floor <= cap, and cap above 0")


class ReloadConfig(Section, frozen=True):
    """[reload]: reloads of explorers and gateways to a new version while requests run.

    Example: ReloadConfig(kv="keep")
    """

    kv: Literal["rebuild", "keep"] = "rebuild"
    """Keys and values of running requests at a reload. "rebuild" computes them again under the new weights: every logprob is
    exactly its version's, at the cost of a forward over all running requests at each version. "keep" computes nothing again:
    a recorded logprob is the probability with which the token was sampled, from older keys and values, and spans name the
    version from which on these are. A request that begins after a reload meets no older keys and values in either. A request
    under an adapter in vLLM keeps its version, so both mean the same. vLLM cannot keep those of a model that takes pictures."""


class ExploreConfig(Section, frozen=True):
    """[explore]: execution of tasks by an explorer.

    Example: ExploreConfig(episodes_in_flight=512, linger_s=0.5)
    """

    workflow: UsePath = CONVERSE
    """Workflow of tasks that name none."""
    options: Table = msgspec.field(default_factory=dict)
    """Options of that workflow."""
    workflows: dict[str, Use] = msgspec.field(default_factory=dict)
    """Further workflows by the name that a task's `workflow` gives. A task that names another one is dropped as "unknown
    workflow"."""
    episodes_in_flight: Positive = 1024
    """Episodes that are sampled at once."""
    max_held: Positive = 4096
    """Tasks taken and not yet started, above which nothing more is read."""
    linger_s: Seconds = 1.0
    """Longest wait of finished episodes for the rest of their group, in seconds."""
    episode_timeout_s: Seconds = 3600.0
    """Seconds after which an episode has failed."""
    eval_hold_s: Seconds = 15.0
    """Longest wait of a reload for evals of the version it replaces, in seconds."""
    drain_s: Seconds = 10.0
    """Seconds that running groups get to finish at a stop."""
    report_s: Seconds = 2.0
    """Seconds between two reports."""
    max_routing_bytes: Annotated[int, msgspec.Meta(ge=1, le=15 * 1024 * 1024, description="1 to 15728640 bytes")] = (
        4_194_304
    )
    """Maximum bytes of the recorded experts of one token sequence (`engine.options.routing`): one per token, layer and
    expert, two above 256 experts. A larger sequence is published without them and counted as `routing_dropped`."""


def check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Raises ValueError for an invalid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: got {pattern!r}, expected a regular expression: {error}") from error


def joined_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches where any of these does, in either case."""
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)
