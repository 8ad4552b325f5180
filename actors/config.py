"""Settings of the actors: the [explore] and [master] tables of the TOML."""

import re
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from infra.config import Duration, Name, NonNegative, Positive, Seconds, Section, Table, Use, UsePath

CurriculumKind = Literal["uniform", "easy_to_hard", "success", "variance"]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, description="a temperature, 0 or above")]

REFUSALS = (
    r"\bI(?: am|'m|’m) (?:sorry|unable)\b",
    r"\bI (?:can(?:not|'t|’t)|won(?:'t|’t)) \w+ (?:with|you)\b",
)
CONVERSE = "actors.workflows.converse:converse"


class EvalSuite(Section, frozen=True):
    """[[master.evals]]: a suite answered by versions 0, `first_version`, each `every`-th, and the last.

    suite: the split of its tasks. tasks: at most so many, in order of their ids. score: which verdict counts, one given
    turn by turn by its sum; 1.0 is correct. samples: answers per task; with several, pass@k is told for k = 1, 2, 4, … up
    to it, and temperature must be above 0, since greedy answers are all the same.

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
    after: Duration | Literal[""] = ""


class GateSuite(Section, frozen=True):
    """[master.gate.suites.<suite>]: what a candidate must show there.

    at_least: its share of right answers. max_drop: how much less than the stable version's it may be; suites are samples,
    so 0 holds back half of all candidates that are equally good.

    Example: GateSuite(at_least=0.8, max_drop=0.02)
    """

    at_least: Share = 0.0
    max_drop: Share = 0.02


class GuardConfig(Section, frozen=True):
    """[master.gate.guard]: when customers are taken back to the stable version before, by what they say of the answers,
    and by how many fail or are refused (what begins as a refusal: `[gateway] refusals`).

    harm: it is looked for that so much more of the rated answers (a share) are rated down. more_failed: and that so much
    more of all answers fail, or are refused. alpha: chance of ever taking back a version that is no worse. least: answers
    of the version before, rated ones for ratings, without which nothing is decided.

    Example: GuardConfig(harm=0.05, alpha=0.001)
    """

    harm: Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")] = 0.1
    alpha: Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")] = 0.01
    least: Positive = 50
    more_failed: Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")] = 0.05


class CanaryConfig(Section, frozen=True):
    """[master.gate.canary]: what passes the suites is first tried by a share of sessions ([gateway.canary]) and becomes the
    stable version by what people say of it, compared with what they say of the stable one meanwhile.

    odds: it is looked for that the odds of being rated down are so many times as high. alpha: chance of turning away a
    version that is no worse. beta: chance that the ratings let one through that is so much worse. enough: rated answers
    of each side after which a version is let through that looks rather no worse than so much worse. more_failed, least: as
    in [master.gate.guard]. While a trial runs no other begins: without ratings it waits for `headrace promote` or `rollback`.

    Example: CanaryConfig(odds=1.5, enough=1000)
    """

    odds: Annotated[float, msgspec.Meta(gt=1, description="a number above 1")] = 2.0
    alpha: Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")] = 0.01
    beta: Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")] = 0.05
    enough: Positive = 400
    more_failed: Annotated[float, msgspec.Meta(gt=0, lt=1, description="a number between 0 and 1")] = 0.05
    least: Positive = 50


class GateReplies(Section, frozen=True):
    """[master.gate.replies]: recorded production prompts (`headrace load prompts`), answered greedily by the candidate
    and compared with the stable version's answers to the same. It is one of [[master.evals]], whose score counts nothing.

    suite: its name. max_longer: how many times as long answers may be on average, and as short. max_failed: by how much
    more of the answers (a share) may be cut off, refused or out of form. max_distance: how far answers may be from the
    stable version's, 0 for the same words in the same order to 1 for none in common. refusals: regular expressions, looked
    for at an answer's beginning. form: what a whole answer must look like, "" for anything.

    Example: GateReplies(suite="production", form="[0-9]{3}")
    """

    suite: Name = "production"
    max_longer: Annotated[float, msgspec.Meta(ge=1, description="a number of 1 or more")] = 1.5
    max_failed: Share = 0.02
    max_distance: Share = 1.0
    refusals: tuple[str, ...] = REFUSALS
    form: str = ""

    def __post_init__(self) -> None:
        check_patterns("refusals", self.refusals)
        check_patterns("form", (self.form,))


class GateConfig(Section, frozen=True):
    """[master.gate]: when a version may be served to customers. suites: of [[master.evals]], by which it is judged; with
    none the stable channel moves by hand only (`headrace promote`). replies: compares answers to recorded prompts; guard:
    takes a version back that customers like less; canary: tries a version on a share of sessions first; none of them where
    its table is left out.

    Example: GateConfig(suites={"held-out": GateSuite(at_least=0.8)}, guard=GuardConfig())
    """

    suites: dict[str, GateSuite] = msgspec.field(default_factory=dict)
    replies: GateReplies | None = None
    guard: GuardConfig | None = None
    canary: CanaryConfig | None = None


class MasterConfig(Section, frozen=True):
    """[master]: what is issued, how it is sampled, and what is evaluated.

    first_version: no group is issued before this policy version is published (the end of a warm-up). num_episodes: of a
    group. max_tokens: of a turn. ramp_groups: after so many groups `easy_to_hard` draws from all tasks. floor, cap: least
    and largest weight of a task under `success` and `variance`, before its own priority. eval_lead: evals are requested so many
    versions ahead, since an engine cannot go back. gate: what a version must show before customers are served it.
    drain: the longest wait after the stop.

    Example: MasterConfig(num_episodes=16, max_tokens=5, evals=(EvalSuite(suite="held-out"),))
    """

    curriculum: CurriculumKind = "uniform"
    seed: int = 0
    split: str = "train"
    num_episodes: Positive = 8
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

    def __post_init__(self) -> None:
        known = sorted(one.suite for one in self.evals)
        asked = {*self.gate.suites, *((self.gate.replies.suite,) if self.gate.replies else ())}
        if unknown := sorted(asked - set(known)):
            raise ValueError(
                f"gate: got suite {unknown[0]}, expected one of evals: {', '.join(known) or 'there are none'}"
            )
        if not self.floor <= self.cap or not self.cap:
            raise ValueError(f"got floor = {self.floor} and cap = {self.cap}, expected floor <= cap, and cap above 0")


class ExploreConfig(Section, frozen=True):
    """[explore]: how an explorer runs what it takes.

    workflow, options: for tasks that name none. workflows: others, by the name that a task's `workflow` gives them, each
    with its options; a task that names another one is dropped as "unknown workflow". episodes_in_flight: sampled at once.
    max_held: tasks taken and not yet started; past it nothing more is read. linger_s: finished episodes wait at most so
    long for the rest of their group.
    episode_timeout_s: then the episode has failed. eval_hold_s: the longest a reload waits for evals of the version it
    would replace. drain_s: at a stop, how long running groups may take to finish.

    Example: ExploreConfig(episodes_in_flight=512, linger_s=0.5)
    """

    workflow: UsePath = CONVERSE
    options: Table = msgspec.field(default_factory=dict)
    workflows: dict[str, Use] = msgspec.field(default_factory=dict)
    episodes_in_flight: Positive = 1024
    max_held: Positive = 4096
    linger_s: Seconds = 1.0
    episode_timeout_s: Seconds = 600.0
    eval_hold_s: Seconds = 15.0
    drain_s: Seconds = 10.0
    report_s: Seconds = 2.0


def check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Raises ValueError for one that is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}: got {pattern!r}, expected a regular expression: {error}") from error


def any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """What matches where one of them does, in whatever case."""
    return re.compile("|".join(f"(?:{one})" for one in patterns), re.IGNORECASE)
