"""Settings of the stream workers: feedback sources, processors, scores, reward, and the built-in chain of each stage.

Guarantee: every default step of a stage is a field here.
"""

from typing import Annotated, Any, Literal

import msgspec

from infra.chain.insert import MAX_STEP_S, ProcessorConfig
from infra.chain.redact import KINDS, Kind
from infra.settings.config import Duration, Name, NonNegative, Positive, Seconds, Section, UsePath
from infra.settings.outside import checked_url

Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a share from 0 to 1")]
StepSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_STEP_S, description="seconds above 0, at most 110")]
Weight = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6, description="a weight")]
Options = dict[str, Any]
FEEDBACK_PATH = "/v1/feedback"


class LangfuseConfig(Section, frozen=True):
    """[feedback.from.langfuse]: Langfuse scores as feedback, polled through version 3 of its API (self-hosted: release 3.179 or
    newer).

    Example: LangfuseConfig(score="user-feedback")
    """

    score: Annotated[str, msgspec.Meta(min_length=1, description="the name of a score")]
    """Name of the Langfuse score to read."""
    url: str = "https://cloud.langfuse.com"
    """Base URL of Langfuse."""
    public_key_env: str = "LANGFUSE_PUBLIC_KEY"
    """Environment variable, at the stream workers, with the project's public key."""
    secret_key_env: str = "LANGFUSE_SECRET_KEY"
    """Environment variable, at the stream workers, with the project's secret key."""
    public_key_file: str = ""
    """File with the public key, relative to the TOML, in place of the variable. Default "": the variable."""
    secret_key_file: str = ""
    """File with the secret key, relative to the TOML, in place of the variable. Default "": the variable."""
    every: Duration = "30s"
    """Pause between two polls."""
    since: Duration = "24h"
    """Age of the oldest scores that the first poll reads."""
    overlap: Duration = "1h"
    """Maximum delay between a score's timestamp and its appearance or change, within which it still counts."""

    def __post_init__(self) -> None:
        checked_url(self.url)


class From(Section, frozen=True):
    """[feedback.from]: origin of a source's events. Set exactly one of topic, file, webhook and langfuse.

    Example: From(topic="zendesk.closed")
    """

    topic: str = ""
    """Full name of a Kafka topic with JSON values."""
    file: str = ""
    """Path of a growing JSONL file, relative to the TOML."""
    webhook: str = ""
    """Webhook path at the gateway, such as "/zendesk". "/v1/feedback": feedback of the gateway's clients, with their API
    keys."""
    secret_env: str = ""
    """Environment variable, at the gateway, with the webhook's signing secret (HMAC-SHA256)."""
    secret_file: str = ""
    """File with the signing secret, relative to the TOML, in place of the variable. Default "": the variable."""
    signature_header: str = "x-signature"
    """HTTP header with the webhook's signature."""
    timestamp_header: str = ""
    """HTTP header with a timestamp that is signed in front of the body; the sender defines its name. Default "": none. Without
    it, anyone who saw a signed body can replay it; gateway and stream worker recognize the newest 65,536 bodies."""
    tenant: str = ""
    """Tenant whose answers the webhook may name. Default "": all tenants."""
    langfuse: LangfuseConfig | None = None
    """Langfuse project to poll."""
    otlp: bool = False
    """Whether an OpenTelemetry collector writes the topic, as `otlp_json`. Each log record of a message is an event."""

    def __post_init__(self) -> None:
        if self.otlp and not self.topic:
            raise ValueError('got otlp = true without topic = "…", expected the topic that a collector writes')
        if (given := sum(map(bool, (self.topic, self.file, self.webhook, self.langfuse)))) != 1:
            kinds = 'topic = "…", file = "…", webhook = "/…" and langfuse = {…}'
            raise ValueError(f"got {given} of {kinds}, expected one of them")
        if self.webhook and not self.webhook.startswith("/"):
            raise ValueError(f'got webhook = "{self.webhook}", expected a path such as "/zendesk"')
        own = self.webhook == FEEDBACK_PATH
        if self.webhook.startswith(("/v1/", "/healthz", "/metrics")) and not own:
            raise ValueError(f'got webhook = "{self.webhook}", which is the gateway\'s own; expected another path')
        if self.webhook and bool(self.secret_env or self.secret_file) == own:
            raise ValueError(
                'a webhook needs secret_env = "NAME" of a variable or secret_file; "/v1/feedback" has keys'
            )


