"""Guess-a-number environment. The number is the task's answer; bisection finds any of 2**turns − 1 numbers."""

import math
import re

from actors.rollout.environment import Outcome
from schemas import Task

_NUMBER = re.compile(r"-?\d{1,9}")


class Guess:
    """Game of guessing a number between `low` and `high`. After a wrong guess the environment answers "higher" or "lower".

    low: Smallest number. high: Largest number. turns: Maximum guesses; a hit gives reward 1, a miss 0. higher: Observation if
    the number is larger. lower: Observation if the number is smaller. invalid: Observation after an invalid guess. shaped:
    Reward of each guess for the numbers that it ruled out, as a share of log(range). The shaping is potential-based and keeps
    the optimal policy (Ng, Harada, Russell 1999, "Policy invariance under reward transformations", theorem 1).

    Example: Guess(low=1, high=15, turns=4)
    """

    def __init__(
        self,
        *,
        low: int = 1,
        high: int = 100,
        turns: int = 7,
        higher: str = "higher",
        lower: str = "lower",
        invalid: str = "that is not a number in the range",
        shaped: float = 0.0,
    ) -> None:
        if low > high or turns < 1:
            raise ValueError(f"got low {low}, high {high}, turns {turns}; expected low <= high and turns >= 1")
        if not 0.0 <= shaped < 1.0:
            raise ValueError(f"shaped: got {shaped}, expected 0 or more, below the 1 of a hit")
        self._low, self._high, self._turns = low, high, turns
        self._higher, self._lower, self._invalid = higher, lower, invalid
        self._shaped = shaped
        self._least, self._most, self._left, self._secret = low, high, turns, low

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        """The task's own message says what is asked. Raises ValueError for an answer that is not a number in the range."""
        if task.answer is None or not _NUMBER.fullmatch(task.answer) or not self._low <= int(task.answer) <= self._high:
            raise ValueError(f"answer: got {task.answer!r}, expected a number from {self._low} to {self._high}")
        self._secret = int(task.answer)
        self._least, self._most, self._left = self._low, self._high, self._turns
        return Outcome()

    async def step(self, action: str) -> Outcome:
        self._left -= 1
        guess = int(action) if _NUMBER.fullmatch(action) else None
        before = self._potential()
        hint = self._invalid
        if guess == self._secret:
            self._least = self._most = self._secret
            return Outcome(reward=1.0 + (self._potential() - before), end="terminal")
        if guess is not None and self._low <= guess < self._secret:
            hint, self._least = self._higher, max(self._least, guess + 1)
        elif guess is not None and self._secret < guess <= self._high:
            hint, self._most = self._lower, min(self._most, guess - 1)
        return Outcome(observation=hint, reward=self._potential() - before, end=None if self._left else "terminal")

    def _potential(self) -> float:
        """Share of log(range) that is ruled out, times `shaped`: 0 at first, `shaped` once one number is left."""
        numbers = self._high - self._low + 1
        return self._shaped * (1.0 - math.log(self._most - self._least + 1) / math.log(numbers)) if numbers > 1 else 0.0
