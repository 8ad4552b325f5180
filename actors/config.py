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
CONVERSE = "actors.rollout.workflow:converse"


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

    at_least: least share of right answers. max_drop: largest share by which it may be below the stable version. A candidate
    is held where its results show a larger drop, beyond chance; results on the same tasks are compared task by task. alpha:
    highest probability of holding a candidate whose drop is within `max_drop`; all tests of one candidate share it.
    total_drop: largest share by which the last `window` versions that passed may be below the best `window` on average, so
    that small drops do not add up. window: number of versions in a row that are averaged; it begins anew with a version that
    was promoted by hand.

    Example: GateSuite(at_least=0.8, max_drop=0.02)
    """

    at_least: Share = 0.0
    max_drop: Share = 0.02
    alpha: Chance = 0.01
    total_drop: Share = 0.02
    window: Positive = 8


class PeopleConfig(Section, frozen=True):
    """[master.gate.people]: how what people say is counted for [master.gate.canary].

    bad_below: rating below which a rating is a complaint, on the scale of its source. bad_below_of: the same for sources by
    name, where their scales differ. rating_window: longest time from an answer to a rating that counts; answers are compared
    when it is over. "" takes the longest window of [[feedback]] and [collect] session_s; a shorter one makes decisions depend
    on how fast people speak. block: length of a block of time; people whose answers were given in the same block are
    compared, and after each block the gate decides. One block gives at most a quarter of the evidence that decides.
    tenant_share: largest part of the evidence that one tenant gives where there are several, so that of two tenants both must
    agree; 1 lets a tenant decide by itself, and so does having nine of ten people.

    Example: PeopleConfig(bad_below=3.0, block="1m")
    """

    bad_below: float = 0.5
    bad_below_of: dict[str, float] = {}
    rating_window: OpenDuration = ""
    block: Duration = "10m"
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, 1 at most")] = 0.5

    def __post_init__(self) -> None:
        if duration_s(self.block) < 0.001:
            raise ValueError(f'block: got "{self.block}", expected a millisecond or more')


class CanaryConfig(Section, frozen=True):
    """[master.gate.canary]: a share of sessions ([gateway.canary]) tries what passes the suites; after a promotion the version
    before keeps that share for a while. One test compares both sides, by people who were served at the same time: the shares
    of complaints, of sessions with a failed answer, and of sessions with a refusal (`[gateway] refusals`).

    margin: largest rise of such a share that is allowed. relative_margin: the same as a part of the older version's share;
    the larger of the two counts. alpha: highest probability of turning away, or taking back, a version whose rise is within
    the margin. beta: highest probability that a version passes whose rise is beyond the margin. max_duration: longest
    time of a trial; no other begins meanwhile. undecided: end of a trial that has shown neither by then: "promote" or
    "hold"; a version that served nobody is held. watch: longest time for which the version before keeps its share after a
    promotion, and can come back; it is shorter where a rise beyond the margin is excluded before. "" for none.

    Example: CanaryConfig(margin=0.01, max_duration="14d")
    """

    margin: Chance = 0.02
    relative_margin: Annotated[float, msgspec.Meta(ge=0, le=10, description="a number from 0 to 10")] = 0.3
    alpha: Chance = 0.01
    beta: Chance = 0.05
    max_duration: Duration = "7d"
    undecided: Literal["promote", "hold"] = "promote"
    watch: OpenDuration = "3d"


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
    """[master.gate]: when a version may be served to customers.

    suites: tests by [[master.evals]]; without one the stable channel moves by hand alone (`headrace promote`). replies:
    comparison of answers to recorded prompts, none where its table is left out. canary: comparison on a share of the
    sessions, before and after a promotion, none where its table is left out. people: how ratings are counted.

    Example: GateConfig(suites={"held-out": GateSuite(at_least=0.8)}, canary=CanaryConfig())
    """

    suites: dict[str, GateSuite] = msgspec.field(default_factory=dict)
    replies: GateReplies | None = None
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
