"""Objectives: a loss is a plain function of sampled tokens, `loss(inputs, *, options) -> LossOutput`, loaded by name.

Guarantees: no loss forms an importance ratio from a logprob that is not the policy's own; the value a lane adds is
weight · Σ loss / (number of sampled tokens, sequences or pairs, as the loss asks, of the lane in the whole step),
however the step was cut into microbatches and ranks. The MIX of lanes, (1-m)·L_RL(usual) + m·L_SFT(expert), is that sum
with lane weights 1-m and m.

A lane may add two penalties to any loss: a pull to the reference and an entropy bonus, both means over the lane's sampled
tokens, with the items' weights, times the lane's weight. The entropy is exact over the vocabulary, under the temperature each
token was sampled with; the KL is estimated from the sampled token. Without them nothing is computed.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import torch

from infra.settings.plugin import load, option_defaults
from schemas.errors import ConfigError
from schemas.fields import Lane
from trainer.config import LOSSES, LaneConfig, loss_use
from trainer.losses.offpolicy import reference_k3, required, truncated_weight

NEEDS_ATTRIBUTE = "__headrace_needs__"

Mean = Literal["tokens", "sequences", "pairs"]
Asked = Literal["minibatches", "proximal"]
Bound = Callable[..., float]
Marked = Callable[["Loss"], "Loss"]


class LossInputs(msgspec.Struct, frozen=True, kw_only=True):
    """N sampled tokens of a lane. All fields are [N]; logprobs are at the temperature of each token's sampling.

    logprob: log π_θ, the only input with a gradient (besides entropy). behaviour: log μ. proximal: log π_p, None unless
    requested. reference: log π_ref, None unless requested. teacher: log π_T, None unless requested. advantage: advantage of the
    token. staleness: policy version before the step minus the version that sampled. ratio: True if μ is the policy's own
    probability. sequence: index of the token's sequence, from 0; sequences are complete. pair: 2p for the chosen and 2p + 1 for
    the rejected side of pair p; pairs are complete; -1 for none. bound: result of `Needs.bound` over the whole step; with a
    teacher, the mean of log π_T - log μ. entropy: entropy of π_θ over the vocabulary, with its gradient, None unless requested.
    """

    logprob: torch.Tensor
    behaviour: torch.Tensor
    advantage: torch.Tensor
    staleness: torch.Tensor
    ratio: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher: torch.Tensor | None = None
    sequence: torch.Tensor | None = None
    pair: torch.Tensor | None = None
    bound: float | None = None
    entropy: torch.Tensor | None = None

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
    """Result of a loss for N tokens.

    loss: [N], loss terms with their gradient. clipped: [N] bool, tokens that a clip or mask silenced, or None.
    """

    loss: torch.Tensor
    clipped: torch.Tensor | None = None


Loss = Callable[..., LossOutput]


class Needs(msgspec.Struct, frozen=True):
    """Requirements of a loss in addition to its options.

    ratio: True if it needs μ to be the policy's own probability. mean: unit of the mean: tokens, sequences or pairs. reference:
    True if it needs log π_ref. teacher: True if it needs log π_T. critic: True if it needs token advantages from a critic.
    bound: function of log w [M] and A [M] of the whole step, and of the loss's options that it names, to `LossInputs.bound`.
    advantage: True if it learns nothing from advantages of 0. asks: its options that the learner reads: minibatches, proximal
    (see Objective).
    """

    ratio: bool = True
    mean: Mean = "tokens"
    reference: bool = False
    teacher: bool = False
    critic: bool = False
    bound: Bound | None = None
    advantage: bool = True
    asks: tuple[Asked, ...] = ()


class Objective(msgspec.Struct, frozen=True):
    """A lane's loss, bound to its options.

    function: the loss. weight: multiplies the lane's mean. minibatches: optimizer steps per batch it asks for. proximal: ""
    (none), "recompute" (a forward before the first of them) or "log-linear" (made inside the loss). ratio, reference, mean,
    teacher, critic, advantage: see Needs. bound: the function of Needs with its options, or None. kl, entropy: of the lane,
    for any loss.
    """

    function: Callable[[LossInputs], LossOutput]
    weight: float
    ratio: bool = True
    minibatches: int = 1
    proximal: str = ""
    reference: bool = False
    mean: Mean = "tokens"
    teacher: bool = False
    critic: bool = False
    bound: Callable[[np.ndarray, np.ndarray], float] | None = None
    kl: float = 0.0
    entropy: float = 0.0
    advantage: bool = True


def needs(
    *,
    ratio: bool = True,
    mean: Mean = "tokens",
    reference: bool = False,
    teacher: bool = False,
    critic: bool = False,
    bound: Bound | None = None,
    advantage: bool = True,
    asks: tuple[Asked, ...] = (),
) -> Marked:
    """Declare the requirements of a loss, see Needs."""

    def attach(function: Loss) -> Loss:
        setattr(function, NEEDS_ATTRIBUTE, Needs(ratio, mean, reference, teacher, critic, bound, advantage, asks))
        return function

    return attach


def open_objective(lane: LaneConfig, where: str = "trainer.lanes") -> Objective:
    """The objective a lane names: a built-in loss or `module:name`. Raises ConfigError.

    The mark (`needs`) of a loss, and the options that the mark names, state its requirements on the learner.
    """
    use = loss_use(lane.loss)
    if ":" not in use:
        raise ConfigError(f'{where}.loss: got "{lane.loss}", expected one of {", ".join(LOSSES)} or "module:name"')
    bound = load(use, lane.options, where)
    if not callable(bound):
        raise ConfigError(f"{where}.loss: {use} is a {type(bound).__name__}, expected a function")
    settings = option_defaults(bound)
    wanted: Needs = getattr(getattr(bound, "func", bound), NEEDS_ATTRIBUTE, Needs())
    if unsaid := sorted({*get_args(Asked)} & settings.keys() ^ {*wanted.asks}):
        raise ConfigError(
            f"{where}.loss: {use}: got the options {sorted(settings)} and @needs(asks={wanted.asks}), expected "
            f"{', '.join(unsaid)} in both or in neither"
        )
    minibatches, proximal = int(settings.get("minibatches", 1)), str(settings.get("proximal", ""))
    if minibatches < (2 if proximal == "recompute" else 1):
        raise ConfigError(
            f"{where}.options.minibatches: got {minibatches}, expected 2 or more with a recomputed proximal policy "
            "(with one step π_θ is still π_p, and no clip acts), 1 or more without"
        )
    return Objective(
        function=bound,
        weight=lane.weight,
        ratio=wanted.ratio,
        minibatches=minibatches,
        proximal=proximal,
        reference=wanted.reference or lane.kl > 0,
        mean=wanted.mean,
        teacher=wanted.teacher,
        critic=wanted.critic,
        bound=_with_options(wanted.bound, settings),
        kl=lane.kl,
        entropy=lane.entropy,
        advantage=wanted.advantage,
    )


def open_objectives(lanes: Mapping[Lane, LaneConfig]) -> dict[Lane, Objective]:
    """The objective of every lane. Raises ConfigError."""
    return {lane: open_objective(config, f"trainer.lanes.{lane}") for lane, config in lanes.items()}


def lane_loss(
    objective: Objective, inputs: LossInputs, weight: torch.Tensor, denominator: float
) -> tuple[torch.Tensor, LossOutput]:
    """The share of this lane's tokens in the step's loss.

    weight: [N], multiplies the terms. denominator: tokens, sequences or pairs of the lane in the whole step (an m-th of
    them in each of m minibatches).
    """
    if objective.ratio:
        inputs.require_ratio()
    output = objective.function(inputs)
    return objective.weight * (output.loss * weight).sum() / denominator, output


def _with_options(bound: Bound | None, settings: dict[str, Any]) -> Callable[[np.ndarray, np.ndarray], float] | None:
    """The function, bound to the loss's options that it names."""
    if bound is None:
        return None
    named = {name: settings[name] for name in option_defaults(bound)}
    return lambda log_weight, advantage: bound(log_weight, advantage, **named)


