"""rubric: the weighted share of criteria that an answer meets, as a language model sees it.

Guarantees: those of `streams.scores.llm_judge`; a reply with a verdict too few or too many counts for nothing.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from infra.chain.processor import Verdict, score
from infra.settings.config import decode
from schemas import Experience
from schemas.errors import ConfigError
from streams.scores.endpoint import Endpoint, EndpointConfig
from streams.scores.llm_judge import FRAME, material, only_object

MAX_CRITERIA = 64


class Criterion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing an answer should do.

    text: as the judge reads it. weight: relative to the other criteria.

    Example: Criterion(text="Names the capital of France", weight=2.0)
    """

    text: str
    weight: float = 1.0


@score(version=1)
class Rubric:
    """The weight of met criteria over all weight, 0 to 1. endpoint: see `EndpointConfig`.

    criteria: texts, or tables with text and weight (above 0). key: of meta, where a task brings its own criteria as a
    JSON list; they come after those of all tasks. Without any criterion there is no verdict. answer:
    the reference that is shown, see `Experience.reference`.
    """

    def __init__(
        self,
        *,
        endpoint: Mapping[str, Any],
        criteria: list[str | dict[str, Any]] | None = None,
        key: str = "rubric",
        answer: str = "answer",
    ) -> None:
        self.endpoint = Endpoint(decode(dict(endpoint), EndpointConfig, "endpoint"))
        self.answer = answer
        self.key = key
        try:
            self.criteria = _criteria(criteria or [])
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"criteria: {error}") from error

    async def __call__(self, experience: Experience) -> Verdict | None:
        """Ask; raises ValueError for criteria of the task that cannot be read."""
        criteria = self.criteria + self._own(experience)
        if not criteria:
            return None
        number = len(criteria)
        system = (
            f"{FRAME}Criteria is a list of {number}. Decide for each whether the answer meets it; where you are not sure, "
            f'it does not. Reply with one JSON object {{"met": [{number} truth values, in order]}} and nothing else.'
        )
        schema = {
            "type": "object", "required": ["met"], "additionalProperties": False,
            "properties": {
                "met": {"type": "array", "items": {"type": "boolean"}, "minItems": number, "maxItems": number},
            },
        }  # fmt: skip
        user = material(experience, self.answer, criteria=[criterion.text for criterion in criteria])
        asked = await self.endpoint.ask(system, user, schema, lambda text: _met(text, number) is not None)
        met = None if asked.reply is None else _met(asked.reply, number)
        value = None
        if met is not None:
            weights = [criterion.weight for criterion in criteria]
            value = sum(weight for weight, is_met in zip(weights, met, strict=True) if is_met) / sum(weights)
        return Verdict(
            value=value, reason=asked.reason, model=self.endpoint.config.model,
            cost_usd=asked.cost_usd,
        )  # fmt: skip

    def _own(self, experience: Experience) -> tuple[Criterion, ...]:
        written = experience.meta.get(self.key)
        if written is None:
            return ()
        try:
            return _criteria(msgspec.json.decode(str(written), type=list[str | dict[str, Any]]))
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"meta.{self.key}: {error}, expected a JSON list of criteria") from error


def _criteria(written: list[str | dict[str, Any]]) -> tuple[Criterion, ...]:
    criteria = tuple(
        Criterion(item) if isinstance(item, str) else msgspec.convert(item, Criterion, strict=True) for item in written
    )
    if len(criteria) > MAX_CRITERIA:
        raise ValueError(f"got {len(criteria)}, expected at most {MAX_CRITERIA}")
    for criterion in criteria:
        if not criterion.text.strip() or not 0 < criterion.weight < float("inf"):
            raise ValueError(
                f"got {criterion.text!r} with weight {criterion.weight:g}, expected a text and a weight above 0"
            )
    return criteria


def _met(text: str, number: int) -> list[bool] | None:
    reply = only_object(text, {"met"})
    met = None if reply is None else reply["met"]
    if not isinstance(met, list) or len(met) != number or not all(isinstance(is_met, bool) for is_met in met):
        return None
    return met
