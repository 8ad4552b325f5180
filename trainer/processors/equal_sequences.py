"""equal_sequences: weighs tokens so that every sequence counts alike in a mean over tokens, however long it is."""

from infra.chain.processor import processor
from schemas import Experience
from trainer.batch.weight import with_weight


@processor(version=1, of="batch", inline=True)
def equal_sequences(batch: tuple[Experience, ...]) -> tuple[Experience, ...]:
    """Weight = mean length of its lane / own length, in sampled tokens: a lane's weighted mean over tokens is then the
    mean over its sequences of their token means (arXiv 2402.03300 eq. 3; where DAPO's, 2503.14476, is the unweighted).
    """
    lengths: dict[str, list[int]] = {}
    for one in batch:
        lengths.setdefault(one.lane, []).append(one.num_sampled)
    mean = {lane: sum(of_lane) / len(of_lane) for lane, of_lane in lengths.items()}
    return tuple(with_weight(one, mean[one.lane] / one.num_sampled) for one in batch)