# A larger importance weight is cut to this, as the losses do: beyond it the estimate of the KL is biased, towards 0.
KL_CAP = 5.0


class Penalty(NamedTuple):
    """The penalties of a lane over N tokens.

    loss: the term it adds to the step's loss. kl, entropy: [N], as measured, without gradient; None where not asked for.
    """

    loss: torch.Tensor
    kl: torch.Tensor | None
    entropy: torch.Tensor | None


def lane_penalty(objective: Objective, inputs: LossInputs, weight: torch.Tensor, num_tokens: float) -> Penalty:
    """kl·KL(π_θ‖π_ref) - entropy·H(π_θ) of these tokens. weight: [N]. num_tokens: of the lane in the whole step."""
    terms, kl = torch.zeros_like(inputs.logprob), None
    if objective.kl > 0:
        reference = required(inputs.reference, "reference")
        kl = reference_k3(inputs.logprob, reference, importance(inputs))
        terms = terms + objective.kl * kl
    if objective.entropy > 0:
        terms = terms - objective.entropy * required(inputs.entropy, "entropy")
    loss = objective.weight * (terms * weight).sum() / num_tokens
    return Penalty(
        loss, None if kl is None else kl.detach(), None if inputs.entropy is None else inputs.entropy.detach()
    )


def importance(inputs: LossInputs) -> torch.Tensor:
    """min(π_θ/μ, KL_CAP), and 1 where μ is not the policy's own (demonstrations): there the term is no divergence, but
    pulls the token's probability to the reference's, as ½(log(π_θ/π_ref))² does.
    """
    log_weight = (inputs.logprob.detach() - inputs.behaviour).masked_fill(~inputs.ratio, 0.0)
    return truncated_weight(log_weight, KL_CAP)
