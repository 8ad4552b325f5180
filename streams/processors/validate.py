"""validate: the bulk of an experience decodes and fits its header, and there is something to learn from."""

from infra.chain.processor import Drop, processor
from schemas import BadFrame, Experience


@processor(version=1, inline=True)
def validate(experience: Experience) -> Experience | Drop:
    """Decode and check tokens, logprobs and messages; answers to evals may be empty or failed, since they are counted.

    A response of nothing but the end token is an answer like any other; "empty response" means nothing was sampled.
    """
    try:
        experience.check_bulk()
    except BadFrame as error:
        return Drop(experience.lost or "bad frame", str(error))
    if experience.suite:
        return experience
    if experience.end == "failed":
        return Drop("episode failed", experience.failure)
    if experience.num_sampled == 0:
        return Drop("empty response", "no sampled tokens")
    return experience
