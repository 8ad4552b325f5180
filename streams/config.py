"""Settings of the streams wing: feedback sources, processors, scores, reward, and the built-in chain of each stage.

Guarantee: everything a stage does by default is a field here with its default; each table is documented by its struct.
"""

from typing import Annotated, Any, Literal

import msgspec

from infra.config import Duration, Name, NonNegative, Positive, Seconds, Section, UsePath

Stage = Literal["verify", "collect"]
Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a share from 0 to 1")]
Weight = Annotated[float, msgspec.Meta(gt=0, description="a weight above 0")]
Options = dict[str, Any]


class From(Section, frozen=True):
    """Where a feedback source listens: exactly one of them.

    topic: full name of any Kafka topic with JSON values. file: path of a JSONL file that grows, relative to the TOML.

    Example: From(topic="zendesk.closed")
    """

    topic: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        if bool(self.topic) == bool(self.file):
            raise ValueError('got both or neither, expected one of topic = "…" and file = "…"')


class FeedbackConfig(Section, frozen=True):
    """[[feedback]]. Its values become `scores.<name>`.

    use: a @feedback function. window: how long collect waits for it after the answer. default: value where none came;
    "unlabelled" leaves the score absent. late: what feedback after the window does: drop it, amend copies that were not
    drawn yet, or retrain (again, in the human lane).

    Example: FeedbackConfig(name="csat", use="support:csat", from_=From(topic="zendesk.closed"), window="24h")
    """

    name: Name
    use: UsePath
    from_: From = msgspec.field(name="from")
    options: Options = msgspec.field(default_factory=dict)
    window: Duration = "24h"
    default: Literal["unlabelled"] | float = "unlabelled"
    late: Literal["drop", "amend", "retrain"] = "amend"


class ProcessorConfig(Section, frozen=True):
    """[[processor]]: inserted into the built-in chain of a stage, never replaces it.

    name: in stamps and metrics, "" takes the function's. after, before: the step next to it, at most one; neither:
    before the scores in verify, at the end in collect. timeout_s: of one call.

    Example: ProcessorConfig(use="support:not_trivial", stage="verify", after="validate")
    """

    use: UsePath
    stage: Stage = "verify"
    name: str = ""
    options: Options = msgspec.field(default_factory=dict)
    after: str = ""
    before: str = ""
    timeout_s: Seconds = 10.0

    def __post_init__(self) -> None:
        if self.after and self.before:
            raise ValueError(f'got after = "{self.after}" and before = "{self.before}", expected one of them')


class ScoreConfig(Section, frozen=True):
    """[[score]]: runs in verify on all but demonstrations; its verdict is recorded in `scores.<name>`.

    Example: ScoreConfig(name="exact", use="streams.scores.exact:exact")
    """

    name: Name
    use: UsePath
    options: Options = msgspec.field(default_factory=dict)
    timeout_s: Seconds = 10.0


class RewardConfig(Section, frozen=True):
    """[reward]: runs in collect, after feedback. blend: score to weight; weights of absent scores go to the others;
    empty takes every score alike. use: a @score function instead of a blend. require: without these scores an
    experience is unlabelled and dropped.

    Example: RewardConfig(blend={"csat": 1.0, "judge": 0.3}, require=("csat",))
    """

    blend: dict[str, Weight] = msgspec.field(default_factory=dict)
    use: str = ""
    options: Options = msgspec.field(default_factory=dict)
    require: tuple[str, ...] = ()
    timeout_s: Seconds = 10.0

    def __post_init__(self) -> None:
        if self.use and self.blend:
            raise ValueError("got use and blend, expected one of them")


class Switch(Section, frozen=True):
    """A built-in that has no settings. on: false takes it out of the chain."""

    on: bool = True


class RedactConfig(Section, frozen=True):
    """[verify.redact]. kinds: built-in patterns (email, card, phone, key). patterns: your own, name to regular
    expression. action: drop the experience, or mask the text (its token ids stay as sampled, so what is learned does
    not change).

    Example: RedactConfig(on=True, patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = False
    kinds: tuple[Literal["email", "card", "phone", "key"], ...] = ("email", "card", "phone", "key")
    patterns: dict[str, str] = msgspec.field(default_factory=dict)
    action: Literal["drop", "mask"] = "drop"


class DedupeConfig(Section, frozen=True):
    """[verify.dedupe]. memory: ids remembered per partition.

    Example: DedupeConfig(memory=100_000)
    """

    on: bool = True
    memory: Positive = 65_536


class FilterConfig(Section, frozen=True):
    """[verify.filter]. min_tokens, max_tokens: of what was sampled; 0 is no limit. max_repetition: share of repeated
    16-token windows above which an answer of 64 tokens or more is a loop. truncated: what cut-off answers get.
    Answers to evals pass: they are counted, not trained.

    Example: FilterConfig(min_tokens=8, truncated="drop")
    """

    on: bool = True
    min_tokens: NonNegative = 0
    max_tokens: NonNegative = 0
    max_repetition: Share = 0.9
    truncated: Literal["keep", "drop"] = "keep"


class VerifyConfig(Section, frozen=True):
    """[verify]: validate, redact, dedupe, filter, then the scores.

    Example: VerifyConfig(dedupe=DedupeConfig(on=False))
    """

    validate: Switch = Switch()
    redact: RedactConfig = RedactConfig()
    dedupe: DedupeConfig = DedupeConfig()
    filter: FilterConfig = FilterConfig()


class AdvantageConfig(Section, frozen=True):
    """[collect.advantage]. kind: group: (reward - mean) / (std + epsilon) over the group's episodes; leave_one_out:
    reward minus the mean of the others. Lone answers take a running baseline per tenant and origin either way.

    Example: AdvantageConfig(kind="leave_one_out")
    """

    on: bool = True
    kind: Literal["group", "leave_one_out"] = "group"
    epsilon: Annotated[float, msgspec.Meta(gt=0, description="a small number above 0")] = 1e-4


class SynthesizeConfig(Section, frozen=True):
    """[collect.synthesize]: the best episode of a group, once more as a demonstration. min_reward: from there on.

    Example: SynthesizeConfig(on=True, min_reward=1.0)
    """

    on: bool = False
    min_reward: float = 1.0


class CollectConfig(Section, frozen=True):
    """[collect]: reward, synthesize, advantage, difficulty, prioritize, over a whole group.

    deadline_s: a group is closed so long after its first record, whoever is missing. difficulty: drop groups of two and
    more episodes with all rewards equal, from which no advantage can be taken.

    Example: CollectConfig(deadline_s=120)
    """

    deadline_s: Seconds = 300.0
    synthesize: SynthesizeConfig = SynthesizeConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    difficulty: Switch = Switch()
    prioritize: Switch = Switch()


class StreamsConfig(Section, frozen=True):
    """The tables of the streams wing, as the root of the TOML holds them.

    Example: StreamsConfig(score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),))
    """

    feedback: tuple[FeedbackConfig, ...] = ()
    processor: tuple[ProcessorConfig, ...] = ()
    score: tuple[ScoreConfig, ...] = ()
    reward: RewardConfig = RewardConfig()
    verify: VerifyConfig = VerifyConfig()
    collect: CollectConfig = CollectConfig()
