"""Off-policy mathematics: pure functions of logprobs, the same for numpy arrays and torch tensors where the signature has both.

Notation, per sampled token: μ behaviour, π_p proximal, π_θ current; w = π_θ/μ, ρ = π_p/μ, r = π_θ/π_p; A advantage.
"""

from typing import Annotated, TypeVar

import msgspec
import numpy as np
import torch

Values = TypeVar("Values", np.ndarray, torch.Tensor)
DualBound = Annotated[float, msgspec.Meta(gt=1, description="a number above 1")]


def clipped_surrogate(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(rA, clip(r, 1-low, 1+high)A), to be maximized. PPO, arXiv 1707.06347 eq. 7; two bounds: DAPO, 2503.14476."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def dual_clip(surrogate: torch.Tensor, advantage: torch.Tensor, bound: float | None) -> torch.Tensor:
    """max(surrogate, cA) where A < 0: a bad token that has become c times as likely is pushed down no harder, with no
    gradient. bound: c, above 1; None leaves the surrogate. Dual-clip PPO, arXiv 1912.09729 eq. 5.
    """
    if bound is None:
        return surrogate
    return torch.where(advantage < 0, torch.maximum(surrogate, bound * advantage), surrogate)


def surrogate_clips(
    ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, dual: float | None = None
) -> torch.Tensor:
    """True where the clipped surrogate is flat: the ratio already moved past its bound in the advantage's direction, or, where
    A < 0, past the second bound in the other.
    """
    flat = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    return flat if dual is None else flat | ((advantage < 0) & (ratio > dual))


def divergence_mask(
    logprob: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, delta: float
) -> torch.Tensor:
    """True where a step would push further a probability that already moved by more than delta (a total-variation region).

    A>0 and π_θ-μ > δ, or A<0 and π_θ-μ < -δ. In probabilities, not ratios: a rare token may change its ratio freely.
    DPPO, arXiv 2602.04879.
    """
    moved = logprob.exp() - behaviour.exp()
    return ((advantage > 0) & (moved > delta)) | ((advantage < 0) & (moved < -delta))


def truncated_weight(log_weight: torch.Tensor, cap: float) -> torch.Tensor:
    """min(e^log_weight, cap). IMPALA, arXiv 1802.01561 section 4.1; for token logprobs TIS (Yao et al. 2025)."""
    return log_weight.exp().clamp(max=cap)


def log_linear_proximal(behaviour: torch.Tensor, current: torch.Tensor, staleness: torch.Tensor) -> torch.Tensor:
    """log π_p between log μ and log π_θ, without a forward: (1-α) log μ + α log π_θ. A-3PO, arXiv 2512.06547.

    α = (v_p - v_b)/(v_θ - v_b) with v_p the version before the step and v_θ = v_p + 1 the one being made, so
    α = s/(s+1) at staleness s = v_p - v_b; 0 where v_θ <= v_b (fresh tokens: π_p is μ itself).
    """
    stale = staleness.clamp(min=0).to(behaviour.dtype)
    alpha = stale / (stale + 1)
    return (1 - alpha) * behaviour + alpha * current


def k1(log_weight: Values) -> Values:
    """Unbiased estimate of KL(μ‖π) from samples of μ: -log w. Schulman, "Approximating KL divergence" (2020)."""
    return -log_weight


def k3(log_weight: Values) -> Values:
    """Unbiased, never negative estimate of KL(μ‖π) from samples of μ: w - 1 - log w. Schulman (2020)."""
    # expm1 keeps the difference exact near w = 1, where this estimator is quadratic in log w.
    if isinstance(log_weight, torch.Tensor):
        return torch.expm1(log_weight) - log_weight
    return np.asarray(np.expm1(log_weight) - log_weight)


def reference_k3(logprob: torch.Tensor, reference: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """w·k3(π_ref/π_θ), w = π_θ/μ: of samples of μ an unbiased estimate of KL(π_θ‖π_ref), and so is its gradient.

    DeepSeek-V3.2, arXiv 2512.02556 eq. 7. Without w, the gradient of k3 itself is that of KL(π_ref‖π_θ)
    even on-policy, and its slope 1 - π_ref/π_θ has no bound; with w and its derivative it is w·log(π_θ/π_ref). This
    function has the latter slope, so that a truncated w leaves a pull in the same direction. The states are sampled from μ: w
    reweights the token alone, not its prefix.
    """
    distance = (logprob - reference).detach()
    return weight.detach() * (k3(-distance) + distance * (logprob - logprob.detach()))


def chi_square(weight: np.ndarray) -> float:
    """Estimate of χ²(π‖μ) = E_μ[w²] - 1: the variance of the weights. 0.0 without samples."""
    return float(np.mean(np.square(weight, dtype=np.float64))) - 1 if len(weight) else 0.0


def effective_share(weight: np.ndarray) -> float:
    """ESS/B = (Σw)² / (B Σw²), Kong (1992): 1 where weights are equal, 1/B where one has all. 1.0 without samples."""
    squares = float(np.sum(np.square(weight, dtype=np.float64)))
    return float(np.sum(weight, dtype=np.float64)) ** 2 / (len(weight) * squares) if squares > 0 else 1.0


def staleness_weight(staleness: Values, decay: float) -> Values:
    """λ^staleness for tokens that are behind, 1 for the others. Biased on purpose: it forgets stale samples."""
    if isinstance(staleness, torch.Tensor):
        return torch.pow(decay, staleness.clamp(min=0))
    return np.asarray(np.power(decay, np.maximum(staleness, 0)))


def count(sequence: torch.Tensor) -> torch.Tensor:
    """Tokens of each sequence, [S]. sequence: [N] int64, from 0 without gaps."""
    return torch.bincount(sequence)


def sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens of each sequence, [S]. values: [N]."""
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each sequence, [S]."""
    return sums(values, sequence) / count(sequence)


def deal(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """A value per sequence as equal parts on its tokens, [N]. values: [S]."""
    return (values / count(sequence))[sequence]


def required(value: torch.Tensor | None, name: str) -> torch.Tensor:
    """The value; ValueError where a learner did not give it."""
    if value is None:
        raise ValueError(f"{name}: got none, expected one value per sampled token")
    return value


def shared(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The value that all tokens of a sequence share, to the bit; the mean where they differ (turns with advantages of their
    own); [S].
    """
    found = values.new_zeros(int(sequence.max()) + 1)
    found[sequence] = values
    return found if bool((found[sequence] == values).all()) else means(values, sequence)
