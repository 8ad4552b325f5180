"""Settings of the actors: the [explore] and [master] tables of the TOML."""

from typing import Annotated, Literal

import msgspec

from infra.config import Duration, Name, NonNegative, Positive, Seconds, Section, Table, UsePath

CurriculumKind = Literal["uniform", "easy_to_hard", "success"]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0, description="a number from 0 to 1")]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, description="a temperature, 0 or above")]

CONVERSE = "actors.workflows.converse:converse"


class EvalSuite(Section, frozen=True):
    """[[master.evals]]: a suite answered greedily by versions 0, `first_version`, each `every`-th, and the last.

    suite: the split of its tasks. tasks: at most so many, in order of their ids. score: which verdict counts; 1.0 is
    correct.

    Example: EvalSuite(suite="held-out", every=10, tasks=500)
    """

    suite: Name
    every: Positive = 10
    tasks: Positive = 500
    score: str = "exact"


class StopRule(Section, frozen=True):
    """[master.stop]: when issuing ends; whichever comes first. Then what is outstanding drains and the last version is
    evaluated.

    suite, at: this suite's accuracy reached `at`. versions: so many were published (0: no limit). groups: so many were
    issued (0: no limit). after: so long after the first group was issued ("" for no limit).

    Example: StopRule(suite="dev", at=0.93, after="5m")
    """

    suite: str = ""
    at: Share = 1.0
    versions: NonNegative = 0
    groups: NonNegative = 0
    after: Duration | Literal[""] = ""


class MasterConfig(Section, frozen=True):
    """[master]: what is issued, how it is sampled, and what is evaluated.

    first_version: no group is issued before this policy version is published (the end of a warm-up). num_episodes: of a
    group. max_tokens: of a turn. ramp_groups: after so many groups `easy_to_hard` draws from all tasks. eval_lead:
    evals are requested so many versions ahead, since an engine cannot go back. drain: the longest wait after the stop.

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
    evals: tuple[EvalSuite, ...] = ()
    eval_lead: NonNegative = 3
    stop: StopRule = StopRule()
    drain: Duration = "60s"
    report_s: Seconds = 2.0


class ExploreConfig(Section, frozen=True):
    """[explore]: how an explorer runs what it takes.

    workflow, options: for tasks that name none. episodes_in_flight: sampled at once. max_held: tasks taken and not yet
    started; past it nothing more is read. linger_s: finished episodes wait at most so long for the rest of their group.
    episode_timeout_s: then the episode has failed. eval_hold_s: the longest a reload waits for evals of the version it
    would replace. drain_s: at a stop, how long running groups may take to finish.

    Example: ExploreConfig(episodes_in_flight=512, linger_s=0.5)
    """

    workflow: UsePath = CONVERSE
    options: Table = msgspec.field(default_factory=dict)
    episodes_in_flight: Positive = 1024
    max_held: Positive = 4096
    linger_s: Seconds = 1.0
    episode_timeout_s: Seconds = 600.0
    eval_hold_s: Seconds = 15.0
    drain_s: Seconds = 10.0
    report_s: Seconds = 2.0
