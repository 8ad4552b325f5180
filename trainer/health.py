"""The health of a step: diagnostics, alarms, and the guard that refuses a step or rolls back. Pure.

Diagnostics are token-weighted and per lane, named `<lane>/<name>`:

    tokens · entropy                  sampled tokens; -mean log π_θ of them (an estimate, exact only on-policy)
    entropy_exact · kl_reference      over the vocabulary; estimate of KL(π_θ‖π_ref); where the lane has such a term
    ess                               ESS/B of the importance weights w = π_θ/μ
    weight_mean · weight_max          of w
    clip_positive · clip_negative     share of tokens with A>0, A<0 that the loss clipped or masked
    k1 · k3 · chi2                    estimates of KL(μ‖π_θ), twice, and of χ²(π_θ‖μ)
    staleness_mean · _p95 · _max      policy versions between sampling and training
    mixed_versions                    share of sequences that more than one version sampled
    mismatch_tokens · mismatch_abs_max · mismatch_k3   engine against trainer on tokens of the very version trained

The guard maps a state to a state and a verdict. The state is part of the position, so that a resumed trainer refuses the steps
that an uninterrupted one would.

    gradient not finite, or larger than grad_norm × its running median   the step changes nothing (skip)
    max_skips of these in a row, or an alarm that is set to halt         the last good policy comes back (rollback)
    weights not finite, or the probe moved by more than probe_shift      rollback, before anything is published
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from infra.policies.policy import Probe
from schemas.fields import LANES
from trainer.config import THRESHOLDS, TrainerGuardConfig
from trainer.losses.offpolicy import chi_square, effective_share, k1, k3


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of one forward for N sampled tokens; all [N].

    logprob: log π_θ. behaviour: log μ as recorded. advantage: as the loss used it. staleness: policy version before the step
    minus behaviour version. version: of the behaviour policy. ratio: μ is the policy's own. clipped: silenced by the loss.
    exact: the trainer had the weights of the policy version itself, and the engine sampled the token with keys and values of
    that version, so at staleness 0 the ratio compares engine with trainer. lane: index into LANES. sequence: index into the
    packed items. kl, entropy: as measured by the lane's penalty, NaN without a penalty.
    """

    logprob: np.ndarray
    behaviour: np.ndarray
    advantage: np.ndarray
    staleness: np.ndarray
    version: np.ndarray
    ratio: np.ndarray
    clipped: np.ndarray
    exact: np.ndarray
    lane: np.ndarray
    sequence: np.ndarray
    kl: np.ndarray
    entropy: np.ndarray


