"""[trainer]: what the trainer reads of the TOML; lanes, objective, optimizer, learner, and when things are written."""

from typing import Annotated, Literal

import msgspec

from infra.config import NonNegative, Positive, Section, Table, Use
from schemas.records import Lane

Share = Annotated[float, msgspec.Meta(ge=0, le=1, description="a number from 0 to 1")]
Above0 = Annotated[float, msgspec.Meta(gt=0, description="a number above 0")]


class LaneConfig(Section, frozen=True):
    """[trainer.lanes.<lane>]: the objective of a lane and how it is drawn.

    loss: dppo, grpo, decoupled, tis or sft, or `module:name` of another; options are the loss's keyword parameters.
    weight: multiplies the lane's token mean; the gradient is the sum over lanes, so weights 1-m and m are the MIX loss.
    share: sequences drawn per sequence of the usual lane, 0 takes weight / (1 - weight). max_uses: how
    often one experience may be trained. bound: mean |log w| above which a group of an unpaced lane is dropped at the
    draw, 0 for none. optional: a step need not wait for this lane.

    Example: LaneConfig(loss="sft", weight=0.1, max_uses=4)
    """

    loss: str = "dppo"
    weight: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 1.0
    share: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    max_uses: Positive = 1
    bound: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    optional: bool = False
    options: Table = {}


class WarmupConfig(Section, frozen=True):
    """[trainer.warmup]: supervised steps before anything else. lane: whose experiences, under that lane's loss.

    stop_at: greedy accuracy on experiences with meta split "validation" that ends it, looked at `every` steps from
    `min_steps` on. max_steps: ends it in any case. batch: sequences per step. min_experiences: it begins when so many
    have arrived in the lane.

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


class TrainerConfig(Section, frozen=True):
    """[trainer].

    learning_rate, gradient_clip (norm), betas, weight_decay: AdamW. staleness_decay: λ of λ^staleness on every ratio
    token, 1 is off; it biases towards fresh samples. scale_by_ess: multiply the learning rate by √(ESS/B); it shrinks
    steps on stale batches. max_tokens_per_microbatch: bounds memory; one longer sequence goes alone. dtype: of the
    forward and of what is published. threads: of the CPU, pinned, 0 leaves torch's choice. checkpoint_every: in
    publications; keep_checkpoints of them remain. max_steps: optimizer steps after which the trainer ends, 0 for none.
    max_skips: steps in a row without effect after which the last good policy is restored. halt_on: alarms that do so at
    once.

    Example: TrainerConfig(lanes={"usual": LaneConfig(weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)})
    """

    lanes: dict[Lane, LaneConfig] = msgspec.field(default_factory=lambda: {"usual": LaneConfig()})
    learning_rate: Above0 = 1e-6
    gradient_clip: Above0 = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, msgspec.Meta(ge=0, description="a number of 0 or more")] = 0.0
    staleness_decay: Annotated[float, msgspec.Meta(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    scale_by_ess: bool = False
    max_tokens_per_microbatch: Positive = 16384
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: NonNegative = 1
    checkpoint_every: Positive = 20
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=3, description="a whole number of 3 or more")] = 3
    max_steps: NonNegative = 0
    max_skips: Positive = 3
    halt_on: tuple[str, ...] = ()
    warmup: WarmupConfig | None = None
    learner: Use = Use(use="trainer.learners.torch:TorchLearner")
