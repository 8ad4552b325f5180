"""Settings of the trainer: the [trainer] table of the TOML with its lanes, optimizer, learner and checkpoints."""

import math
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
SLOTS = 8  # equal parts of keep.replay; the first checkpoint of each part stays
MIN_SEQUENCES: Mapping[Lane, int] = MappingProxyType({"live": 64})  # defaults of min_sequences

# Alarms of a lane, and the lowest and highest healthy value of each.
THRESHOLDS: Mapping[str, tuple[float, float]] = {
    "ess": (0.3, math.inf),
    "weight_mean": (0.5, 2.0),
    "weight_max": (-math.inf, 20.0),
    "clip_positive": (-math.inf, 0.1),
    "clip_negative": (-math.inf, 0.1),
    "chi2": (-math.inf, 1.0),
    "mismatch_k3": (-math.inf, 0.01),
}


def loss_use(loss: str) -> str:
    """Return a lane's loss as `module:name`.

    >>> loss_use("grpo")
    'trainer.losses.losses:grpo'
    """
    return f"trainer.losses.losses:{loss}" if loss in LOSSES else loss


class LaneConfig(Section, frozen=True):
    """[trainer.lanes.<lane>]: loss and draw of a lane.

    Example: LaneConfig(loss="sft", weight=0.1, max_uses=4)
    """

    loss: str = "dppo"
    """Loss of the lane: a built-in name (dppo, grpo, ppo, sft, dpo, …), or `module:name` of your own."""
    weight: AtLeast0 = 1.0
    """Factor of the lane's mean loss. The gradient is the sum over lanes; weights 1 - m and m give the MIX loss."""
    share: AtLeast0 = 0.0
    """Sequences drawn per sequence of the lane usual, at least 1 per step. Default 0: the ratio of the two lanes' weights."""
    max_uses: Positive = 1
    """Maximum number of times that the trainer uses an experience."""
    draw: Literal["least-used", "priority"] = "least-used"
    """Order of the draw. "least-used": least used groups first, at random among equals. "priority": at random, by the
    processors' priorities. The lane usual is always drawn in issue order."""
    importance_exponent: Share | None = None
    """Exponent of the importance weights of a draw by priority. 1: a step's weighted mean estimates the mean of the waiting
    groups; use it if many groups are never drawn, or drawn often. 0: all weights are 1; use it if every group is drawn
    eventually. Default: 0 if max_uses is 1, else 1."""
    max_mean_abs_log_ratio: AtLeast0 = 0.0
    """Maximum mean |log π_θ/μ| of a group at the draw, for lanes without pacing; a group above it is dropped. 0 for no
    limit."""
    optional: bool = False
    """Whether a step may go without experiences of this lane. A step with the lane usual waits for no other lane."""
    min_sequences: NonNegative = 0
    """Minimum sequences of a step without the lane usual; a draining run takes fewer. Adam's step size does not shrink with
    few sequences. Default 0: 64 for the lane live, 1 for others. Such a step takes up to pacing.groups_per_step sequences,
    or this minimum if it is larger."""
    kl: AtLeast0 = 0.0
    """Coefficient β of the penalty β·KL(π_θ‖π_ref), a mean over sampled tokens, for any loss. The reference is a second
    model in memory; with [trainer.lora], a second adapter. 0 for none."""
    entropy: AtLeast0 = 0.0
    """Coefficient β of the entropy bonus -β·H(π_θ), exact over the vocabulary, a mean over sampled tokens. 0 for none."""
    tenant_share: PartShare = 0.5
    """Maximum share of a step's sequences per tenant while other tenants' sequences wait, for lanes without pacing. 1 for no
    limit. An even split is always allowed, and a step is filled up to min_sequences regardless of the shares."""
    subject_share: PartShare = 0.25
    """Maximum share of a step's sequences per user of a tenant while other users' sequences wait. 1 for no limit."""
    max_waiting: Positive = 1_000_000
    """Maximum waiting groups of a lane without pacing; a draw drops the oldest above it."""
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
        """`importance_exponent` or its default."""
        return float(self.max_uses > 1) if self.importance_exponent is None else self.importance_exponent


