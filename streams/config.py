"""Settings of the streams wing: feedback sources, processors, scores, reward, and the built-in chain of each stage.

Guarantee: everything that a stage does by default is a field here with its default.
"""

from typing import Annotated, Any, Literal

import msgspec

from infra.chain.insert import ProcessorConfig
from infra.chain.redact import KINDS, Kind
from infra.settings.config import Duration, Name, NonNegative, Positive, Seconds, Section, UsePath
from infra.settings.outside import checked_url

Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a share from 0 to 1")]
Weight = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6, description="a weight")]
Options = dict[str, Any]
FEEDBACK_PATH = "/v1/feedback"
QUESTION = "{question}"  # its place in a template


class LangfuseConfig(Section, frozen=True):
    """[feedback.from.langfuse]: scores of Langfuse as feedback, read through version 3 of its API (self-hosted: release 3.179
    or newer).

    Example: LangfuseConfig(score="user-feedback")
    """

    score: Annotated[str, msgspec.Meta(min_length=1, description="the name of a score")]
    """Name of the scores to read."""
    url: str = "https://cloud.langfuse.com"
    """Base URL of Langfuse."""
    public_key_env: str = "LANGFUSE_PUBLIC_KEY"
    """Environment variable of the stream workers with the public key of the project."""
    secret_key_env: str = "LANGFUSE_SECRET_KEY"
    """Environment variable of the stream workers with the secret key of the project."""
    public_key_file: str = ""
    """File that holds the public key instead, relative to the TOML. "" for none."""
    secret_key_file: str = ""
    """File that holds the secret key instead, relative to the TOML. "" for none."""
    every: Duration = "30s"
    """Pause between two polls."""
    since: Duration = "24h"
    """Age of the oldest scores that the first poll reads."""
    overlap: Duration = "1h"
    """Delay after its own timestamp within which a score that appears or changes still counts."""

    def __post_init__(self) -> None:
        checked_url(self.url)


class From(Section, frozen=True):
    """[feedback.from]: exactly one place where a feedback source listens: topic, file, webhook or langfuse.

    Example: From(topic="zendesk.closed")
    """

    topic: str = ""
    """Full name of a Kafka topic with JSON values."""
    file: str = ""
    """Path of a JSONL file that grows, relative to the TOML."""
    webhook: str = ""
    """Path at the gateway, such as "/zendesk". "/v1/feedback" takes what clients of the gateway send with their keys."""
    secret_env: str = ""
    """Environment variable of the gateway with the secret that signs the webhook (HMAC-SHA256)."""
    secret_file: str = ""
    """File that holds the secret instead, relative to the TOML. "" for none."""
    signature_header: str = "x-signature"
    """HTTP header with the signature."""
    timestamp_header: str = ""
    """HTTP header with a timestamp that is signed in front of the body; its name depends on the sender. "" for none: anyone
    who saw a signed body can then send it again, and gateway and stream worker recognize the newest 65,536 bodies."""
    tenant: str = ""
    """Tenant whose answers the webhook may name. "" for all tenants."""
    langfuse: LangfuseConfig | None = None
    """Table of a Langfuse project to poll."""
    otlp: bool = False
    """Whether a collector of OpenTelemetry writes the topic, as `otlp_json`. Each log record of a message is an event."""

    def __post_init__(self) -> None:
        if self.otlp and not self.topic:
            raise ValueError('got otlp = true without topic = "…", expected the topic that a collector writes')
        if (given := sum(map(bool, (self.topic, self.file, self.webhook, self.langfuse)))) != 1:
            kinds = 'topic = "…", file = "…", webhook = "/…" and langfuse = {…}'
            raise ValueError(f"got {given} of {kinds}, expected one of them")
        if self.webhook and not self.webhook.startswith("/"):
            raise ValueError(f'got webhook = "{self.webhook}", expected a path such as "/zendesk"')
        own = self.webhook == FEEDBACK_PATH
        if self.webhook.startswith(("/v1/", "/healthz", "/metrics", "/openapi.json")) and not own:
            raise ValueError(f'got webhook = "{self.webhook}", which is the gateway\'s own; expected another path')
        if self.webhook and bool(self.secret_env or self.secret_file) == own:
            raise ValueError(
                'a webhook needs secret_env = "NAME" of a variable or secret_file; "/v1/feedback" has keys'
            )


