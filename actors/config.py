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

CurriculumKind = Literal["uniform", "easy_to_hard", "success", "variance"]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
Chance = Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, description="a temperature, 0 or above")]

REFUSALS = (
    r"\bI(?: am|'m|’m) (?:sorry|unable)\b",
    r"\bI (?:can(?:not|'t|’t)|won(?:'t|’t)) \w+ (?:with|you)\b",
)
CONVERSE = "actors.rollout.workflows.converse:converse"


class EvalSuite(Section, frozen=True):
    """[[master.evals]]: a suite answered by versions 0, `first_version`, each `every`-th, and the last.

    suite: the split of its tasks. every: versions from one evaluation to the next. tasks: at most so many, in order of their
    ids. score: which verdict counts, one given turn by turn by its sum; 1.0 is correct. samples: answers per task; with
    several, pass@k is reported for k = 1, 2, 4, … up to it, and temperature must be above 0, since greedy answers are all the
    same. temperature: at which they are sampled; 0 is greedy.

    Example: EvalSuite(suite="held-out", every=10, tasks=500)
    """

    suite: Name
    every: Positive = 10
    tasks: Positive = 500
    score: str = "exact"
    samples: Positive = 1
    temperature: Temperature = 0.0

    def __post_init__(self) -> None:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(f"got samples = {self.samples} at temperature 0, expected a temperature above 0")


class StopRule(Section, frozen=True):
    """[master.stop]: when issuing ends; whichever comes first. Then what is outstanding drains and the last version is
    evaluated.

    suite, at: this suite's accuracy reached `at`. versions: so many were published (0: no limit). groups: so many were
    issued (0: no limit). after: so long after the first group was issued or the first answer of production was closed ("" for
    no limit).

    Example: StopRule(suite="dev", at=0.93, after="5m")
    """

    suite: str = ""
    at: Share = 1.0
    versions: NonNegative = 0
    groups: NonNegative = 0
    after: OpenDuration = ""


class GateSuite(Section, frozen=True):
    """[master.gate.suites.<suite>]: what a candidate must show there.

    at_least: its share of right answers. max_drop: how much less than the stable version's it may be. It is held where it
    is worse by more than that, and by more than chance explains. Results on the same tasks are compared task by task.
    alpha: the chance to hold one that is as good. total_drop: how much less than the best the last `over` candidates may be
    on average, so that small drops do not add up. over: candidates in a row that make the best; it counts again from a
    version that was promoted by hand.

    Example: GateSuite(at_least=0.8, max_drop=0.02)
    """

    at_least: Share = 0.0
    max_drop: Share = 0.02
    alpha: Chance = 0.01
    total_drop: Share = 0.02
    over: Positive = 8


class PeopleConfig(Section, frozen=True):
    """[master.gate.people]: how what people say is counted, for [master.gate.canary] and [master.gate.guard].

    bad_below: a rating below it is a complaint; it is on the scale that the source gives its values on. bad_below_of: of
    sources by name that have another scale. mature: a word counts that comes so long after its answer at most, and answers
    are compared when that time is over; "" for the longest window of [[feedback]] and [collect] session_s. Shorter than that
    makes decisions depend on how fast people speak. block: answers of so long a time are compared with each other, and as
    often is decided.
    tenant_share: the most of what decides that one tenant gives where there are several (of failures and refusals: one
    key), so of two tenants both must be of one mind; 1 where one of them is to decide alone.

    Example: PeopleConfig(bad_below=3.0, block="1m")
    """

    bad_below: float = 0.5
    bad_below_of: dict[str, float] = {}
    mature: OpenDuration = ""
    block: Duration = "10m"
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, 1 at most")] = 0.5

    def __post_init__(self) -> None:
        if duration_s(self.block) < 0.001:
            raise ValueError(f'block: got "{self.block}", expected a millisecond or more')


