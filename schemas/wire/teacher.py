"""Teacher logprobs: an additional section of a block, one float per sampled token; readers that do not know it pass it on."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from schemas.bulk import Logprobs, logprobs_fault
from schemas.errors import BadFrame
from schemas.experience import Experience

SECTION = "teacher_logprobs"
WIDTH = 4


def teacher_logprobs(experience: Experience) -> Logprobs | None:
    """Logprob of the teacher for each sampled token, float32 [num_sampled], or None where it was not asked. Raises BadFrame."""
    found = experience.held().extra_sections().get(SECTION)
    if found is None or not found[1]:
        return None
    width, data = found
    if width != WIDTH or len(data) != WIDTH * experience.num_sampled:
        raise BadFrame(
            f"experience {experience.id}: {SECTION}: got {len(data)} bytes in items of {width}, expected"
            f" {experience.num_sampled} of {WIDTH}"
        )
    logprobs = np.frombuffer(data, "<f4")
    if (fault := logprobs_fault(logprobs)) is not None:
        raise BadFrame(f"experience {experience.id}: {SECTION}: {fault}")
    return logprobs


def is_taught(experience: Experience) -> bool:
    """True if it has a teacher's logprobs; decodes nothing."""
    return bool(experience.held().sizes().get(SECTION))


def with_teacher_logprobs(experience: Experience, logprobs: Sequence[float] | npt.NDArray[np.float32]) -> Experience:
    """The same experience with the teacher's logprobs of its sampled tokens. Raises ValueError for a wrong number or value."""
    values = np.asarray(logprobs, "<f4")
    if values.shape != (experience.num_sampled,):
        raise ValueError(f"experience {experience.id}: got {values.shape} logprobs, expected {experience.num_sampled}")
    if (fault := logprobs_fault(values)) is not None:
        raise ValueError(f"experience {experience.id}: {SECTION}: {fault}")
    carried = dict(experience.held().extra_sections())
    made = experience.with_bulk()
    made.held().extras = {**carried, SECTION: (WIDTH, values.tobytes())}
    return made