class FeedbackConfig(Section, frozen=True):
    """[[feedback]]: a source of feedback. Its values become `scores.<name>`.

    Example: FeedbackConfig(name="csat", use="support:csat", from_=From(topic="zendesk.closed"), window="24h")
    """

    name: Name
    """Name of the score."""
    use: UsePath
    """A @feedback function, as `module:name`."""
    from_: From = msgspec.field(name="from")
    """Table of the place where the source listens."""
    options: Options = msgspec.field(default_factory=dict)
    window: Duration = "24h"
    """Time after the answer for which collect waits for the source, and within which its feedback always counts. A changed
    window, or a source less, holds for waiting answers too once `process` is started again."""
    default: Literal["unlabelled"] | float = "unlabelled"
    """Score of an answer without feedback when the window closes. "unlabelled" leaves the score absent."""
    late: Literal["drop", "amend", "retrain"] = "amend"
    """Effect of feedback after the window that changes the verdict. "drop" only counts it. "amend" replaces copies that were
    not drawn yet; a trained copy stays. "retrain" trains the answer again in lane human, once for each verdict, instead of
    a copy that was not drawn yet; not for a lane human whose loss takes pairs. [collect] revisions and retrainings bound
    how often."""
    discount: Share = 0.0
    """Discount γ for each turn of a session between an answer and a later rated turn: the earlier answer is credited with how
    much better than usual the later turn was rated. The credit is for learning alone and is no rating. 0 credits the named
    answer alone."""


class ScoreConfig(Section, frozen=True):
    """[[score]]: a verdict on all but demonstrations, given in verify and recorded in `scores.<name>`.

    Example: ScoreConfig(name="exact", use="streams.scores.exact:exact")
    """

    name: Name
    """Name of the verdict."""
    use: UsePath
    """A @score function, as `module:name`."""
    options: Options = msgspec.field(default_factory=dict)
    timeout_s: Seconds = 10.0
    """Seconds of one call; a later verdict is absent."""


class RewardConfig(Section, frozen=True):
    """[reward]: the reward of an episode, computed in collect after feedback.

    Example: RewardConfig(blend={"csat": 1.0, "judge": 0.3, "overlong": -0.5}, require=("csat",))
    """

    blend: dict[str, Weight] = msgspec.field(default_factory=dict)
    """Weight of each score; the reward is Σ w · s over the sum of the weights above 0. A weight below 0 makes a penalty. The
    weights of absent scores go to the others. Empty takes every score alike."""
    use: str = ""
    """A @score function instead of a blend, as `module:name`. "" for none."""
    options: Options = msgspec.field(default_factory=dict)
    require: tuple[str, ...] = ()
    """Scores without which an experience is dropped as unlabelled."""
    discount: Share = 1.0
    """Discount γ for each turn of scores given turn by turn, whose discounted sum counts."""
    timeout_s: Seconds = 10.0
    """Seconds of one call of `use`."""

    def __post_init__(self) -> None:
        if self.use and self.blend:
            raise ValueError("got use and blend, expected one of them")
        if 0.0 in self.blend.values() or (self.blend and max(self.blend.values()) < 0):
            raise ValueError(
                f"blend: got {self.blend}, expected no weight of 0, and one above 0: a penalty is no verdict"
            )


class Switch(Section, frozen=True):
    """A built-in that has no settings."""

    on: bool = True


class RedactConfig(Section, frozen=True):
    """[verify.redact]: personal data in experiences. Feedback sources mask texts by kinds and patterns, on or not.

    Example: RedactConfig(on=True, patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = False
    kinds: tuple[Kind, ...] = KINDS
    """Built-in patterns: email, card, phone, key, iban, ssn."""
    patterns: dict[str, str] = msgspec.field(default_factory=dict)
    """Patterns of your own: name to regular expression."""
    action: Literal["drop", "mask"] = "drop"
    """Effect of a match. "drop" drops the experience; "mask" masks the text, while the token ids stay as sampled, so that
    what is learned does not change."""


class DedupeConfig(Section, frozen=True):
    """[verify.dedupe]: drops experiences that were delivered before.

    Example: DedupeConfig(memory=100_000)
    """

    on: bool = True
    memory: Positive = 65_536
    """Ids that are remembered for each partition."""


class FilterConfig(Section, frozen=True):
    """[verify.filter]: drops answers by length and repetition. Answers to evals pass: they are counted, not trained.

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
    """Treatment of answers that were cut off."""


