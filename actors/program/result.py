"""What a program says of its episode: rewards by name, of the whole or of a turn, checked."""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from actors.rollout.failure import EpisodeFailed
from schemas import Score

NAME = "program"  # of a reward without a name
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TurnResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one turn, as {"id": "hr-…", "rewards": {"helpful": 1}}. id: of the response that the program got. rewards:
    names to values.
    """

    id: str
    rewards: Annotated[dict[Name, float], Meta(max_length=64)]


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """reward: of the whole, under the name "program". rewards: by name. turns: of single turns. answer: kept as a note. end:
    how the episode ended, where the last turn does not say.

    Example: {"reward": 1.0, "turns": [{"id": "hr-…", "rewards": {"format": 0.5}}]}
    """

    reward: float | None = None
    rewards: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    turns: Annotated[tuple[TurnResult, ...], Meta(max_length=4096)] = ()
    answer: Annotated[str, Meta(max_length=65_536)] | None = None
    end: Literal["terminal", "truncated"] | None = None

    def scores(self) -> tuple[Score, ...]:
        """Of the whole episode. Raises EpisodeFailed."""
        whole = {} if self.reward is None else {NAME: self.reward}
        return tuple(Score(name=name, value=finite(name, value)) for name, value in {**whole, **self.rewards}.items())


def result_of(said: Any) -> Result:
    """What a function returned or a program printed. Raises EpisodeFailed, with the cause "reward"."""
    if isinstance(said, Result):
        return said
    if said is None:
        return Result()
    if isinstance(said, int | float):
        return Result(reward=float(said))
    try:
        return msgspec.convert(said, Result)
    except msgspec.ValidationError as error:
        raise EpisodeFailed(
            "reward", f"the program's result: {error}; expected nothing, a number, or {FIELDS}"
        ) from error


def finite(name: str, value: float) -> float:
    """The value. Raises EpisodeFailed where it is not a number."""
    if not math.isfinite(value):
        raise EpisodeFailed("reward", f"the program's result: {name}: got {value}, expected a finite number")
    return value


FIELDS = "an object with reward, rewards, turns, answer or end"
