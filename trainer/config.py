"""[trainer]: what the trainer reads of the TOML; lanes, objective, optimizer, learner, and when things are written."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from infra.settings.config import Duration, NonNegative, OpenDuration, Positive, Section, Table, Use
from schemas.fields import Lane

Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a number from 0 to 1")]
PartShare = Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, at most 1")]
AtLeast0 = Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")]
Above0 = Annotated[float, msgspec.Meta(gt=0, description="a number above 0")]
# The functions of trainer/losses/losses.py, named here so that reading the settings imports no torch.
LOSSES = (
    "cispo", "decoupled", "distill", "dpo", "dppo", "grpo", "gspo", "icepop", "m2po", "opmd", "ppo", "reinforce",
    "sft", "tis", "topr",
)  # fmt: skip
SLOTS = 8  # spans of keep.replay, of each of which the first checkpoint stays
MIN_SEQUENCES: Mapping[Lane, int] = MappingProxyType({"live": 64})  # defaults of min_sequences


def loss_use(loss: str) -> str:
    """The loss of a lane as `module:name`.

    >>> loss_use("grpo")
    'trainer.losses.losses:grpo'
    """
    return f"trainer.losses.losses:{loss}" if loss in LOSSES else loss


class LaneConfig(Section, frozen=True):
    """[trainer.lanes.<lane>]: the loss of a lane and how its experiences are drawn.

    Example: LaneConfig(loss="sft", weight=0.1, max_uses=4)
    """

    loss: str = "dppo"
    """Name of a built-in loss (dppo, grpo, ppo, sft, dpo, …), or `module:name` of your own."""
    weight: AtLeast0 = 1.0
    """Factor of the lane's mean loss. The gradient is the sum over lanes: weights 1 - m and m are the MIX loss."""
    share: AtLeast0 = 0.0
    """Sequences drawn per sequence of the lane usual. 0 takes this lane's weight / that lane's weight."""
    max_uses: Positive = 1
    """Times that the trainer may train on the same experience."""
    draw: Literal["least-used", "priority"] = "least-used"
    """Order of the draw. "least-used" takes the least used groups first, at random among equals; "priority" draws by the
    priority that the processors gave. The lane usual is drawn in issue order."""
    importance_exponent: Share | None = None
    """Exponent of the importance weights of a draw by priority. 1 makes the mean of a step the mean of the groups that
    wait: right where many groups are never drawn, or drawn often. 0 gives weights of 1: right where every group is drawn
    in the end. Left out: 0 if max_uses is 1, else 1."""
    max_mean_abs_log_ratio: AtLeast0 = 0.0
    """Bound on a group's mean |log π_θ/μ| at the draw, for lanes without pacing; a group above it is dropped. 0 for no
    bound."""
    optional: bool = False
    """Whether a step may be made without this lane."""
    min_sequences: NonNegative = 0
    """Minimum sequences of a step without the lane usual; a draining run takes fewer. Adam makes a full-sized step of
    however few there are. 0 takes 64 for the lane live and 1 for others; such a step takes pacing.groups_per_step
    sequences, or this minimum if it is larger."""
    kl: AtLeast0 = 0.0
    """Coefficient β of β·KL(π_θ‖π_ref), a mean over sampled tokens, for any loss. The reference is a second model in
    memory; with [trainer.lora], a second adapter. 0 for none."""
    entropy: AtLeast0 = 0.0
    """Coefficient β of -β·H(π_θ), exact over the vocabulary, a mean over sampled tokens. 0 for none."""
    tenant_share: PartShare = 0.5
    """Largest share of a step's sequences that a tenant gets while others have sequences to draw, for lanes without
    pacing. 1 for no limit. An even split is always allowed, and a step is filled up to min_sequences past the shares."""
    subject_share: PartShare = 0.25
    """Largest share of a step's sequences that a user of a tenant gets while others have sequences to draw. 1 for no
    limit."""
    max_waiting: Positive = 1_000_000
    """Maximum groups of a lane without pacing that wait; a draw drops the oldest above it."""
    options: Table = {}
    """Keyword parameters of the loss."""

    def __post_init__(self) -> None:
        if self.min_sequences > self.max_waiting:
            raise ValueError(
                f"min_sequences: got {self.min_sequences}, expected at most max_waiting = {self.max_waiting}: "
                "no step would come"
            )

    @property
    def exponent(self) -> float:
        """`importance_exponent`, or its default."""
        return float(self.max_uses > 1) if self.importance_exponent is None else self.importance_exponent


