"""filter: length, repetition and truncation of what was sampled."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from infra.chain.processor import Drop, processor
from schemas import Experience

WINDOW = 16
MIN_LOOP_TOKENS = 64
MAX_LOOKED_AT = 65_536  # tokens, from the end: a loop reaches the end


@processor(version=1, inline=True)
def filter(
    experience: Experience,
    *,
    min_tokens: int,
    max_tokens: int,
    max_repetition: float,
    truncated: Literal["keep", "drop"],
) -> Experience | Drop:
    """Drop answers that are too short, too long, looping or cut off; 0 is no limit. Evals and demonstrations pass."""
    if experience.suite or experience.is_given:
        return experience
    num_sampled = experience.num_sampled
    if num_sampled < min_tokens:
        return Drop("too short", f"{num_sampled} tokens, expected {min_tokens} or more")
    if max_tokens and num_sampled > max_tokens:
        return Drop("too long", f"{num_sampled} tokens, expected at most {max_tokens}")
    if truncated == "drop" and experience.end == "truncated":
        return Drop("truncated", f"cut off after {num_sampled} tokens")
    if max_repetition < 1 and num_sampled >= MIN_LOOP_TOKENS:
        share = repetition(sampled_tokens(experience)[-MAX_LOOKED_AT:])
        if share > max_repetition:
            return Drop("repetition", f"{share:.2f} of the {WINDOW}-token windows repeat, expected {max_repetition:g}")
    return experience


def sampled_tokens(experience: Experience) -> npt.NDArray[np.uint32]:
    """The tokens inside spans, one after the other."""
    return np.concatenate([experience.tokens[span.start : span.stop] for span in experience.spans])


def repetition(tokens: npt.NDArray[np.uint32]) -> float:
    """Share of 16-token windows that occurred before in `tokens`; 0 for fewer than 17 tokens."""
    if len(tokens) <= WINDOW:
        return 0.0
    # A polynomial hash modulo 2**64: equal windows are equal, and 65,536 of them collide once in 10**10 such answers.
    hashes = tokens.astype(np.uint64)
    width = 1
    while width < WINDOW:  # a window is two of half its width
        hashes = hashes[:-width] + np.uint64(pow(0x9E3779B97F4A7C15, width, 2**64)) * hashes[width:]
        width *= 2
    hashes.sort()  # counting them so takes a fraction of np.unique's time
    return 1.0 - (1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))) / len(hashes)
