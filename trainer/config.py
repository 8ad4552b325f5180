"""[trainer]: what the trainer reads of the TOML; lanes, objective, optimizer, learner, and when things are written."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from infra.settings.config import Duration, NonNegative, OpenDuration, Positive, Section, Table, Use
from schemas.fields import Lane

Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a number from 0 to 1")]
PartShare = Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, at most 1")]
Above0 = Annotated[float, msgspec.Meta(gt=0, description="a number above 0")]
# The functions of trainer/losses/losses.py, named here so that reading the settings imports no torch.
LOSSES = (
    "cispo", "decoupled", "distill", "dpo", "dppo", "grpo", "gspo", "icepop", "m2po", "opmd", "ppo", "reinforce",
    "sft", "tis", "topr",
)  # fmt: skip
SLOTS = 8  # spans of keep.replay, of each of which the first checkpoint stays
LEAST: Mapping[Lane, int] = MappingProxyType({"live": 64})  # of a step, where the settings leave it open


def loss_use(loss: str) -> str:
    """What a lane's loss names, as `module:name`.

    >>> loss_use("grpo")
    'trainer.losses.losses:grpo'
    """
    return f"trainer.losses.losses:{loss}" if loss in LOSSES else loss


class LaneConfig(Section, frozen=True):
    """[trainer.lanes.<lane>]: the objective of a lane and how it is drawn.

    loss: a built-in loss (dppo, grpo, ppo, sft, dpo, …), or `module:name` of another. options: the loss's
    keyword parameters. weight: multiplies the lane's mean; the gradient is the sum over lanes, so weights 1-m and m are
    the MIX loss. share: sequences drawn per sequence of the usual lane, 0 takes this weight / that lane's. max_uses: how
    often one experience may be trained. draw: "spread" takes the least used first, "priority" by what prioritize said; the
    usual lane is drawn in issue order.

    correction: exponent of the weights that undo what priority did to the mean. 1: a step's mean is that of all that waits;
    for lanes of which much is never drawn, or drawn often. 0: no weights, priority says when a group is trained; right for
    the mean of all that comes where all of it is drawn in the end. Left out: 0 where max_uses is 1, else 1.

    bound: mean |log w| above which a group of an unpaced lane is dropped at the draw, 0 for none. optional: a step need
    not wait for this lane. least: sequences for which a step without the usual lane waits, unless the run drains; Adam
    makes a full-sized step of however few there are. 0 takes 64 for the lane live, 1 for others; such a step takes
    pacing.groups_per_step, or so many if that is more. kl: β of β·KL(π_θ‖π_ref), for any loss: see
    trainer.losses.penalty; the reference is a second model in memory, with [trainer.lora] a second adapter. entropy: of
    -β·H(π_θ), exact over the vocabulary, at every sampled token. Both are means over the lane's sampled tokens, whatever
    its loss is a mean over.

    tenant_share, subject_share: how much of a step's sequences of an unpaced lane one tenant, and one user, may make up
    where others have something to draw too; what is above it waits. 1 for no limit. An even split is always allowed, so a
    lone tenant is not held back, and a step is filled up to `least` sequences from those who have more. max_waiting: groups of
    an unpaced lane that wait; at a draw the oldest above it are dropped.

    Example: LaneConfig(loss="sft", weight=0.1, max_uses=4)
    """

    loss: str = "dppo"
    weight: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 1.0
    share: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    max_uses: Positive = 1
    draw: Literal["spread", "priority"] = "spread"
    correction: Share | None = None
    bound: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    optional: bool = False
    least: NonNegative = 0
    kl: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    entropy: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    tenant_share: PartShare = 0.5
    subject_share: PartShare = 0.25
    max_waiting: Positive = 1_000_000
    options: Table = {}

    def __post_init__(self) -> None:
        if self.least > self.max_waiting:
            raise ValueError(
                f"least: got {self.least}, expected at most max_waiting = {self.max_waiting}: no step would come"
            )

    @property
    def exponent(self) -> float:
        """`correction`, or what it is where it was left out."""
        return float(self.max_uses > 1) if self.correction is None else self.correction


class WarmupConfig(Section, frozen=True):
    """[trainer.warmup]: supervised steps before anything else. lane: whose experiences, under that lane's loss.

    stop_at: greedy accuracy on demonstrations that are held out ends it. every: steps from one look at it to the next.
    min_steps: before the first look. max_steps: ends it in any case. learning_rate: of the warm-up alone. batch: sequences
    per step. min_experiences: it begins when so many have arrived in the
    lane.

    Example: WarmupConfig(stop_at=0.3, every=5, max_steps=400)
    """

    lane: Lane = "expert"
    stop_at: Share = 0.30
    every: Positive = 5
    min_steps: NonNegative = 0
    max_steps: Positive = 400
    min_experiences: Positive = 64
    learning_rate: Above0 = 1e-3
    batch: Positive = 64


class CriticConfig(Section, frozen=True):
    """[trainer.critic]: values for a loss that wants them (ppo). A backbone of its own, begun as a copy of the policy that
    training begins from (the warmed-up one where there is a warm-up; policy.model where it joins a run that has started).

    learning_rate: of the critic. gamma, gae_lambda: of the advantages; they count sampled tokens, not what was observed
    between turns. value_clip: how far a value may move from what it was before the batch and still be pulled, 0 for no
    bound. gradient_clip: norm. normalize: advantages of a step to mean 0 and variance 1.

    truncated: what the end of a truncated episode is worth. "reward": its reward, and nothing comes after it, as for any
    other end. "bootstrap": the value of its last state, and its reward is not looked at; for rewards that a cut-off answer
    cannot earn. It needs episodes that do end: values of states from which none does are free to drift. Both would count
    the same answer twice. Of an episode in several parts only the last one can be bootstrapped; the others take the
    episode's reward.

    Example: CriticConfig(learning_rate=1e-5, gae_lambda=0.95)
    """

    learning_rate: Above0 = 1e-5
    gamma: Share = 1.0
    gae_lambda: Share = 0.95
    value_clip: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.2
    gradient_clip: Above0 = 1.0
    normalize: bool = True
    truncated: Literal["reward", "bootstrap"] = "reward"


class LoraConfig(Section, frozen=True):
    """[trainer.lora]: train a low-rank adapter (LoRA, arXiv:2106.09685) and leave the model's own weights as they are. Only
    the adapter is trained, checkpointed, and published: W + alpha / rank · B A in place of W, where B begins as zeros.

    rank: of B A. alpha: scales it; keep alpha / rank when you change rank. targets: the matrices that get one, each by the
    end of its module's name ("q_proj"), or "all-linear" for every linear module but the output matrix (of a model that takes
    pictures: of its text model). dropout: 0; the engine does not drop out, and its logprobs are the trainer's.

    A learning rate about ten times that of full weights is usual. Of a run that has begun, none of this may change.

    Example: LoraConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    """

    rank: Positive = 16
    alpha: Positive = 32
    targets: tuple[str, ...] = ("all-linear",)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dropout:
            raise ValueError(
                f"dropout: got {self.dropout}, expected 0: the engine samples without dropout, so that recorded logprobs would "
                "not be those that the trainer computes"
            )


class Schedule(Section, frozen=True):
    """[trainer.schedule]: what becomes of the learning rate after the warm-up: held, then falling on a line, then held again.

    hold_steps: steps at the full rate. decay_steps: over which it falls. final: share of the rate that is left, 1 to hold it
    for good.

    Example: Schedule(hold_steps=100, decay_steps=100, final=0.1)
    """

    hold_steps: NonNegative = 0
    decay_steps: Positive = 100
    final: Share = 1.0


class TrainerGuardConfig(Section, frozen=True):
    """[trainer.guard]: when a step is refused or an alarm is raised, measured by the median of the steps before it.

    window: steps whose median counts. min_steps: before anything is compared. grad_norm: times the median above which a
    gradient changes nothing (before clipping; 0 for no limit). entropy, reward: share of the median below which the
    alarms `entropy_collapse`, `reward_collapse` are raised, 0 for never; they halt where `halt_on` says so. probe_shift:
    nats by which a version's logprobs of a few recent sequences may differ from the version before, on average per token;
    one that differs more is not published. 0 for any; a fresh process has nothing to compare its first version with.

    Example: TrainerGuardConfig(grad_norm=20, entropy=0.2, reward=0.5, probe_shift=2)
    """

    window: Positive = 50
    min_steps: Positive = 10
    grad_norm: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 50.0
    entropy: Share = 0.0
    reward: Share = 0.0
    probe_shift: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0


class TrainerConfig(Section, frozen=True):
    """[trainer].

    learning_rate, gradient_clip (norm), betas, weight_decay: AdamW. staleness_decay: λ of λ^staleness on every ratio
    token, 1 is off; it biases towards fresh samples. scale_by_ess: multiply the learning rate by √(ESS/B); it shrinks
    steps on stale batches. reference_decay: the reference of a loss that has one (a KL, dpo) is that share of itself and
    the rest the policy after every step; 1 keeps it frozen. max_tokens_per_microbatch: bounds memory; one longer sequence
    goes alone. activation_checkpointing: compute activations again in the backward instead of keeping them. dtype: of the
    forward and of what is published. threads: of the CPU, pinned, 0 leaves torch's choice. checkpoint_every: in
    publications. keep_checkpoints: so many remain. version_every: a step without the usual lane waits until the last
    version is so old, unless the run drains, since every gateway and explorer loads each version; "" takes 5m
    where there is a lane live, else 0s. max_steps: optimizer
    steps after which the trainer ends, 0 for none. max_skips: steps in a row without effect after which the last good
    policy is restored. halt_on: alarms that do so at once. tensorboard: folder of event files, relative to the TOML, ""
    writes none. ranks: processes that train together. ranks_timeout: how long one of them waits for another before all
    start again; the sending of a step's rows, its longest microbatch and the reading of a checkpoint must fit into it.
    learner: what holds the model; see trainer.learners.

    routing: of a mixture of experts. "own": the model's routers choose the experts of each token. "replay": a token goes to
    the experts that the engine recorded while it sampled (`engine.options.routing`), with gate weights from the learner's
    own router logits over them, so that routers are trained; tokens without a record go where their router sends them.
    An engine and a trainer that round differently choose different experts for some tokens, and then importance ratios
    say more of that than of the policy; Ma et al. 2025 (arXiv:2510.11370) find that replay keeps such runs from collapsing.
    It does nothing for models without experts, and costs a byte per token, layer and expert of it on the log. The reference
    of a loss and the critic route by themselves. `<lane>/routing_differs` says how often a router would choose otherwise.
    weights_on_card: of a learner on a GPU: find there what a version changed, where its steps leave room for three copies of
    what a rank publishes; false copies all of it to the host.

    Example: TrainerConfig(lanes={"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)})
    """

    lanes: dict[Lane, LaneConfig] = msgspec.field(default_factory=lambda: {"usual": LaneConfig()})
    learning_rate: Above0 = 1e-6
    schedule: Schedule = Schedule()
    gradient_clip: Above0 = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    staleness_decay: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    scale_by_ess: bool = False
    reference_decay: Share = 1.0
    max_tokens_per_microbatch: Positive = 16384
    activation_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: NonNegative = 1
    checkpoint_every: Positive = 20
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=3, description="a whole number of 3 or more")] = 3
    version_every: OpenDuration = ""
    max_steps: NonNegative = 0
    max_skips: Positive = 3
    halt_on: tuple[str, ...] = ()
    guard: TrainerGuardConfig = TrainerGuardConfig()
    tensorboard: str = "tensorboard"
    warmup: WarmupConfig | None = None
    critic: CriticConfig | None = None
    lora: LoraConfig | None = None
    ranks: Positive = 1
    ranks_timeout: Duration = "10m"
    routing: Literal["own", "replay"] = "own"
    weights_on_card: bool = True
    learner: Use = Use(use="trainer.learners.torch:TorchLearner")

    def least(self, lane: Lane) -> int:
        """Sequences of a lane for which a step without the usual lane waits."""
        config = self.lanes[lane]
        return config.least or min(LEAST.get(lane, 1), config.max_waiting)

    @property
    def between_versions(self) -> str:
        """How old the last version is at a step without the usual lane."""
        return self.version_every or ("5m" if "live" in self.lanes else "0s")

    def __post_init__(self) -> None:
        if "usual" in self.lanes and self.lanes["usual"].draw == "priority":
            raise ValueError('lanes.usual.draw: got "priority", expected "spread": this lane is drawn in issue order')
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