class WarmupConfig(Section, frozen=True):
    """[trainer.warmup]: supervised steps before any other step.

    Example: WarmupConfig(stop_at=0.3, every=5, max_steps=400)
    """

    lane: Lane = "expert"
    """Lane whose experiences the warm-up trains on, with the loss of that lane."""
    stop_at: Share = 0.30
    """Greedy accuracy on held-out demonstrations that ends the warm-up."""
    every: Positive = 5
    """Steps between two measurements of that accuracy."""
    min_steps: NonNegative = 0
    """Steps before the first measurement."""
    max_steps: Positive = 400
    """Steps that end the warm-up in any case."""
    min_experiences: Positive = 64
    """Experiences in the lane with which the warm-up begins."""
    learning_rate: Above0 = 1e-3
    """Learning rate of the warm-up."""
    batch: Positive = 64
    """Sequences per step."""


class CriticConfig(Section, frozen=True):
    """[trainer.critic]: a value model for losses that need it (ppo): a copy of the policy that training begins from.

    Example: CriticConfig(learning_rate=1e-5, gae_lambda=0.95)
    """

    learning_rate: Above0 = 1e-5
    """Learning rate of the critic."""
    gamma: Share = 1.0
    """Discount γ of the advantages per sampled token; tokens of observations between turns do not count."""
    gae_lambda: Share = 0.95
    """λ of generalized advantage estimation."""
    value_clip: AtLeast0 = 0.2
    """Largest change of a value within a batch that still has a gradient. 0 for no bound."""
    gradient_clip: Above0 = 1.0
    """Maximum norm of the critic's gradient."""
    normalize: bool = True
    """Whether advantages of a step are scaled to mean 0 and variance 1."""
    truncated: Literal["reward", "bootstrap"] = "reward"
    """Value at the end of a truncated episode. "reward": its reward. "bootstrap": the critic's value of its last state,
    and its reward does not count; for rewards that a cut-off answer cannot earn. Use "bootstrap" only if episodes end by
    themselves, else values drift. Of an episode in several parts only the last part is bootstrapped."""


class LoraConfig(Section, frozen=True):
    """[trainer.lora]: train a low-rank adapter (LoRA, arXiv:2106.09685) and keep the model's weights as they are.

    The trainer trains, checkpoints and publishes W + alpha / rank · B A in place of W, where B begins as zeros. A learning rate
    about ten times that of full weights is usual. None of these settings may change in a run that has begun.

    Example: LoraConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    """

    rank: Positive = 16
    """Rank of B A."""
    alpha: Positive = 32
    """Scale of the adapter; keep alpha / rank when you change rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Matrices with an adapter, by the ends of their module names ("q_proj"), or "all-linear": every linear module but the
    output matrix (of a model with pictures: of its text model)."""
    dropout: float = 0.0
    """Must be 0: the engine samples without dropout."""

    def __post_init__(self) -> None:
        if self.dropout:
            raise ValueError(
                f"dropout: got {self.dropout}, expected 0: the engine samples without dropout, so that recorded logprobs would "
                "not be those that the trainer computes"
            )


class Schedule(Section, frozen=True):
    """[trainer.schedule]: the learning rate after the warm-up: held, then falling linearly, then held.

    Example: Schedule(hold_steps=100, decay_steps=100, final=0.1)
    """

    hold_steps: NonNegative = 0
    """Steps at the full rate."""
    decay_steps: Positive = 100
    """Steps over which the rate falls."""
    final: Share = 1.0
    """Share of the full rate after the fall; 1 holds the full rate."""


class TrainerGuardConfig(Section, frozen=True):
    """[trainer.guard]: steps that are refused and alarms, by comparison with the median of earlier steps.

    Example: TrainerGuardConfig(grad_norm=20, entropy=0.2, reward=0.5, probe_shift=2)
    """

    window: Positive = 50
    """Number of earlier steps in the median."""
    min_steps: Positive = 10
    """Steps before the first comparison."""
    grad_norm: AtLeast0 = 50.0
    """Multiple of the median gradient norm (before clipping) above which a step changes nothing. 0 for no limit."""
    entropy: Share = 0.0
    """Share of the median entropy below which the alarm `entropy_collapse` is raised. 0 for never."""
    reward: Share = 0.0
    """Share of the median reward below which the alarm `reward_collapse` is raised. 0 for never."""
    probe_shift: AtLeast0 = 0.0
    """Mean change in nats per token of a version's log-probabilities on recent sequences above which it is not published.
    0 for no limit; a new process does not compare its first version."""


