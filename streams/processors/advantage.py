"""advantage: how much better an episode did than its group, or, alone, than answers like it did lately.

Sources: group mean and std is GRPO's (arXiv 2402.03300, section 4.1.2), the mean alone Dr. GRPO's (arXiv 2503.20783,
section 3.2), leave-one-out RLOO's (arXiv 2402.14740). Turn by turn it is GRPO's with process supervision (section
4.1.3): a turn that spoilt good turns before it pays for that alone.

    r~_j = (r_j - mean) / (std + epsilon) over the turn rewards of all episodes of the group
    A_t  = Σ r~_j of the turns that end at token t or later, across the parts of the episode

Episodes with more turns sum more terms. That is right if rewards measure progress and the mean reward is near the usual
reward of a turn.

Lone answers are compared with a running baseline, the recent rewards of similar answers:

    A = n / (n + n0) · (r - mean) / sqrt((n · variance + n0 · s0²) / (n + n0)),   cut to ±MAX_ADVANTAGE

n: answers seen, at most `WINDOW`; mean and variance are theirs, exact over the first `WINDOW` and exponential after. The
first factor shrinks an advantage over few answers towards 0, the value without earlier answers. The variance shrinks towards
s0², the variance of equally many verdicts 0 and 1, so that a few rewards that are close by chance make no large advantage.
Both are the posterior means of a normal sample under a prior that weighs as
much as n0 answers (Gelman et al., "Bayesian Data Analysis", 3rd edition, sections 2.5 and 3.3).

Assumes: (1) rewards of one key come from one distribution for `WINDOW` answers; after a shift the mean follows with share
1/WINDOW of the rest per answer, and until then all advantages lean to its side. (2) Whether an answer is rated does not depend
on how good it is; where only displeased users speak, the baseline is theirs, and an average answer they do rate counts as good.
(3) Rewards are as large as verdicts, 0 to 1: if their variance is far below n0/(n + n0) · s0², advantages stay small.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.chain.processor import Memory, processor
from schemas import Experience, Stretch
from streams.processors.episodes import by_episode, episode_rewards, is_lone


def with_turns(group: Sequence[Experience], name: str, epsilon: float, *, scaled: bool) -> dict[str, Experience]:
    """By id, the members of episodes that have a score `name` given turn by turn (`Score.at`), each with `advantages` of its
    turns and their mean over its sampled tokens as `advantage`. scaled: divided by the std, else only less the mean.

    A score of the whole of an episode counts as given at its last token.
    """
    episodes = {episode: parts for episode, parts in by_episode(group).items() if _rewards(parts, name)}
    values = [value for parts in episodes.values() for given in _rewards(parts, name) for _, value in given]
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    over = std + epsilon if scaled else 1.0
    found: dict[str, Experience] = {}
    for parts in episodes.values():
        behind = 0.0
        for part, given in zip(reversed(parts), reversed(_rewards(parts, name)), strict=True):
            stretches, behind = _stretches(part, [(at, (value - mean) / over) for at, value in given], behind)
            found[part.id] = msgspec.structs.replace(part, advantages=stretches, advantage=_mean(part, stretches))
    return found


def _rewards(parts: Sequence[Experience], name: str) -> list[list[tuple[int, float]]]:
    given = [
        sorted(
            (part.num_tokens - 1 if score.at is None else score.at, score.value)
            for score in part.scores
            if score.name == name
        )
        for part in parts
    ]
    return given if any(given) else []


def _stretches(
    part: Experience, given: Sequence[tuple[int, float]], behind: float
) -> tuple[tuple[Stretch, ...], float]:
    ends: dict[int, float] = {}
    for at, value in given:
        ends[at + 1] = ends.get(at + 1, 0.0) + value
    ends.setdefault(part.num_tokens, 0.0)
    found: list[Stretch] = []
    for stop in sorted(ends, reverse=True):
        behind += ends[stop]
        found.append(Stretch(stop, behind))
    return tuple(reversed(found)), behind


def _mean(part: Experience, stretches: Sequence[Stretch]) -> float:
    total, start = 0.0, 0
    for stretch in stretches:
        within = sum(max(0, min(stretch.stop, span.stop) - max(start, span.start)) for span in part.spans)
        total, start = total + within * stretch.advantage, stretch.stop
    return total / max(1, part.num_sampled)


def differ(group: Sequence[Experience]) -> bool:
    """Return True if turns of the group have advantages of their own, so that it teaches even if all rewards are equal."""
    return any(stretch.advantage for member in group for stretch in member.advantages)


WINDOW = 256
PRIOR_COUNT = 8  # n0
PRIOR_STD = 0.5  # s0
MAX_ADVANTAGE = 5.0
MEMORY = 4096  # answers that are known to have joined, and the baselines


def compared(memory: Memory, key: str, answer: str, reward: float, *, scaled: bool = True) -> float:
    """Advantage of an answer over the answers in `memory` under `key`; then it joins them, once for all its revisions.

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
        memory.discard(f"k{key}")  # so that a key in use becomes the newest, which the memory forgets last
        memory.set(f"k{key}", [min(count + 1, WINDOW), moved, variance])
    return max(-MAX_ADVANTAGE, min(MAX_ADVANTAGE, trust * (reward - mean) / spread))


AdvantageKind = Literal["group", "mean", "leave_one_out"]


@processor(version=3, of="group", memory=MEMORY, inline=True)
def advantage(
    group: tuple[Experience, ...], *, memory: Memory, kind: AdvantageKind, epsilon: float, turns: str
) -> tuple[Experience, ...]:
    """Advantage of each episode, given to all its parts; demonstrations and members without a reward pass unchanged.

    kind: "mean" divides nothing by a spread. A lone answer, and the only one of several choices of production that was
    rated, is compared with the running baseline of its tenant and lane, and then joins it; the first of its kind has
    nothing to be compared with and gets 0. turns: a score given turn by turn, by which the turns of a group have advantages of
    their own (`streams.processors.advantage`).
    """
    rewards = episode_rewards(group)
    values = list(rewards.values())
    if is_lone(group, rewards):
        key = f"{group[0].tenant}\x00{group[0].lane}"
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
