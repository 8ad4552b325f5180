"""Test that two programs compute one policy, by their logprobs of the same tokens, though each rounds in its own way.

A token counts by how far the two are apart per nat of its surprise s = -log π: e = |a - b| / (1 + s), so that unlikely tokens,
whose logits are noisiest, do not decide. The check compares the mean of e and its 95th percentile with a noise floor: the
difference between the same two programs on the versions accepted first (version 0, which is the model's folder).

    refused:  mean > K · floor.mean  or  p95 > K · floor.p95,   K = DRIFT · exp(SIGMAS · SPREAD · √(1/n₀ + 1/n))

n₀, n: tokens of the floor and of the probe. Assumed of honest programs: (1) another policy or other text scales the noise by at
most DRIFT; (2) the logarithm of either figure over n tokens is normal with a standard deviation of at most SPREAD/√n. For
independent half-normal e the mean has 0.76/√n and the percentile 0.95/√n; tokens of one sequence share their noise: a random
model of 12 layers under varied batch shapes had 2.4/√n and 3.9/√n. Then an honest version is refused with probability at most
2·Q(SIGMAS) = 6e-5. A fault is refused where it makes either figure K times the figure of rounding: 4 at 252 tokens. The check
cannot find less: a learning rate of 1e-6 moves logprobs less than bfloat16 rounds them, and a matrix × 1.01 by about as much.
An engine that can read its weights back does that too.

float32 rounds so little that one bound on the largest e finds every fault: LARGEST. SmolLM2-135M-Instruct after 42 versions of
reinforcement had 2.4e-5: 1.5e-4 nats at a token with s = 5.2.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

LARGEST = {"float32": 1e-4}
DRIFT = 1.5
SPREAD = 4.0
SIGMAS = 4.0
FLOOR_TOKENS = 4096  # that a floor is made of
SHARE = 0.95


class Agreement(msgspec.Struct, frozen=True):
    """Distance of two readings of the same tokens. tokens: how many. mean, p95, top: of e. largest: nats, not divided."""

    tokens: int
    mean: float
    p95: float
    largest: float
    top: float = 0.0


# MOST bounds the distance before the first measurement; no floor is below LEAST, the rounding of a forward in this dtype.
MOST = {"bfloat16": Agreement(0, 0.1, 0.4, 0.0), "float16": Agreement(0, 0.02, 0.1, 0.0)}
LEAST = {"bfloat16": Agreement(0, 2**-8, 2**-6, 0.0), "float16": Agreement(0, 2**-11, 2**-9, 0.0)}


def agreement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Agreement:
    """Distance of two readings of the same sequences; theirs is the reference. The distance of NaN and inf is infinite.

    Raises ValueError where they are of different lengths.
    """
    if [*map(len, ours)] != [*map(len, theirs)]:
        got, expected = ([*map(len, reading)] for reading in (ours, theirs))
        raise ValueError(f"got {got} logprobs, expected {expected}")
    ours_N, theirs_N = (
        np.array([value for sequence in reading for value in sequence], np.float64) for reading in (ours, theirs)
    )
    if not len(ours_N):
        return Agreement(0, 0.0, 0.0, 0.0)
    with np.errstate(invalid="ignore"):
        apart_N = np.abs(ours_N - theirs_N)
        each_N = apart_N / (1.0 - np.minimum(theirs_N, 0.0))
    sound = bool(np.isfinite(apart_N).all() and np.isfinite(each_N).all())
    figures = (each_N.mean(), np.quantile(each_N, SHARE), apart_N.max(), each_N.max()) if sound else (math.inf,) * 4
    return Agreement(len(ours_N), *map(float, figures))


def disagreement(found: Agreement, floor: Agreement | None, dtype: str) -> str:
    """Reason why two programs do not compute one policy, "" where they may. floor: None before anything was measured."""
    if most := LARGEST.get(dtype):
        said = f"logprobs differ by {found.top:.2e} per nat of surprise, expected at most {most:.0e}"
        return "" if found.top <= most else said
    most_mean, most_p95 = bounds(found.tokens, floor, dtype)
    if found.mean <= most_mean and found.p95 <= most_p95:
        return ""
    return (
        f"logprobs of {found.tokens} tokens differ by {found.mean:.2e} in the mean and {found.p95:.2e} at the 95th percentile "
        f"(per nat of surprise, largest {found.largest:.2e}), expected at most {most_mean:.2e} and {most_p95:.2e}"
    )


def bounds(tokens: int, floor: Agreement | None, dtype: str) -> tuple[float, float]:
    """Largest accepted mean and 95th percentile for this number of tokens."""
    most, least = MOST[dtype], LEAST[dtype]
    if floor is None or not floor.tokens or not tokens:
        return most.mean, most.p95
    factor = DRIFT * math.exp(SIGMAS * SPREAD * math.sqrt(1 / floor.tokens + 1 / tokens))
    return min(most.mean, factor * max(least.mean, floor.mean)), min(most.p95, factor * max(least.p95, floor.p95))


def joined(floor: Agreement | None, found: Agreement) -> Agreement:
    """The floor with the accepted `found`, until it is made of FLOOR_TOKENS; then it stays, so that no fault can raise it."""
    if floor is None or not floor.tokens:
        return found
    if floor.tokens >= FLOOR_TOKENS:
        return floor
    tokens = floor.tokens + found.tokens
    mean, p95 = (
        (before * floor.tokens + now * found.tokens) / tokens
        for before, now in ((floor.mean, found.mean), (floor.p95, found.p95))
    )
    return Agreement(tokens, mean, p95, max(floor.largest, found.largest))