class FeedbackConfig(Section, frozen=True):
    """[[feedback]]: feedback source. Its values become `scores.<name>`.

    Example: FeedbackConfig(name="csat", use="support:csat", from_=From(topic="zendesk.closed"), window="24h")
    """

    name: Name
    """Name of the source and of its score."""
    use: UsePath
    """A @feedback function, as `module:name`."""
    from_: From = msgspec.field(name="from")
    """Origin of the source's events."""
    options: Options = msgspec.field(default_factory=dict)
    window: Duration = "24h"
    """Time after the answer in which collect waits for this source and always counts its feedback. After a restart of
    `process`, a changed window or a removed source also applies to waiting answers."""
    default: Literal["unlabelled"] | float = "unlabelled"
    """Score of an answer that has no feedback when the window closes. Default "unlabelled": no score."""
    late: Literal["drop", "amend", "retrain"] = "amend"
    """Effect of feedback after the window that changes the verdict. "drop": headrace only counts it. "amend": it replaces
    copies that were not drawn yet; a trained copy stays. "retrain": the trainer trains the answer again in lane human, once per
    verdict, instead of a copy that was not drawn yet; not if the loss of lane human takes pairs. [collect] revisions and
    retrainings limit the number."""
    discount: Share = 0.0
    """Discount γ per turn between an answer and a later rated turn of its session. The earlier answer gets the later rating's
    excess over the baseline, times γ per turn, as credit for learning; the gate does not count it. 0: no credit."""


class ScoreConfig(Section, frozen=True):
    """[[score]]: verdict on every experience except demonstrations, computed in verify and recorded in `scores.<name>`.

    Example: ScoreConfig(name="exact", use="streams.scores.exact:exact")
    """

    name: Name
    """Name of the score."""
    use: UsePath
    """A @score function, as `module:name`."""
    options: Options = msgspec.field(default_factory=dict)
    timeout_s: StepSeconds = 10.0
    """Maximum seconds of a call; after them verify drops the experience as "score timed out"."""


class RewardConfig(Section, frozen=True):
    """[reward]: reward of an episode, computed in collect after feedback.

    Example: RewardConfig(blend={"csat": 1.0, "judge": 0.3, "overlong": -0.5}, require=("csat",))
    """

    blend: dict[str, Weight] = msgspec.field(default_factory=dict)
    """Weight of each score. The reward is Σ w · s divided by the sum of the positive weights; a negative weight is a
    penalty. If a score is absent, the other weights are renormalized. Default {}: all scores with equal weights."""
    use: str = ""
    """A @score function in place of a blend, as `module:name`. Default "": none."""
    options: Options = msgspec.field(default_factory=dict)
    require: tuple[str, ...] = ()
    """Required scores; an experience without one of them is dropped as unlabelled."""
    discount: Share = 1.0
    """Discount γ per turn of scores that an environment gives turn by turn; the reward uses their discounted sum."""
    timeout_s: Seconds = 10.0
    """Maximum seconds of a call of `use`."""

    def __post_init__(self) -> None:
        if self.use and self.blend:
            raise ValueError("got use and blend, expected one of them")
        if 0.0 in self.blend.values() or (self.blend and max(self.blend.values()) < 0):
            raise ValueError(f"blend: got {self.blend}, expected weights other than 0, at least one above 0")


class Switch(Section, frozen=True):
    """Built-in step without further settings."""

    on: bool = True


