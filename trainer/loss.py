"""Objectives: a loss is a plain function of what was sampled, `loss(inputs, *, options) -> LossOutput`, loaded by name.

Guarantees: no loss ever forms an importance ratio from a logprob that is not the policy's own; the value a lane adds is
weight · Σ loss / (sampled tokens of the lane in the whole step), however the step was cut into microbatches and ranks.
The MIX of lanes, (1-m)·L_RL(usual) + m·L_SFT(expert), is that sum with lane weights 1-m and m.
"""

from collections.abc import Callable

import msgspec
import torch

from infra.plugin import load, option_defaults
from schemas.errors import ConfigError
from trainer.config import LaneConfig

BUILT_IN = ("dppo", "grpo", "decoupled", "tis", "sft")
SUPERVISED_ATTRIBUTE = "__headrace_supervised__"


class LossInputs(msgspec.Struct, frozen=True, kw_only=True):
    """N sampled tokens of one lane. All [N]; logprobs are under the temperature each token was sampled with.

    logprob: log π_θ, the only one with a gradient. behaviour: log μ. proximal: log π_p, where the loss asked for it.
    reference: log π_ref, likewise. staleness: policy version before the step minus behaviour version. ratio: μ is the
    policy's own.
    """

    logprob: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    staleness: torch.Tensor
    ratio: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    @property
    def log_weight(self) -> torch.Tensor:
        """log w = log π_θ - log μ; ValueError where some μ is not the policy's own."""
        self.require_ratio()
        return self.logprob - self.behaviour

    def require_ratio(self) -> None:
        """ValueError unless every token may meet an importance ratio."""
        if not bool(self.ratio.all()):
            raise ValueError(
                f"spans: got {int((~self.ratio).sum())} tokens with ratio=False in a lane whose loss forms importance "
                'ratios, expected none; drop them at the draw or give the lane loss = "sft"'
            )


class LossOutput(msgspec.Struct, frozen=True):
    """loss: [N], what each token adds, with its gradient. clipped: [N] bool, what a clip or mask silenced, or None."""

    loss: torch.Tensor
    clipped: torch.Tensor | None = None


Loss = Callable[..., LossOutput]


class Objective(msgspec.Struct, frozen=True):
    """A lane's loss, bound to its options.

    minibatches: optimizer steps per batch it asks for. proximal: "" (none), "recompute" (a forward before the first of
    them) or "log-linear" (made inside the loss). reference: wants the reference model's logprobs. ratio: forms
    importance ratios.
    """

    function: Callable[[LossInputs], LossOutput]
    weight: float
    ratio: bool = True
    minibatches: int = 1
    proximal: str = ""
    reference: bool = False


def supervised(function: Loss) -> Loss:
    """Mark a loss that never looks at μ, so that tokens without an importance ratio may come to it."""
    setattr(function, SUPERVISED_ATTRIBUTE, True)
    return function


def open_objective(lane: LaneConfig, where: str = "trainer.lanes") -> Objective:
    """The objective a lane names: a built-in loss or `module:name`. Raises ConfigError.

    What a loss needs of the learner is read from its own keyword parameters: `minibatches`, `proximal`, and `kl` (above
    0: a reference).
    """
    use = f"trainer.losses.{lane.loss}:{lane.loss}" if lane.loss in BUILT_IN else lane.loss
    if ":" not in use:
        raise ConfigError(f'{where}.loss: got "{lane.loss}", expected one of {", ".join(BUILT_IN)} or "module:name"')
    bound = load(use, lane.options, where)
    if not callable(bound):
        raise ConfigError(f"{where}.loss: {use} is a {type(bound).__name__}, expected a function")
    settings = option_defaults(bound)
    minibatches, proximal = int(settings.get("minibatches", 1)), str(settings.get("proximal", ""))
    if minibatches < (2 if proximal == "recompute" else 1):
        raise ConfigError(
            f"{where}.options.minibatches: got {minibatches}, expected 2 or more with a recomputed proximal policy "
            "(with one step π_θ is still π_p, and no clip acts), 1 or more without"
        )
    return Objective(
        function=bound,
        weight=lane.weight,
        ratio=not getattr(getattr(bound, "func", bound), SUPERVISED_ATTRIBUTE, False),
        minibatches=minibatches,
        proximal=proximal,
        reference=float(settings.get("kl", 0.0)) > 0,
    )


def lane_loss(
    objective: Objective, inputs: LossInputs, weight: torch.Tensor, num_lane_tokens: int
) -> tuple[torch.Tensor, LossOutput]:
    """What this lane's tokens add to the step's loss. weight: [N], multiplies the terms. num_lane_tokens: global."""
    if objective.ratio:
        inputs.require_ratio()
    output = objective.function(inputs)
    return objective.weight * (output.loss * weight).sum() / num_lane_tokens, output