def join(parts: Sequence[Observed]) -> Observed:
    names = Observed.__struct_fields__
    return Observed(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def select(observed: Observed, chosen: np.ndarray) -> Observed:
    """The tokens where `chosen`, [N] bool, holds."""
    return Observed(**{name: getattr(observed, name)[chosen] for name in Observed.__struct_fields__})


def diagnose(observed: Observed) -> dict[str, float]:
    """Diagnostics of a step by `<lane>/<name>`; diagnostics of ratios only for lanes with ratios."""
    values: dict[str, float] = {}
    for index in np.unique(observed.lane):
        of_lane = select(observed, observed.lane == index)
        found = {"tokens": float(len(of_lane.logprob)), "entropy": -float(of_lane.logprob.mean())}
        for name, measured in (("kl_reference", of_lane.kl), ("entropy_exact", of_lane.entropy)):
            if not np.isnan(measured).all():
                found[name] = float(measured.mean())
        with_ratio = select(of_lane, of_lane.ratio)
        if len(with_ratio.logprob):
            found |= _weights(with_ratio) | _staleness(with_ratio) | _mismatch(with_ratio)
        values |= {f"{LANES[index]}/{name}": value for name, value in found.items()}
    return values


def alarms(values: Mapping[str, float]) -> tuple[str, ...]:
    """The names of values outside their range; one that is not a number is outside any."""
    ranges = {name: THRESHOLDS.get(name.rpartition("/")[2], (-np.inf, np.inf)) for name in values}
    return tuple(name for name, (low, high) in ranges.items() if not low <= values[name] <= high)


def _weights(seen: Observed) -> dict[str, float]:
    log_weight = seen.logprob.astype(np.float64) - seen.behaviour
    weight = np.exp(log_weight)
    found = {
        "ess": effective_share(weight),
        "weight_mean": float(weight.mean()),
        "weight_max": float(weight.max()),
        "k1": float(k1(log_weight).mean()),
        "k3": float(k3(log_weight).mean()),
        "chi2": chi_square(weight),
    }
    for name, of_sign in (("clip_positive", seen.advantage > 0), ("clip_negative", seen.advantage < 0)):
        if of_sign.any():
            found[name] = float(seen.clipped[of_sign].mean())
    return found


def _staleness(seen: Observed) -> dict[str, float]:
    newest = np.full(int(seen.sequence.max()) + 1, np.iinfo(np.int64).min)
    oldest = np.full_like(newest, np.iinfo(np.int64).max)
    np.maximum.at(newest, seen.sequence, seen.version)
    np.minimum.at(oldest, seen.sequence, seen.version)
    present = np.unique(seen.sequence)
    return {
        "staleness_mean": float(seen.staleness.mean()),
        "staleness_p95": float(np.quantile(seen.staleness, 0.95, method="inverted_cdf")),
        "staleness_max": float(seen.staleness.max()),
        "mixed_versions": float((newest[present] != oldest[present]).mean()),
    }


def _mismatch(seen: Observed) -> dict[str, float]:
    fresh = seen.exact & (seen.staleness == 0)
    if not fresh.any():
        return {"mismatch_tokens": 0.0}
    log_weight = seen.logprob[fresh].astype(np.float64) - seen.behaviour[fresh]
    return {
        "mismatch_tokens": float(fresh.sum()),
        "mismatch_abs_max": float(np.abs(log_weight).max()),
        "mismatch_k3": float(k3(log_weight).mean()),
    }


Verdict = Literal["go", "skip", "rollback"]
ANY_FINITE = sys.float_info.max


class GuardState(msgspec.Struct, frozen=True):
    """Earlier steps that the guard compares the next one with.

    skips: consecutive steps that changed nothing. norms, entropies, rewards: of the last steps that changed the weights,
    oldest first.
    """

    skips: int = 0
    norms: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()
    rewards: tuple[float, ...] = ()


def norm_limit(state: GuardState, config: TrainerGuardConfig) -> float:
    """The largest norm of a gradient that still moves the weights."""
    usual = _median(state.norms, config)
    return config.grad_norm * usual if config.grad_norm and usual else ANY_FINITE


def passed(
    state: GuardState,
    config: TrainerGuardConfig,
    *,
    grad_norm: float,
    entropy: float | None = None,
    reward: float | None = None,
) -> GuardState:
    """The state after a step that changed the weights."""
    return GuardState(
        norms=_grown(state.norms, grad_norm, config),
        entropies=_grown(state.entropies, entropy, config),
        rewards=_grown(state.rewards, reward, config),
    )


def refused(state: GuardState) -> GuardState:
    """The state after a step that changed nothing."""
    return msgspec.structs.replace(state, skips=state.skips + 1)


def rolled_back(state: GuardState) -> GuardState:
    """The state after going back to weights that had `state`."""
    return msgspec.structs.replace(state, skips=0)


def collapses(
    state: GuardState, config: TrainerGuardConfig, *, entropy: float | None, reward: float | None
) -> tuple[str, ...]:
    """Alarms for an entropy or a reward far below its median in earlier steps."""
    found = []
    for name, value, share, before in (
        ("entropy_collapse", entropy, config.entropy, state.entropies),
        ("reward_collapse", reward, config.reward, state.rewards),
    ):
        usual = _median(before, config)
        if share and usual is not None and value is not None and not value >= usual - (1 - share) * abs(usual):
            found.append(name)
    return tuple(found)


def judge(
    state: GuardState,
    *,
    finite: bool,
    alarms: tuple[str, ...],
    halting: frozenset[str],
    max_skips: int,
    grad_norm: float = math.nan,
    limit: float = ANY_FINITE,
) -> tuple[Verdict, str]:
    """The verdict on one step, and why.

    finite: the step changed the weights. alarms: raised by the step's diagnostics. halting: alarms the configuration set
    to stop publication. max_skips: consecutive steps without effect after which the last good policy is restored.
    limit: of grad_norm, for learners that cannot refuse a step before it is done.
    """
    fatal = sorted(halting.intersection(alarms))
    if fatal:
        return "rollback", f"alarm {', '.join(fatal)}"
    if finite and grad_norm > limit:
        return "rollback", f"a gradient of norm {grad_norm:.3g} moved the weights, expected at most {limit:.3g}"
    if finite:
        return "go", ""
    reason = f"gradient norm {grad_norm:.3g}" if math.isfinite(grad_norm) else "loss or gradient not finite"
    if state.skips + 1 >= max_skips:
        return "rollback", f"{state.skips + 1} steps in a row changed nothing, the last: {reason}"
    return "skip", reason


def unhealthy(not_finite: str, before: Probe | None, now: Probe | None, config: TrainerGuardConfig) -> str:
    """Why weights must not be published; "" where nothing speaks against it.

    not_finite: name of a tensor that holds NaN or infinity, "" where none does. before, now: of the same sequences, under
    the version published last and under these weights.
    """
    if not_finite:
        return f"{not_finite} holds values that are not finite"
    if not config.probe_shift or before is None or now is None:
        return ""
    moved = [
        abs(new - old)
        for olds, news in zip(before.logprobs, now.logprobs, strict=True)
        for old, new in zip(olds, news, strict=True)
    ]
    shift = sum(moved) / max(len(moved), 1)
    if shift <= config.probe_shift:
        return ""
    return f"the probe moved by {shift:.3g} nats per token in one version, expected at most {config.probe_shift:g}"


def _median(values: tuple[float, ...], config: TrainerGuardConfig) -> float | None:
    return statistics.median(values) if len(values) >= config.min_steps else None


def _grown(values: tuple[float, ...], value: float | None, config: TrainerGuardConfig) -> tuple[float, ...]:
    return (*values, value)[-config.window :] if value is not None and math.isfinite(value) else values
