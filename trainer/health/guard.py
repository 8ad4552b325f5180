"""The divergence guard: which steps are refused, and what to do after each, decided from what the step reported.

Pure: a state goes in, a state and a verdict come out. The state is part of the position, so that a resumed trainer refuses
what an uninterrupted one would have.

    gradient not finite, or larger than grad_norm × its running median   the step changes nothing (skip)
    max_skips of these in a row, or an alarm that is set to halt         the last good policy comes back (rollback)
    weights not finite, or the probe moved by more than probe_shift      rollback, before anything is published
"""

import math
import statistics
import sys
from typing import Literal

import msgspec

from infra.policies.policy import Probe
from trainer.config import TrainerGuardConfig
from trainer.health.diagnostics import OutOfRange

Verdict = Literal["go", "skip", "rollback"]
ANY_FINITE = sys.float_info.max


class GuardState(msgspec.Struct, frozen=True):
    """What the guard compares the next step with.

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
) -> tuple[OutOfRange, ...]:
    """Alarms for an entropy or a reward far below what it was."""
    found = []
    for name, value, share, before in (
        ("entropy_collapse", entropy, config.entropy, state.entropies),
        ("reward_collapse", reward, config.reward, state.rewards),
    ):
        usual = _median(before, config)
        if share and usual is not None and value is not None and not value >= share * usual:
            found.append(OutOfRange(name, value, share * usual, math.inf))
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