class GateGuardConfig(Section, frozen=True):
    """[master.gate.guard]: when customers are taken back to the stable version before, by what they say of the answers,
    and by how many fail or are refused (what begins as a refusal: `[gateway] refusals`).

    Complaints are compared with those of the days before the version became stable, in two ways. With those of the same
    hour of the day, where two days or more are known: the guard looks for odds of a complaint that are `odds` times as
    high, or a share higher by `harm`, whichever is less. And whatever the hour: for a share higher by `harm` than it may
    become by itself, which is `swing` above the highest that it can have been.

    A version is compared with the past, so no test tells it from a world that changes with it. Where the days before
    differ from each other more than chance explains, the first way waits, and that is an alarm: customers stay where they
    are rather than harm is found. What changes from the very hour of a promotion is taken for the version's doing, and
    is an alarm if it goes on after the rollback: [master.gate.canary] compares at the same time.

    harm: rise of the share of complaints that is looked for. odds: rise of their odds that is looked for. swing: how far
    the share may be above the highest of the days before and still be chance. alpha: chance of ever taking back a version
    that is no worse. least: people heard of the versions before, and answers of them, without which nothing is decided.
    more_failed: rise of the share of answers that fail, or are refused, that is looked for; of each session one counts.
    watch: so long after its promotion a version is watched.

    Example: GateGuardConfig(harm=0.05, alpha=0.001)
    """

    harm: Chance = 0.1
    odds: Annotated[float, msgspec.Meta(gt=1, description="a number above 1")] = 2.0
    swing: Share = 0.1
    alpha: Chance = 0.01
    least: Positive = 50
    more_failed: Chance = 0.05
    watch: Duration = "7d"


class CanaryConfig(Section, frozen=True):
    """[master.gate.canary]: what passes the suites is first tried by a share of sessions ([gateway.canary]) and becomes the
    stable version by what people say of it, compared with what they say of the stable one of answers of the same time.

    odds: how many times as high the odds of being rated down are that the trial looks for. alpha: chance of turning away a
    version that is no worse. beta: chance that the ratings let one through that is so much worse. Between no worse and
    so much worse it may take long. longest: then a version is turned away as undecided, also one without ratings; while a
    trial runs no other begins. more_failed, least: as in [master.gate.guard].

    Example: CanaryConfig(odds=1.5, longest="14d")
    """

    odds: Annotated[float, msgspec.Meta(gt=1, description="a number above 1")] = 2.0
    alpha: Chance = 0.01
    beta: Chance = 0.05
    longest: Duration = "7d"
    more_failed: Chance = 0.05
    least: Positive = 50


class GateReplies(Section, frozen=True):
    """[master.gate.replies]: recorded production prompts (`headrace load prompts`), answered greedily by the candidate
    and compared with the stable version's answers to the same. It is one of [[master.evals]], whose score counts nothing.
    A candidate is held where its answers are beyond what may be, and by more than chance explains.

    suite: its name. max_longer: how many times as long answers may be on average, and as short. max_failed: by how much
    more of the answers (a share) may be cut off, refused or out of form. max_distance: how far answers may be from the
    stable version's, 0 for the same words in the same order to 1 for none in common. refusals: regular expressions, looked
    for at an answer's beginning. form: what a whole answer must look like, "" for anything. alpha: the chance to hold a
    candidate that answers as the stable version does; prompts are taken for independent of each other, so near copies of one
    prompt count for more than they tell. With the default at least 12 more answers must fail, whatever their share is.

    Example: GateReplies(suite="production", form="[0-9]{3}")
    """

    suite: Name = "production"
    max_longer: Annotated[float, msgspec.Meta(ge=1, description="a number of 1 or more")] = 1.5
    max_failed: Share = 0.02
    max_distance: Share = 1.0
    refusals: tuple[str, ...] = REFUSALS
    form: str = ""
    alpha: Chance = 0.01

    def __post_init__(self) -> None:
        check_patterns("refusals", self.refusals)
        check_patterns("form", (self.form,))


class GateConfig(Section, frozen=True):
    """[master.gate]: when a version may be served to customers. suites: of [[master.evals]], by which it is judged; with
    none the stable channel moves by hand only (`headrace promote`). replies: compares answers to recorded prompts; guard:
    takes a version back that customers like less; canary: tries a version on a share of sessions first; none of them where
    its table is left out. people: how their words count.

    Example: GateConfig(suites={"held-out": GateSuite(at_least=0.8)}, guard=GateGuardConfig())
    """

    suites: dict[str, GateSuite] = msgspec.field(default_factory=dict)
    replies: GateReplies | None = None
    guard: GateGuardConfig | None = None
    canary: CanaryConfig | None = None
    people: PeopleConfig = PeopleConfig()


