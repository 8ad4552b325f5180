"""drop_weak: leaves out what a step would hardly learn from, so that it costs no forward."""

from collections import Counter
from typing import Literal

from infra.chain.processor import Drop, processor
from schemas import Experience
from trainer.batch.weight import with_weight


@processor(version=2, of="batch", inline=True)
def drop_weak(
    batch: tuple[Experience, ...], *, below: float = 1e-6, mean: Literal["tokens", "sequences"] = "tokens"
) -> tuple[Experience | Drop, ...]:
    """Drop an experience whose advantages, also those of its turns, are smaller than `below` in size; one without passes.

    What is left of a lane weighs less by as much as was dropped, so that each of its tokens adds what it would have added
    to the whole. below: size of an advantage; the default drops what is 0 but for rounding. mean: what the lanes' losses
    are means over (sequences for gspo, topr and opmd). What a loss adds whatever the advantage (its pull to μ, the lane's
    kl and entropy) is lost with what is dropped.
    """
    gone = [
        one.advantage is not None
        and max(abs(one.advantage), *(abs(turn.advantage) for turn in one.advantages), 0) < below
        for one in batch
    ]
    sizes = [one.num_sampled if mean == "tokens" else 1 for one in batch]
    before, after = Counter[str](), Counter[str]()
    for one, size, weak in zip(batch, sizes, gone, strict=True):
        before[one.lane] += size
        after[one.lane] += 0 if weak else size
    return tuple(
        Drop("weak advantage", f"{one.advantage:g}, expected at least {below:g} in size")
        if weak
        else one
        if after[one.lane] == before[one.lane]
        else with_weight(one, one.weight * after[one.lane] / before[one.lane])
        for one, weak in zip(batch, gone, strict=True)
    )