class WarmupConfig(Section, frozen=True):
    """[trainer.warmup]: supervised steps before any other step.

    Example: WarmupConfig(stop_at=0.3, every=5, max_steps=400)
    """

    lane: Lane = "expert"
    """Lane that the warm-up trains on, with that lane's loss."""
    stop_at: Share = 0.30
    """Greedy accuracy on held-out demonstrations, 0 to 1, that ends the warm-up."""
    every: Positive = 5
    """Steps between two measurements of the accuracy."""
    min_steps: NonNegative = 0
    """Steps before the first measurement of the accuracy."""
    max_steps: Positive = 400
    """Maximum steps of the warm-up."""
    min_experiences: Positive = 64
    """Number of the lane's experiences that must arrive before the warm-up begins."""
    learning_rate: Above0 = 1e-3
    """Learning rate of the warm-up."""
    batch: Positive = 64
    """Sequences per step of the warm-up."""


class CriticConfig(Section, frozen=True):
    """[trainer.critic]: value model for losses that need it (ppo), initialized from the run's first policy.

    Example: CriticConfig(learning_rate=1e-5, gae_lambda=0.95)
    """

    learning_rate: Above0 = 1e-5
    """Learning rate of the critic."""
    gamma: Share = 1.0
    """Discount γ of the advantages per sampled token; observation tokens between turns do not count."""
    gae_lambda: Share = 0.95
    """λ of generalized advantage estimation."""
    value_clip: AtLeast0 = 0.2
    """Clip range of value changes within a batch; beyond it a value has no gradient. 0 for no clipping."""
    gradient_clip: Above0 = 1.0
    """Maximum norm of the critic's gradient."""
    normalize: bool = True
    """Whether the trainer scales a step's advantages to mean 0 and variance 1."""
    truncated: Literal["reward", "bootstrap"] = "reward"
    """Value at the end of a truncated episode. "reward": its reward. "bootstrap": the critic's value of its last state, in
    place of its reward; for rewards that a truncated answer cannot earn. Use "bootstrap" only if episodes terminate, else
    values drift. In an episode of several parts only the last part is bootstrapped."""


class LoraConfig(Section, frozen=True):
    """[trainer.lora]: training of a low-rank adapter (LoRA, arXiv:2106.09685) with frozen model weights.

    The model uses W + alpha / rank · B A in place of W; B starts as zeros. The trainer trains, checkpoints and publishes B
    and A. A usual learning rate is ten times that of full weights. These settings are fixed for a run.

    Example: LoraConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    """

    rank: Positive = 16
    """Rank of the adapter's product B A."""
    alpha: Positive = 32
    """Scale of the adapter. When you change rank, keep alpha / rank constant."""
    targets: tuple[str, ...] = ("all-linear",)
    """Matrices with an adapter, by suffixes of their module names ("q_proj"). Default "all-linear": every linear module except
    the output matrix; in a vision model, every linear module of its text model."""


class Schedule(Section, frozen=True):
    """[trainer.schedule]: learning rate after the warm-up: constant, then a linear decay, then constant.

    Example: Schedule(hold_steps=100, decay_steps=100, final=0.1)
    """

    hold_steps: NonNegative = 0
    """Steps at the full learning rate."""
    decay_steps: Positive = 100
    """Steps of the linear decay."""
    final: Share = 1.0
    """Fraction of the full learning rate after the decay. 1 for no decay."""


