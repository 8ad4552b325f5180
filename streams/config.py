"""Settings of the streams wing: feedback sources, processors, scores, reward, and the built-in chain of each stage.

Guarantee: everything a stage does by default is a field here with its default; each table is documented by its struct.
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


class LangfuseConfig(Section, frozen=True):
    """[feedback.from.langfuse]: scores of Langfuse as feedback. They are asked for from version 3 of its API (self-hosted: from
    release 3.179 on).

    url: of Langfuse. score: name of the scores. public_key_env, secret_key_env: environment variables of the stream workers
    with the keys of the project. public_key_file, secret_key_file: files that hold them, instead, relative to the TOML. every:
    how often it is asked. since: how far back the first question goes. overlap: how much later than its own time a score may
    be seen, or be changed, and still count.

    Example: LangfuseConfig(score="user-feedback")
    """

    score: Annotated[str, msgspec.Meta(min_length=1, description="the name of a score")]
    url: str = "https://cloud.langfuse.com"
    public_key_env: str = "LANGFUSE_PUBLIC_KEY"
    secret_key_env: str = "LANGFUSE_SECRET_KEY"
    public_key_file: str = ""
    secret_key_file: str = ""
    every: Duration = "30s"
    since: Duration = "24h"
    overlap: Duration = "1h"

    def __post_init__(self) -> None:
        checked_url(self.url)


class From(Section, frozen=True):
    """Where a feedback source listens: exactly one of them.

    topic: full name of any Kafka topic with JSON values. file: path of a JSONL file that grows, relative to the TOML.
    webhook: path at the gateway, such as "/zendesk"; "/v1/feedback" is what clients of the gateway say with their keys.
    secret_env: environment variable of the gateway with the secret a webhook is signed with (HMAC-SHA256). secret_file: a file
    that holds it, instead, relative to the TOML. signature_header: the header with the signature. timestamp_header: signed in
    front of the body, "" for none; each sender has its own name for it. Without it, who has seen a signed body can send it
    again: gateway and stream worker take it for the record it is while they remember it (the newest 65,536). tenant: of API
    keys; the webhook may speak of the answers given to that one alone, "" for those of all. langfuse: where its scores are
    read from. otlp: a collector of OpenTelemetry writes the topic, as `otlp_json`; each log record in a message is an event.

    Example: From(topic="zendesk.closed")
    """

    topic: str = ""
    file: str = ""
    webhook: str = ""
    secret_env: str = ""
    secret_file: str = ""
    signature_header: str = "x-signature"
    timestamp_header: str = ""
    tenant: str = ""
    langfuse: LangfuseConfig | None = None
    otlp: bool = False

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
    """[[feedback]]. Its values become `scores.<name>`.

    name: of the score. from: where it listens. use: a @feedback function. window: how long collect waits for it after the
    answer, and how long its feedback counts in any case; once `process` is started again, another window, or a source less,
    holds for the answers that wait, too.
    default: value where none came; "unlabelled" leaves the score absent. late: what feedback after the window does
    where it changes the verdict: drop it, amend copies that were not drawn yet (a trained one is left as it is), or
    retrain (once for each verdict, in lane human, instead of a copy that was not drawn yet; not where that lane's
    loss takes pairs). How often: [collect] revisions and retrainings. discount: γ, what a turn of a session gets of how
    much better than usual the turn after it was rated; that is for learning alone, and no rating. 0 credits the named
    answer alone. per_rater: how many words of one rater count `within` a time; what a key says without naming a rater is
    one rater's, and so is what a browser's token says. alike: how many that say nearly the same, of all raters together. The
    rest is held back and counted. 0 is no limit; both are counted on each partition. See also [collect.limits]. within:
    the time of per_rater and alike.

    Example: FeedbackConfig(name="csat", use="support:csat", from_=From(topic="zendesk.closed"), window="24h")
    """

    name: Name
    use: UsePath
    from_: From = msgspec.field(name="from")
    options: Options = msgspec.field(default_factory=dict)
    window: Duration = "24h"
    default: Literal["unlabelled"] | float = "unlabelled"
    late: Literal["drop", "amend", "retrain"] = "amend"
    discount: Share = 0.0
    per_rater: NonNegative = 1000
    alike: NonNegative = 0
    within: Duration = "1h"


class ScoreConfig(Section, frozen=True):
    """[[score]]: runs in verify on all but demonstrations; its verdict is recorded in `scores.<name>`.

    name: of the verdict. use: a @score function. timeout_s: of one call; then the verdict is absent.

    Example: ScoreConfig(name="exact", use="streams.scores.exact:exact")
    """

    name: Name
    use: UsePath
    options: Options = msgspec.field(default_factory=dict)
    timeout_s: Seconds = 10.0


class RewardConfig(Section, frozen=True):
    """[reward]: runs in collect, after feedback. blend: score to weight; weights of absent scores go to the others; a weight
    below 0 makes a penalty, Σ w · s over the sum of the weights above 0; empty takes every score alike. use: a @score
    function instead of a blend. require: without these scores an experience is unlabelled and dropped. discount: γ of
    scores given turn by turn, whose discounted sum counts. timeout_s: of one call of `use`.

    Example: RewardConfig(blend={"csat": 1.0, "judge": 0.3, "overlong": -0.5}, require=("csat",))
    """

    blend: dict[str, Weight] = msgspec.field(default_factory=dict)
    use: str = ""
    options: Options = msgspec.field(default_factory=dict)
    require: tuple[str, ...] = ()
    discount: Share = 1.0
    timeout_s: Seconds = 10.0

    def __post_init__(self) -> None:
        if self.use and self.blend:
            raise ValueError("got use and blend, expected one of them")
        if 0.0 in self.blend.values() or (self.blend and max(self.blend.values()) < 0):
            raise ValueError(
                f"blend: got {self.blend}, expected no weight of 0, and one above 0: a penalty is no verdict"
            )


class Switch(Section, frozen=True):
    """A built-in that has no settings. on: false takes it out of the chain."""

    on: bool = True


class RedactConfig(Section, frozen=True):
    """[verify.redact]. kinds: built-in patterns (email, card, phone, key, iban, ssn). patterns: your own, name to regular
    expression. action: drop the experience, or mask the text (its token ids stay as sampled, so what is learned does
    not change). What feedback sources make of events is masked by kinds and patterns, on or not.

    Example: RedactConfig(on=True, patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = False
    kinds: tuple[Kind, ...] = KINDS
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
    """[collect.advantage]. kind: group: (reward - mean) / (std + epsilon) over the group's episodes; mean: reward - mean;
    leave_one_out: reward minus the mean of the others. Lone answers, and the only choice of several that was rated, take a
    running baseline per tenant and origin either way, shrunk while few are known and cut to ±5
    (`streams.processors.advantage` says what it assumes). epsilon: what keeps the division finite. turns: name of a score
    given turn by turn (an environment's), by which each turn of a group has an advantage of its own, "" for one of the
    whole; not with leave_one_out.

    Example: AdvantageConfig(kind="leave_one_out")
    """

    on: bool = True
    kind: Literal["group", "mean", "leave_one_out"] = "group"
    epsilon: Annotated[float, msgspec.Meta(gt=0, description="a small number above 0")] = 1e-4
    turns: str = ""

    def __post_init__(self) -> None:
        if self.turns and self.kind == "leave_one_out":
            raise ValueError(f'got turns = "{self.turns}" with kind = "leave_one_out", expected kind "group" or "mean"')


class SynthesizeConfig(Section, frozen=True):
    """[collect.synthesize]: the best episode of a group, once more as a demonstration. min_reward: from there on.

    Example: SynthesizeConfig(on=True, min_reward=1.0)
    """

    on: bool = False
    min_reward: float = 1.0


class CorrectConfig(Section, frozen=True):
    """[collect.correct]: an edited answer becomes a demonstration (lane expert), and the edit is preferred to
    the answer (a pair in lane human). Needs policy.model, for its tokenizer, where the stream workers run. What [verify.redact]
    finds in an edit is masked where that is on.

    Example: CorrectConfig(on=True)
    """

    on: bool = False


class LimitsConfig(Section, frozen=True):
    """[collect.limits]: how many answers one rater and one tenant can move by what they say, so that none alone decides
    what is learned; counted for each UTC day on each partition, by log time.

    rater_answers, rater_share: a named rater moves so many, or that share of all that is moved if that is more.
    tenant_answers, tenant_share: a tenant likewise, and with it what its keys say without naming a rater; not where no other
    tenant's users spoke that day or the day before. A share of 1 is no limit. What is beyond counts neither for learning
    nor as a rating and is counted as "more from one rater than trains in a day" or "more from one tenant …".

    Example: LimitsConfig(rater_answers=5_000)
    """

    rater_answers: NonNegative = 500
    rater_share: Share = 0.1
    tenant_answers: NonNegative = 10_000
    tenant_share: Share = 0.5


class CollectConfig(Section, frozen=True):
    """[collect]: correct, reward, synthesize, advantage, difficulty, prioritize, over a whole group.

    deadline_s: a group is closed so long after its first record, even without all its episodes: longer than an episode
    may take (`explore.episode_timeout_s`), or slow episodes are left out. revisions: maximum revisions of a closed group
    by feedback on its answers, and as many again by credit of later turns; what is beyond is counted as "revised often
    enough"; retractions always count. retrainings: how often of these, under late = "retrain", an answer is trained
    again; later verdicts are counted as "retrained often enough" and change the copy that was not drawn yet. difficulty:
    drop groups of two and more episodes with all rewards equal, from which no advantage can be taken. session_s: a turn
    of a session, once nothing is waited for that is about itself, waits until no other came for so long, so that the
    turns of a conversation are trained as one sequence; 0 trains each by itself, with all that was said before it
    computed again. A client ends its session sooner with the header `x-session-end`. session_turns: how many turns wait
    so, on each partition; beyond it the sessions that began first are closed early, and counted as
    `sessions_closed_early`. snapshot_s, snapshot_records: what waits on a partition is stored after so many seconds or so
    many records, whichever comes first, so that a worker on another machine goes on from there; it then reads what came
    since. More often costs writing to the store, and less a longer start.

    Example: CollectConfig(deadline_s=120)
    """

    deadline_s: Seconds = 3900.0
    revisions: Positive = 16
    retrainings: NonNegative = 2
    session_s: Annotated[float, msgspec.Meta(ge=0, description="a number of seconds, 0 or more")] = 300.0
    session_turns: Positive = 65_536
    snapshot_s: Seconds = 600.0
    snapshot_records: Positive = 100_000
    limits: LimitsConfig = LimitsConfig()
    correct: CorrectConfig = CorrectConfig()
    synthesize: SynthesizeConfig = SynthesizeConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    difficulty: Switch = Switch()
    prioritize: Switch = Switch()


class TaskDedupeConfig(Section, frozen=True):
    """[tasks.dedupe]. by: what makes two tasks one: the question, or all of the task but its id (where the environment
    hides what is asked). near: estimated similarity from which a question with the same answer and numbers counts as
    asked before; 0 compares exactly. memory: entries remembered (with `near` 18 a task, else 1).

    Example: TaskDedupeConfig(near=0.9)
    """

    on: bool = True
    by: Literal["question", "task"] = "question"
    near: Share = 0.0
    memory: Positive = 1_000_000


class TaskFilterConfig(Section, frozen=True):
    """[tasks.filter]. require: fields every task must have (answer, difficulty, parent, meta.<name>). workflows: what
    tasks of a workflow need besides. max_chars: of all messages, 0 is no limit. scores: names of [[score]] tables that
    must give the task's own answer 1.0; a task they cannot verify is dropped.

    Example: TaskFilterConfig(require=("answer",), scores=("math",))
    """

    on: bool = True
    require: tuple[str, ...] = ()
    workflows: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    max_chars: NonNegative = 0
    scores: tuple[str, ...] = ()


class VaryConfig(Section, frozen=True):
    """[tasks.vary]: more training tasks like those there are. templates: texts with {question}. url, model: of an
    OpenAI-compatible endpoint that rewrites questions. number: rewritten versions of each. api_key_env: environment variable
    of the endpoint's key. timeout_s: of one request.

    Example: VaryConfig(on=True, templates=("Think first, then answer: {question}",))
    """

    on: bool = False
    templates: tuple[str, ...] = ()
    url: str = ""
    model: str = ""
    number: Positive = 1
    api_key_env: str = ""
    timeout_s: Seconds = 30.0

    def __post_init__(self) -> None:
        if self.url:
            checked_url(self.url)


class DifficultyConfig(Section, frozen=True):
    """[tasks.difficulty]. field: of a task's meta, the success rate that came with it. easiest, hardest: training tasks of a
    difficulty (1 minus the success rate) below the one or above the other are dropped.

    Example: DifficultyConfig(field="pass_rate", easiest=0.1)
    """

    on: bool = True
    field: str = "success_rate"
    easiest: Share = 0.0
    hardest: Share = 1.0


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