class RedactConfig(Section, frozen=True):
    """[verify.redact]: handling of personal data in experiences. Feedback sources mask texts by these patterns even if this
    is off.

    Example: RedactConfig(on=True, patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = False
    kinds: tuple[Kind, ...] = KINDS
    """Built-in patterns: email, card, phone, key, iban, ssn."""
    patterns: dict[str, str] = msgspec.field(default_factory=dict)
    """Your own patterns, from name to regular expression."""
    action: Literal["drop", "mask"] = "drop"
    """Effect of a match. "drop" drops the experience. "mask" masks the text but keeps the sampled token ids, so training does
    not change."""


class DedupeConfig(Section, frozen=True):
    """[verify.dedupe]: drop of experiences that were delivered before.

    Example: DedupeConfig(memory=100_000)
    """

    on: bool = True
    memory: Positive = 65_536
    """Number of ids kept per partition."""


class FilterConfig(Section, frozen=True):
    """[verify.filter]: drop of answers by length and repetition. Eval answers pass, because they are not trained.

    Example: FilterConfig(min_tokens=8, truncated="drop")
    """

    on: bool = True
    min_tokens: NonNegative = 0
    """Minimum sampled tokens. 0 for no limit."""
    max_tokens: NonNegative = 0
    """Maximum sampled tokens. 0 for no limit."""
    max_repetition: Share = 0.9
    """Maximum share of repeated 16-token windows in an answer of 64 tokens or more. 1 for no limit."""
    truncated: Literal["keep", "drop"] = "keep"
    """Handling of answers that were cut off."""


class TeacherConfig(Section, frozen=True):
    """[verify.teacher]: OpenAI-compatible endpoint of a stronger model, which returns its log-probability of each sampled token
    for the loss distill. The endpoint must support `prompt_logprobs` (vLLM), and its model must have the policy's tokenizer. An
    experience that the teacher cannot judge is dropped with a reason.

    Example: TeacherConfig(url="http://teacher:8000/v1", model="Qwen/Qwen3-8B")
    """

    url: str
    """Base URL of the endpoint, including /v1."""
    model: str
    """Model name at the endpoint."""
    api_key_env: str = ""
    """Environment variable, at the stream workers, with the endpoint's key. Default "": no key."""
    deadline_s: StepSeconds = 60.0
    """Maximum seconds per experience, over all requests and waits; after them it is dropped as "teacher unavailable"."""
    attempts: Positive = 4
    """Maximum requests per experience."""

    def __post_init__(self) -> None:
        checked_url(self.url)


class VerifyConfig(Section, frozen=True):
    """[verify]: chain of the stage verify: validate, redact, dedupe, filter, the scores, the teacher."""

    validate: Switch = Switch()
    redact: RedactConfig = RedactConfig()
    dedupe: DedupeConfig = DedupeConfig()
    filter: FilterConfig = FilterConfig()
    teacher: TeacherConfig | None = None


class AdvantageConfig(Section, frozen=True):
    """[collect.advantage]: advantages of the episodes of a group. The advantage of a lone answer, or of the only rated
    choice of a request, is relative to a running baseline of its tenant and lane, shrunk while few answers are known and
    clipped to ±5 (`streams.processors.advantage` states the assumptions).

    Example: AdvantageConfig(kind="leave_one_out")
    """

    on: bool = True
    kind: Literal["group", "mean", "leave_one_out"] = "group"
    """Estimator. "group": (reward - mean) / (std + epsilon) over the group's episodes. "mean": reward - mean.
    "leave_one_out": reward minus the mean of the others."""
    epsilon: Annotated[float, msgspec.Meta(gt=0, description="a small number above 0")] = 1e-4
    """Constant added to the std in the denominator."""
    turns: str = ""
    """Score that an environment gives turn by turn, from which each turn gets its own advantage. Default "": one advantage per
    episode. Not with leave_one_out."""

    def __post_init__(self) -> None:
        if self.turns and self.kind == "leave_one_out":
            raise ValueError(f'got turns = "{self.turns}" with kind = "leave_one_out", expected kind "group" or "mean"')


class SynthesizeConfig(Section, frozen=True):
    """[collect.synthesize]: copy of a group's best episode as a demonstration (lane expert).

    Example: SynthesizeConfig(on=True, min_reward=1.0)
    """

    on: bool = False
    min_reward: float = 1.0
    """Minimum reward of an episode that becomes a demonstration."""


class CorrectConfig(Section, frozen=True):
    """[collect.correct]: conversion of an edited answer into a demonstration (lane expert) and a preference pair (lane human),
    the edit preferred to the answer. [verify.redact], if on, masks the edit.

    Example: CorrectConfig(on=True)
    """

    on: bool = False
    """Whether the step runs. Stream workers then need the folder `policy.model`, for its tokenizer."""


class LimitsConfig(Section, frozen=True):
    """[collect.limits]: limits on the answers that a rater or a tenant affects by feedback per UTC day of log time, counted per
    partition. Feedback above a limit is ignored for learning and as a rating, and counted as "over a
    rater's daily limit" or "over a tenant's daily limit".

    Example: LimitsConfig(rater_answers=5_000)
    """

    rater_answers: NonNegative = 500
    """Maximum answers per day that a named rater affects, or `rater_share` of all affected answers if that is more."""
    rater_share: Share = 0.1
    """Maximum share of all affected answers per named rater. 1 for no limit."""
    tenant_answers: NonNegative = 10_000
    """Maximum answers per day that a tenant affects, over its raters and its feedback without a rater, or `tenant_share` of all
    affected answers if that is more. No limit if no other tenant sent feedback that day or the day before."""
    tenant_share: Share = 0.5
    """Maximum share of all affected answers per tenant. 1 for no limit."""