class TrainerConfig(Section, frozen=True):
    """[trainer]: optimizer, learner, checkpoints and versions.

    Example: TrainerConfig(lanes={"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)})
    """

    lanes: dict[Lane, LaneConfig] = msgspec.field(default_factory=lambda: {"usual": LaneConfig()})
    """Loss and draw of each lane."""
    learning_rate: Above0 = 1e-6
    """Learning rate of AdamW."""
    schedule: Schedule = Schedule()
    gradient_clip: Above0 = 1.0
    """Maximum norm of the gradient."""
    betas: tuple[float, float] = (0.9, 0.999)
    """β₁ and β₂ of AdamW."""
    weight_decay: AtLeast0 = 0.0
    """Weight decay of AdamW."""
    staleness_decay: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    """λ of the weight λ^staleness of each token with a ratio. 1 is off; below 1 it biases training towards fresh samples."""
    scale_by_ess: bool = False
    """Whether the learning rate is multiplied by √(ESS/B), which makes smaller steps on stale batches."""
    reference_decay: Share = 1.0
    """Share of itself that the reference model (of a KL, of dpo) keeps after each step; the rest is the policy. 1 keeps it
    frozen."""
    max_tokens_per_microbatch: Positive = 16384
    """Maximum tokens of a microbatch, which bounds memory; a longer sequence is a microbatch by itself."""
    activation_checkpointing: bool = False
    """Whether the backward computes activations again instead of keeping them."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Type of the forward pass and of published weights. "auto", for an engine's `dtype` too: bfloat16 with an NVIDIA GPU, AMX
    or AVX512-BF16, else float32."""
    threads: NonNegative = 1
    """CPU threads, pinned. 0 leaves the choice to torch."""
    checkpoint_every: Positive = 20
    """Published versions between two checkpoints."""
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=2, description="a whole number of 2 or more")] = 2
    """Newest checkpoints that stay in the store."""
    min_publish_interval: OpenDuration = ""
    """Minimum time between two versions for steps without the lane usual; a draining run does not wait. Every gateway and
    explorer loads each version. "" takes 5m if there is a lane live, else 0s."""
    max_steps: NonNegative = 0
    """Optimizer steps after which the trainer ends. 0 for no end."""
    max_skips: Positive = 3
    """Consecutive steps without effect after which the trainer restores the last good policy."""
    halt_on: tuple[str, ...] = ()
    """Alarms after which the trainer restores the last good policy at once."""
    guard: TrainerGuardConfig = TrainerGuardConfig()
    tensorboard: str = "tensorboard"
    """Folder of TensorBoard event files, relative to the TOML. "" writes none."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that get the same figures, each with its own package (`pip install wandb`) and environment variables. The
    project is `app`, the run is `run`. A tracker that is away holds up nothing."""
    warmup: WarmupConfig | None = None
    critic: CriticConfig | None = None
    lora: LoraConfig | None = None
    ranks: Positive = 1
    """Processes that train together."""
    ranks_timeout: Duration = "10m"
    """Time that a rank waits for another before all start again. Sending the rows of a step, its longest microbatch and
    reading a checkpoint must each take less."""
    routing: Literal["own", "replay"] = "own"
    """Choice of experts in a mixture-of-experts model. "own": the model's routers. "replay": the experts that the engine
    recorded while it sampled (`engine.options.routing`), weighted by the learner's router logits, so that routers are
    trained; tokens without a record go where their router sends them. Engine and trainer that round differently choose
    different experts for some tokens, which importance ratios then measure; replay keeps such runs from collapsing (Ma et
    al. 2025, arXiv:2510.11370). A record costs a byte per token, layer and expert in the log."""
    weights_on_card: bool = True
    """Whether a learner on a GPU finds the changes of a version there, if its steps leave room for three copies of the
    published weights; false copies all weights to the host."""
    learner: Use = Use(use="trainer.learners.torch:TorchLearner")
    """Learner that holds the model."""

    def min_sequences(self, lane: Lane) -> int:
        """Sequences of a lane that a step without the lane usual waits for."""
        config = self.lanes[lane]
        return config.min_sequences or min(MIN_SEQUENCES.get(lane, 1), config.max_waiting)

    @property
    def publish_interval(self) -> str:
        """`min_publish_interval`, or its default."""
        return self.min_publish_interval or ("5m" if "live" in self.lanes else "0s")

    def __post_init__(self) -> None:
        if "usual" in self.lanes and self.lanes["usual"].draw == "priority":
            raise ValueError(
                'lanes.usual.draw: got "priority", expected "least-used": this lane is drawn in issue order'
            )
        if self.lora is not None and self.critic is not None:
            raise ValueError(
                "critic: got one with [trainer.lora], expected one of the two: a critic is a second model whose own weights "
                "are all trained, which LoRA is to save; lanes without ppo need none"
            )
        if self.lora is not None and self.reference_decay < 1:
            raise ValueError(
                f"reference_decay: got {self.reference_decay} with [trainer.lora], expected 1: a mean of policies is no "
                "adapter of their rank"
            )
