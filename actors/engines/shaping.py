"""Penalties, biases and cuts that a client asks for, as every engine but vLLM applies them."""

from collections.abc import Sequence

import numpy as np

from actors.engines.engine import Sampling, Shaping


def shaped_logits(
    logits_V: np.ndarray, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]
) -> np.ndarray:
    """Logits over the temperature, float64; bias and penalties come before it, top_k and min_p after it, as in vLLM."""
    shaping = sampling.shaping or Shaping()
    logits_V = logits_V.astype(np.float64)
    for token, bias in shaping.logit_bias:
        logits_V[token] += bias
    seen = np.unique(np.asarray([*prompt, *sampled]))
    logits_V[seen] *= np.where(logits_V[seen] > 0, 1 / shaping.repetition_penalty, shaping.repetition_penalty)
    if sampled:
        tokens, counts = np.unique(np.asarray(sampled), return_counts=True)
        logits_V[tokens] -= counts * shaping.frequency_penalty + shaping.presence_penalty
    logits_V /= sampling.temperature or 1.0
    if shaping.min_p:
        logits_V[logits_V < logits_V.max() + np.log(shaping.min_p)] = -np.inf
    if 0 < shaping.top_k < len(logits_V):
        logits_V[logits_V < np.partition(logits_V, -shaping.top_k)[-shaping.top_k]] = -np.inf
    return logits_V