class MasterConfig(Section, frozen=True):
    """[master]: what is issued, how it is sampled, and what is evaluated.

    curriculum: how tasks are drawn. uniform: all alike; easy_to_hard: from the easiest on; success: those that fail
    more often; variance: those that succeed half of the time. seed: of the draws of tasks, and of the trainer's. split:
    of the tasks that are issued. temperature: at which episodes are sampled. first_version: no group is issued before
    this policy version is published (the end of a warm-up). num_episodes: of a group. enough: a group ends when so many
    of its episodes have ended without failing, and the others are stopped; 0 waits for all. max_tokens: of a turn.
    ramp_groups: after so many groups `easy_to_hard` draws from all tasks. floor, cap: least and largest weight of a
    task under `success` and `variance`, before its own priority. eval_lead: evals are requested so many versions ahead,
    since an engine cannot go back. gate: what a version must show before customers are served it. drain: the longest
    wait after the stop. report_s: seconds from one report to the log to the next. snapshot_s: so often its state goes
    to the store, from which the next start reads on.

    Example: MasterConfig(num_episodes=16, max_tokens=5, evals=(EvalSuite(suite="held-out"),))
    """

    curriculum: CurriculumKind = "uniform"
    seed: int = 0
    split: str = "train"
    num_episodes: Positive = 8
    enough: NonNegative = 0
    max_tokens: Positive = 512
    temperature: Temperature = 1.0
    first_version: NonNegative = 0
    ramp_groups: Positive = 10_000
    floor: Share = 0.05
    cap: Share = 1.0
    evals: tuple[EvalSuite, ...] = ()
    gate: GateConfig = GateConfig()
    eval_lead: NonNegative = 3
    stop: StopRule = StopRule()
    drain: Duration = "60s"
    report_s: Seconds = 2.0
    snapshot_s: Seconds = 300.0

    def __post_init__(self) -> None:
        known = sorted(one.suite for one in self.evals)
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
    """[reload]: a new version in explorers and gateways, while requests run.

    kv: what becomes of the keys and values of running requests. "rebuild": they are computed again under the new weights, so
    that every logprob is exactly its version's; that is a forward over all that runs, at each version. "keep": they stay, and
    nothing is computed again. What is sampled then is sampled with keys and values of older weights: the recorded logprobs
    are those of that, and spans say from which version on they are. A request that begins after a reload meets none of before
    it in either. A request under an adapter in vLLM keeps its version, so both mean the same. vLLM cannot keep those of a
    model that takes pictures.

    Example: ReloadConfig(kv="keep")
    """

    kv: Literal["rebuild", "keep"] = "rebuild"


class ExploreConfig(Section, frozen=True):
    """[explore]: how an explorer runs what it takes.

    workflow, options: for tasks that name none. workflows: others, by the name that a task's `workflow` gives them,
    each with its options; a task that names another one is dropped as "unknown workflow". episodes_in_flight: sampled
    at once. max_held: tasks taken and not yet started; past it nothing more is read. linger_s: finished episodes wait
    at most so long for the rest of their group. episode_timeout_s: then the episode has failed. eval_hold_s: the
    longest a reload waits for evals of the version it would replace. drain_s: at a stop, how long running groups may
    take to finish. max_routing_bytes: of one token sequence, where the engine records the experts of a mixture of
    experts (`engine.options.routing`): a byte per token, layer and expert of it, two above 256 experts. What is larger
    is published without them, and counted as `routing_dropped`. report_s: seconds from one report to the log to the
    next.

    Example: ExploreConfig(episodes_in_flight=512, linger_s=0.5)
    """

    workflow: UsePath = CONVERSE
    options: Table = msgspec.field(default_factory=dict)
    workflows: dict[str, Use] = msgspec.field(default_factory=dict)
    episodes_in_flight: Positive = 1024
    max_held: Positive = 4096
    linger_s: Seconds = 1.0
    episode_timeout_s: Seconds = 3600.0
    eval_hold_s: Seconds = 15.0
    drain_s: Seconds = 10.0
    report_s: Seconds = 2.0
    max_routing_bytes: Annotated[int, msgspec.Meta(ge=1, le=15 * 1024 * 1024, description="1 to 15728640 bytes")] = (
        4_194_304
    )


def check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Raises ValueError for an invalid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: got {pattern!r}, expected a regular expression: {error}") from error


def any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """What matches where one of them does, in whatever case."""
    return re.compile("|".join(f"(?:{one})" for one in patterns), re.IGNORECASE)