class TeacherConfig(Section, frozen=True):
    """[verify.teacher]: an OpenAI-compatible endpoint with a stronger model, which tells its log-probability of each token that
    the policy sampled. The loss distill needs it. The endpoint must know `prompt_logprobs` (vLLM, a gateway of headrace), and
    its model must have the policy's tokenizer. An experience that the teacher cannot judge is dropped with a reason.

    Example: TeacherConfig(url="http://teacher:8000/v1", model="Qwen/Qwen3-8B")
    """

    url: str
    """Base URL, up to and with /v1."""
    model: str
    """Model name at the endpoint."""
    api_key_env: str = ""
    """Environment variable of the stream workers with the endpoint's key. "" for no key."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=110, description="a number of seconds above 0, at most 110")] = (
        60.0
    )
    """Seconds for one experience, with all tries and waits; later it is dropped as "teacher unavailable"."""
    attempts: Positive = 4
    """Maximum requests for one experience."""

    def __post_init__(self) -> None:
        checked_url(self.url)


class VerifyConfig(Section, frozen=True):
    """[verify]: validate, redact, dedupe, filter, then the scores, then the teacher.

    Example: VerifyConfig(dedupe=DedupeConfig(on=False))
    """

    validate: Switch = Switch()
    redact: RedactConfig = RedactConfig()
    dedupe: DedupeConfig = DedupeConfig()
    filter: FilterConfig = FilterConfig()
    teacher: TeacherConfig | None = None


class AdvantageConfig(Section, frozen=True):
    """[collect.advantage]: advantages of the episodes of a group. A lone answer, and the only choice of several that was rated,
    is compared with a running baseline of its tenant and origin, shrunk while few answers are known and cut to ±5
    (`streams.processors.advantage` states the assumptions).

    Example: AdvantageConfig(kind="leave_one_out")
    """

    on: bool = True
    kind: Literal["group", "mean", "leave_one_out"] = "group"
    """Estimator. "group": (reward - mean) / (std + epsilon) over the group's episodes. "mean": reward - mean.
    "leave_one_out": reward minus the mean of the others."""
    epsilon: Annotated[float, msgspec.Meta(gt=0, description="a small number above 0")] = 1e-4
    """Number added to the std, so that the division stays finite."""
    turns: str = ""
    """Score given turn by turn (an environment's), by which each turn of a group has an advantage of its own. "" for one
    advantage of the episode. Not with leave_one_out."""

    def __post_init__(self) -> None:
        if self.turns and self.kind == "leave_one_out":
            raise ValueError(f'got turns = "{self.turns}" with kind = "leave_one_out", expected kind "group" or "mean"')


class SynthesizeConfig(Section, frozen=True):
    """[collect.synthesize]: the best episode of a group, once more as a demonstration.

    Example: SynthesizeConfig(on=True, min_reward=1.0)
    """

    on: bool = False
    min_reward: float = 1.0
    """Minimum reward of the episode."""


class CorrectConfig(Section, frozen=True):
    """[collect.correct]: an edited answer becomes a demonstration (lane expert), and the edit is preferred to the answer (a
    pair in lane human). Where [verify.redact] is on, it masks the edit.

    Example: CorrectConfig(on=True)
    """

    on: bool = False
    """Whether the step runs. It needs policy.model, for its tokenizer, where the stream workers run."""


class LimitsConfig(Section, frozen=True):
    """[collect.limits]: maximum answers that one rater and one tenant move by feedback, so that none alone decides what is
    learned. Each partition counts by itself, for each UTC day of log time. Feedback beyond a limit counts neither for
    learning nor as a rating, and is counted as "more from one rater than trains in a day" or "more from one tenant …".

    Example: LimitsConfig(rater_answers=5_000)
    """

    rater_answers: NonNegative = 500
    """Answers that a named rater moves in a day, or rater_share of all moved answers if that is more."""
    rater_share: Share = 0.1
    """Share of all moved answers that a named rater may reach. 1 for no limit."""
    tenant_answers: NonNegative = 10_000
    """Answers that a tenant moves in a day, its raters and its keys without a named rater together, or tenant_share of all
    moved answers if that is more. No limit while no other tenant's users gave feedback that day or the day before."""
    tenant_share: Share = 0.5
    """Share of all moved answers that a tenant may reach. 1 for no limit."""


class CollectConfig(Section, frozen=True):
    """[collect]: correct, reward, synthesize, advantage, difficulty, prioritize, over a whole group.

    Example: CollectConfig(deadline_s=120)
    """

    deadline_s: Seconds = 3900.0
    """Seconds after a group's first record at which it closes even without all its episodes. Above the longest episode
    (`explore.episode_timeout_s`), or slow episodes are left out."""
    revisions: Positive = 16
    """Maximum revisions of a closed group by feedback on its answers, and as many again by credit of later turns. More
    feedback is counted as "revised often enough"; retractions always count."""
    retrainings: NonNegative = 2
    """Maximum retrainings of an answer under late = "retrain". Later verdicts are counted as "retrained often enough" and
    change the copy that was not drawn yet."""
    session_s: Annotated[float, msgspec.Meta(ge=0, description="a number of seconds, 0 or more")] = 300.0
    """Seconds without a new turn after which a session's ready turns close together and are trained as one sequence. 0 trains
    each turn by itself, with everything before it computed again. A client ends its session sooner with the header
    `x-session-end`."""
    session_turns: Positive = 65_536
    """Maximum turns that wait for their session on each partition. Above it, the oldest sessions close early and are counted
    as `sessions_closed_early`."""
    snapshot_s: Seconds = 600.0
    """Seconds between two snapshots of a partition's state in the store, from which a worker on another machine goes on. A
    snapshot is also written after snapshot_records. Shorter costs writes, longer a longer start."""
    snapshot_records: Positive = 100_000
    """Records of a partition after which a snapshot is written, if snapshot_s has not passed before."""
    limits: LimitsConfig = LimitsConfig()
    correct: CorrectConfig = CorrectConfig()
    synthesize: SynthesizeConfig = SynthesizeConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    difficulty: Switch = Switch()
    """Drop of groups of two and more episodes with equal rewards, from which no advantage can be taken."""
    prioritize: Switch = Switch()


class TaskDedupeConfig(Section, frozen=True):
    """[tasks.dedupe]: drops tasks that ask the same question as another task.

    Example: TaskDedupeConfig(near=0.9)
    """

    on: bool = True
    by: Literal["question", "task"] = "question"
    """Identity of a task. "question": its question. "task": all of the task but its id, for environments that hide what is
    asked."""
    near: Share = 0.0
    """Minimum estimated similarity at which a question with the same answer and numbers counts as a repetition. 0 compares
    exactly."""
    memory: Positive = 1_000_000
    """Entries that are remembered: 18 for each task with `near`, else 1."""


class TaskFilterConfig(Section, frozen=True):
    """[tasks.filter]: drops incomplete, long and unverifiable tasks.

    Example: TaskFilterConfig(require=("answer",), scores=("math",))
    """

    on: bool = True
    require: tuple[str, ...] = ()
    """Fields that every task must have: answer, difficulty, parent, meta.<name>."""
    workflows: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Fields that the tasks of a workflow need besides, by workflow."""
    max_chars: NonNegative = 0
    """Maximum characters of all messages together. 0 for no limit."""
    scores: tuple[str, ...] = ()
    """Names of [[score]] tables that must give the task's own answer 1.0; other tasks are dropped."""


class VaryConfig(Section, frozen=True):
    """[tasks.vary]: more training tasks, as variations of those that come.

    Example: VaryConfig(on=True, templates=("Think first, then answer: {question}",))
    """

    on: bool = False
    templates: tuple[str, ...] = ()
    """Texts with {question} in them; each makes a variation."""
    url: str = ""
    """Base URL of an OpenAI-compatible endpoint that rewrites questions. "" for none."""
    model: str = ""
    """Model name at the endpoint."""
    number: Positive = 1
    """Rewritten versions of each question."""
    api_key_env: str = ""
    """Environment variable with the endpoint's key. "" for no key."""
    timeout_s: Seconds = 30.0
    """Seconds of one request."""

    def __post_init__(self) -> None:
        for template in self.templates:
            if QUESTION not in template:
                raise ValueError(f"got the template {template!r}, expected {QUESTION} in it")
        if bool(self.url) != bool(self.model):
            raise ValueError("got one of url and model, expected both or neither")
        if self.url:
            checked_url(self.url)


class DifficultyConfig(Section, frozen=True):
    """[tasks.difficulty]: drops training tasks by their difficulty, which is 1 minus the success rate.

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
    """[tasks]: clean, dedupe, vary, filter, difficulty, over one task at a time.

    Example: TasksConfig(dedupe=TaskDedupeConfig(near=0.9))
    """

    clean: Switch = Switch()
    dedupe: TaskDedupeConfig = TaskDedupeConfig()
    vary: VaryConfig = VaryConfig()
    filter: TaskFilterConfig = TaskFilterConfig()
    difficulty: DifficultyConfig = DifficultyConfig()


class StreamsConfig(Section, frozen=True):
    """The tables of the streams wing, as the root of the TOML holds them.

    Example: StreamsConfig(score=(ScoreConfig(name="exact", use="streams.scores.exact:exact"),))
    """

    feedback: tuple[FeedbackConfig, ...] = ()
    processor: tuple[ProcessorConfig, ...] = ()
    score: tuple[ScoreConfig, ...] = ()
    reward: RewardConfig = RewardConfig()
    tasks: TasksConfig = TasksConfig()
    verify: VerifyConfig = VerifyConfig()
    collect: CollectConfig = CollectConfig()
