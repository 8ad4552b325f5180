"""synthesize: the best episode of a group once more, as a demonstration in the expert lane."""

import msgspec
import numpy as np

from infra.chain.processor import processor
from schemas import Experience
from streams.processors.episodes import by_episode, derive, episode_rewards

VERSION = 1
PROCESSOR = f"synthesize@{VERSION}"


@processor(version=VERSION, of="group", inline=True)
def synthesize(group: tuple[Experience, ...], *, min_reward: float) -> tuple[Experience, ...]:
    """Append a demonstration made from the group's best episode, if its reward is at least `min_reward`.

    Ties go to the lowest id, which also gives the new id, so a retry makes the same demonstration. It needs two or more
    episodes, and a best episode of a single part that ended by itself.
    """
    best = _best(group, min_reward)
    return group if best is None else (*group, make_demonstration(best))


def make_demonstration(best: Experience) -> Experience:
    spans = tuple(msgspec.structs.replace(span, version=-1, temperature=1.0, ratio=False, kv=-1) for span in best.spans)
    made = best.with_bulk(logprobs=np.zeros(best.num_sampled, dtype=np.float32))
    return derive(
        made, PROCESSOR, 0, lane="expert", origin="synthesize", spans=spans, priority=1.0, revision=0, kind="demonstration",
        scores=tuple(score for score in best.scores if score.at is None),
    )  # fmt: skip


def _best(group: tuple[Experience, ...], min_reward: float) -> Experience | None:
    episodes, rewards = by_episode(group), episode_rewards(group)
    if len(rewards) < 2:
        return None
    candidates = [
        (-rewards[episode], parts[0].id, parts[0])
        for episode, parts in episodes.items()
        if episode in rewards and rewards[episode] >= min_reward and _is_whole(parts)
    ]
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _is_whole(parts: list[Experience]) -> bool:
    return len(parts) == 1 and parts[0].part == 0 and parts[0].last and parts[0].end == "terminal"
