"""The age bound token by token: what is older is no target, and the tokens after it are trained with it before them."""

import numpy as np

from schemas import Experience
from schemas.fields import Lane
from schemas.wire.routing import routing, with_routing
from schemas.wire.teacher import teacher_logprobs, with_teacher_logprobs

PACED: Lane = "usual"
STALE = "stale"


def masked_below(version: int, max_staleness: int) -> int:
    """Tokens of versions below it are too old for a step at `version`; -1 while none can be."""
    return max(-1, version - max_staleness)


def num_old(experience: Experience, below: int) -> int:
    """Sampled tokens of versions under `below`."""
    return sum(span.stop - span.start for span in experience.spans if span.version < below)


def without_old(experience: Experience, below: int) -> Experience:
    """The experience in which tokens sampled by versions under `below` are context: given, and not sampled."""
    kept = tuple(span for span in experience.spans if span.version >= below)
    is_kept_N = np.concatenate([np.full(span.stop - span.start, span.version >= below) for span in experience.spans])
    teacher, experts = teacher_logprobs(experience), routing(experience)
    made = experience.with_bulk(spans=kept, logprobs=experience.logprobs[is_kept_N])
    if teacher is not None:
        made = with_teacher_logprobs(made, teacher[is_kept_N])
    return made if experts is None else with_routing(made, experts)
