"""The running baseline of lone answers: what answers like them got lately, and how far that can be trusted.

    A = n / (n + n0) · (r - mean) / sqrt((n · variance + n0 · s0²) / (n + n0)),   cut to ±MAX_ADVANTAGE

n: answers seen, at most `WINDOW`; mean and variance are theirs, exact over the first `WINDOW` and exponential after. The
first factor shrinks what is compared with few towards 0, which is what is known of an answer with nothing to compare it
with; the variance is shrunk towards s0², that of verdicts of which half are 0 and half 1, so that a few rewards that
happen to lie together make no large advantage. Both are the posterior means of a normal sample under a prior that weighs as
much as n0 answers (Gelman et al., "Bayesian Data Analysis", 3rd edition, sections 2.5 and 3.3).

Assumes: (1) rewards of one key come from one distribution for `WINDOW` answers; after a shift the mean follows with share
1/WINDOW of the rest per answer, and until then all advantages lean to its side. (2) Whether an answer is rated does not
depend on how good it is; where only displeased users speak, the baseline is theirs, and an average answer they do rate
counts as good. (3) Rewards are of the size of verdicts, 0 to 1: of rewards with a spread far below n0/(n + n0) · s0²
advantages stay small.
"""

import hashlib
import math

from infra.chain.processor import Memory

WINDOW = 256
PRIOR_COUNT = 8  # n0
PRIOR_STD = 0.5  # s0
MAX_ADVANTAGE = 5.0
MEMORY = 4096  # answers that are known to have joined, and the baselines


def compared(memory: Memory, key: str, answer: str, reward: float, *, scaled: bool = True) -> float:
    """Advantage of an answer over what `memory` saw under `key`; then it joins, once, however often it is revised.

    answer: its id. scaled: divided by the spread. An answer that the last `MEMORY` have pushed out joins again.
    """
    known = memory.get(f"k{key}")
    count, mean, variance = known if isinstance(known, list) else (0, 0.0, 0.0)
    count, mean, variance = int(count), float(mean), float(variance)
    trust = count / (count + PRIOR_COUNT)
    spread = math.sqrt(trust * variance + (1.0 - trust) * PRIOR_STD**2) if scaled else 1.0
    joined = f"a{hashlib.blake2b(answer.encode(), digest_size=8).hexdigest()}"
    if joined not in memory:
        share = 1.0 / min(count + 1, WINDOW)
        moved = mean + share * (reward - mean)
        variance = (1.0 - share) * (variance + share * (reward - mean) ** 2)
        memory.set(joined)
        memory.discard(f"k{key}")  # so that what is in use is not the first to be forgotten
        memory.set(f"k{key}", [min(count + 1, WINDOW), moved, variance])
    return max(-MAX_ADVANTAGE, min(MAX_ADVANTAGE, trust * (reward - mean) / spread))