class TrainerGuardConfig(Section, frozen=True):
    """[trainer.guard]: refusal of bad steps, and alarms, by comparison with the median of earlier steps.

    Example: TrainerGuardConfig(grad_norm=20, entropy=0.2, reward=0.5, probe_shift=2)
    """

    window: Positive = 50
    """Number of earlier steps in the medians."""
    min_steps: Positive = 10
    """Steps before the first comparison."""
    grad_norm: AtLeast0 = 50.0
    """Multiple of the median gradient norm (before clipping) above which a step is not applied. 0 for no limit."""
    entropy: Share = 0.0
    """Fraction of the median entropy below which the trainer raises the alarm `entropy_collapse`. 0 for never."""
    reward: Share = 0.0
    """Fraction of the median reward below which the trainer raises the alarm `reward_collapse`. A negative median allows a
    fall by 1 - the fraction of its size: with 0.5, from -2 to -3. 0 for never."""
    probe_shift: AtLeast0 = 0.0
    """Maximum mean change, in nats per token, of the log-probabilities of recent sequences between two versions; the trainer
    does not publish a version above it. 0 for no limit. A new process does not compare its first version."""


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
    """Coefficients β₁ and β₂ of AdamW."""
    weight_decay: AtLeast0 = 0.0
    """Weight decay of AdamW."""
    staleness_decay: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    """Base λ of the weight λ^staleness of each token with a ratio. 1: off. Below 1: a bias towards fresh samples."""
    reference_decay: Share = 1.0
    """Decay of the reference model (for `kl` and dpo) as a moving average of the policy, per step. 1: the reference is
    frozen."""
    max_tokens_per_microbatch: Positive = 16384
    """Maximum tokens of a microbatch; it bounds memory. A longer sequence is a microbatch of its own."""
    activation_checkpointing: bool = False
    """Whether the backward pass recomputes activations, to save memory."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Data type of the forward pass and of published weights. "auto" (also for an engine's `dtype`): bfloat16 with an NVIDIA
    GPU, AMX or AMD's AVX512-BF16, else float32."""
    threads: NonNegative = 1
    """Number of CPU threads of the learner. 0: torch's default."""
    checkpoint_every: Positive = 20
    """Published versions between two checkpoints."""
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=2, description="a whole number of 2 or more")] = 2
    """Number of newest checkpoints that stay in the store."""
    min_publish_interval: OpenDuration = ""
    """Minimum time between two versions, for steps without the lane usual; a draining run does not wait. Every gateway and
    explorer loads each version. Default "": 5m with a lane live, else 0s."""
    max_steps: NonNegative = 0
    """Optimizer steps after which the trainer exits. 0 for no limit."""
    max_skips: Positive = 3
    """Consecutive skipped steps after which the trainer restores the last good checkpoint."""
    halt_on: tuple[str, ...] = ()
    """Alarms after which the trainer restores the last good checkpoint at once: `entropy_collapse`, `reward_collapse`, or a
    lane's ess, weight_mean, weight_max, clip_positive, clip_negative, chi2 or mismatch_k3, such as `usual/ess`."""
    guard: TrainerGuardConfig = TrainerGuardConfig()
    tensorboard: str = "tensorboard"
    """Folder of TensorBoard event files, relative to the TOML. "" for none."""
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers that get the same metrics as TensorBoard. Install the tracker's package (`pip install wandb`) and
    set its environment variables. The project is `app`, the run is `run`. The trainer does not wait for a tracker."""
    warmup: WarmupConfig | None = None
    critic: CriticConfig | None = None
    lora: LoraConfig | None = None
    ranks: Positive = 1
    """Number of training processes (ranks)."""
    ranks_timeout: Duration = "10m"
    """Maximum time that a rank waits for another; after it, all ranks end. Sending the rows of a step, its longest
    microbatch and reading a checkpoint must each take less."""
    learner: Use = Use(use="trainer.learners.torch:TorchLearner")
    """Learner, which holds and trains the model."""

    def min_sequences(self, lane: Lane) -> int:
        """Return the minimum sequences of a lane in a step without the lane usual."""
        config = self.lanes[lane]
        return config.min_sequences or min(MIN_SEQUENCES.get(lane, 1), config.max_waiting)

    @property
    def publish_interval(self) -> str:
        """`min_publish_interval` or its default."""
        return self.min_publish_interval or ("5m" if "live" in self.lanes else "0s")

    def __post_init__(self) -> None:
        collapses = (("entropy_collapse", self.guard.entropy), ("reward_collapse", self.guard.reward))
        raised = [name for name, share in collapses if share]
        raised += [f"{lane}/{name}" for lane in self.lanes for name in THRESHOLDS]
        if never := [name for name in self.halt_on if name not in raised]:
            raise ValueError(
                f"halt_on: got {never[0]}, which is never raised, expected some of {', '.join(raised)}; guard.entropy and "
                "guard.reward turn on entropy_collapse and reward_collapse"
            )
        if "usual" in self.lanes and self.lanes["usual"].draw == "priority":
            raise ValueError(
                'lanes.usual.draw: got "priority", expected "least-used": this lane is drawn in issue order'
            )
        if self.warmup is not None and self.warmup.lane not in self.lanes:
            raise ValueError(
                f"warmup.lane: got {self.warmup.lane}, expected a lane of [trainer.lanes] ({', '.join(self.lanes)}): add "
                f'{self.warmup.lane} = {{ loss = "sft" }} there, with weight = 0 if only the warm-up trains it'
            )
        if self.lora is not None and self.critic is not None:
            raise ValueError(
                "critic: got [trainer.critic] with [trainer.lora], expected only one of them: all weights of a critic are "
                "trained, which LoRA avoids; lanes without ppo need no critic"
            )
        if self.lora is not None and self.reference_decay < 1:
            raise ValueError(
                f"reference_decay: got {self.reference_decay} with [trainer.lora], expected 1: a mean of policies is no "
                "adapter of their rank"
            )
