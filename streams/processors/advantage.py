"""advantage: how much better an episode did than its group, or, alone, than answers like it did lately.

Sources: group mean and std is GRPO's (arXiv 2402.03300, section 4.1.2), the mean alone Dr. GRPO's (arXiv 2503.20783,
section 3.2), leave-one-out RLOO's (arXiv 2402.14740); of lone answers see `streams.processors.advantage`.

Lone answers are compared with a running baseline, what answers like them got lately:

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
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience
from streams.processors.episodes import episode_rewards, is_lone
from streams.processors.turns import with_turns

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


AdvantageKind = Literal["group", "mean", "leave_one_out"]


@processor(version=2, of="group", memory=MEMORY, inline=True)
def advantage(
    group: tuple[Experience, ...],
    *,
    memory: Memory,
    kind: AdvantageKind,
    epsilon: float,
    turns: str,
) -> tuple[Experience, ...]:
    """Advantage of each episode, given to all its parts; demonstrations and members without a reward pass unchanged.

    kind: "mean" divides nothing by a spread. A lone answer, and the only one of several choices of production that was
    rated, is compared with the running baseline of its tenant and origin, and then joins it; the first of its kind has
    nothing to be compared with and gets 0. turns: a score given turn by turn, by which the turns of a group have advantages of
    their own (`streams.processors.turns`).
    """
    rewards = episode_rewards(group)
    values = list(rewards.values())
    if is_lone(group, rewards):
        key = f"{group[0].tenant}\x00{group[0].origin}"
        each = [compared(memory, key, group[0].group, value, scaled=kind != "mean") for value in values]
    elif kind == "leave_one_out":
        each = leave_one_out(values)
    else:
        each = group_normalized(values, epsilon) if kind == "group" else less_the_mean(values)
    advantages = dict(zip(rewards, each, strict=True))
    own = with_turns(group, turns, epsilon, scaled=kind == "group") if turns and not is_lone(group, rewards) else {}
    return tuple(own.get(member.id) or _with_advantage(member, advantages) for member in group)


def group_normalized(rewards: Sequence[float], epsilon: float) -> list[float]:
    """(r - mean) / (std + epsilon), std over the whole group (divided by n)."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in rewards) / len(rewards))
    return [(value - mean) / (std + epsilon) for value in rewards]


def less_the_mean(rewards: Sequence[float]) -> list[float]:
    """r - mean: without the division, a question that is nearly always or nearly never answered right weighs no more."""
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [value - mean for value in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the others; 0 where there are none."""
    if len(rewards) < 2:
        return [0.0 for _ in rewards]
    total = math.fsum(rewards)
    return [value - (total - value) / (len(rewards) - 1) for value in rewards]


def _with_advantage(member: Experience, advantages: Mapping[int, float]) -> Experience:
    value = advantages.get(member.episode)
    if value is None or member.is_given:
        return member
    return msgspec.structs.replace(member, advantage=value)