class CollectConfig(Section, frozen=True):
    """[collect]: chain of the stage collect over complete groups: correct, reward, synthesize, advantage, difficulty,
    prioritize.

    Example: CollectConfig(deadline_s=120)
    """

    deadline_s: Seconds = 3900.0
    """Seconds after a group's first record at which the group closes even if it is incomplete. Set it above
    `explore.episode_timeout_s`; otherwise slow episodes are left out."""
    revisions: Positive = 16
    """Maximum revisions of a closed group by feedback on its answers, and as many by credit from later turns. Further feedback
    is counted as "revised often enough"; retractions always apply."""
    retrainings: NonNegative = 2
    """Maximum retrainings of an answer under late = "retrain". Further verdicts are counted as "retrained often enough" and
    change only the copy that was not drawn yet."""
    session_s: Annotated[float, msgspec.Meta(ge=0, description="a number of seconds, 0 or more")] = 300.0
    """Seconds without a new turn after which a session closes and its ready turns are trained as a single sequence. 0: the
    trainer trains each turn separately and computes its prefix again. The header `x-session-end` ends a session sooner."""
    session_turns: Positive = 65_536
    """Maximum turns per partition that wait for their session. Above it, the oldest sessions close early; the metric
    `sessions_closed_early` counts them."""
    snapshot_s: Seconds = 600.0
    """Seconds between two snapshots of a partition's state in the store, from which a worker on another machine continues.
    A shorter time costs more writes, a longer time a longer start."""
    snapshot_records: Positive = 100_000
    """Maximum records of a partition between two snapshots."""
    limits: LimitsConfig = LimitsConfig()
    correct: CorrectConfig = CorrectConfig()
    synthesize: SynthesizeConfig = SynthesizeConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    difficulty: Switch = Switch()
    """Drop of groups of two or more episodes with equal rewards, whose advantages are all 0."""
    prioritize: Switch = Switch()


class TaskDedupeConfig(Section, frozen=True):
    """[tasks.dedupe]: drop of tasks with the same question as an earlier task.

    Example: TaskDedupeConfig(by="task")
    """

    on: bool = True
    by: Literal["question", "task"] = "question"
    """Key of the comparison. "question": the question. "task": the whole task without its id, for environments whose prompts
    are all the same."""
    memory: Positive = 1_000_000
    """Number of tasks kept."""


class TaskFilterConfig(Section, frozen=True):
    """[tasks.filter]: drop of incomplete, long and unverifiable tasks.

    Example: TaskFilterConfig(require=("answer",), scores=("math",))
    """

    on: bool = True
    require: tuple[str, ...] = ()
    """Fields that every task must have: answer, difficulty, parent, meta.<name>."""
    workflows: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Additional required fields, by workflow name."""
    max_chars: NonNegative = 0
    """Maximum characters of all messages of a task. 0 for no limit."""
    scores: tuple[str, ...] = ()
    """Names of [[score]] tables. A task is dropped unless each gives its reference answer 1.0."""


class DifficultyConfig(Section, frozen=True):
    """[tasks.difficulty]: drop of training tasks by difficulty, 1 minus the success rate.

    Example: DifficultyConfig(field="pass_rate", easiest=0.1)
    """

    on: bool = True
    field: str = "success_rate"
    """Key of a task's meta with its success rate."""
    easiest: Share = 0.0
    """Minimum difficulty of a training task."""
    hardest: Share = 1.0
    """Maximum difficulty of a training task."""


class TasksConfig(Section, frozen=True):
    """[tasks]: chain of the stage tasks: clean, dedupe, filter, difficulty."""

    clean: Switch = Switch()
    dedupe: TaskDedupeConfig = TaskDedupeConfig()
    filter: TaskFilterConfig = TaskFilterConfig()
    difficulty: DifficultyConfig = DifficultyConfig()


class StreamsConfig(Section, frozen=True):
    """The tables of the stream workers, as in the root of the TOML."""

    feedback: tuple[FeedbackConfig, ...] = ()
    processor: tuple[ProcessorConfig, ...] = ()
    score: tuple[ScoreConfig, ...] = ()
    reward: RewardConfig = RewardConfig()
    tasks: TasksConfig = TasksConfig()
    verify: VerifyConfig = VerifyConfig()
    collect: CollectConfig = CollectConfig()
