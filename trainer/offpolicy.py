"""Off-policy mathematics: pure functions of logprobs, the same for numpy arrays and torch tensors where both are said.

Notation, per sampled token: μ behaviour, π_p proximal, π_θ current; w = π_θ/μ, ρ = π_p/μ, r = π_θ/π_p; A advantage.
"""

from typing import TypeVar

import numpy as np
import torch

Values = TypeVar("Values", np.ndarray, torch.Tensor)


def clipped_surrogate(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """min(rA, clip(r, 1-low, 1+high)A), to be maximized. PPO, arXiv 1707.06347 eq. 7; two bounds: DAPO, 2503.14476."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def surrogate_clips(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Where the clipped surrogate is flat: the ratio already moved past its bound in the advantage's direction."""
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


def divergence_mask(
    logprob: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, delta: float
) -> torch.Tensor:
    """Where a step would push further a probability that already moved by more than delta (a total-variation region).

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


def score_function_k1(logprob: torch.Tensor, reference: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sg(w·log(π_θ/π_ref))·log π_θ: its gradient is that of KL(π_θ‖π_ref), sampled from μ. arXiv 2506.09477."""
    distance = (logprob - reference).detach()
    return weight.detach() * distance * logprob


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


def ess_learning_rate(learning_rate: float, share: float) -> float:
    """lr·√(ESS/B): uneven weights leave fewer samples in a batch, so it takes a smaller step.

    Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (2026). It biases the run towards
    fresh batches.
    """
    return float(learning_rate * np.sqrt(share))
