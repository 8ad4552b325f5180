"""Guess a number: an environment that says "higher" or "lower", and a taskset with every number of the range."""

import re
from collections.abc import Iterator

from headrace import Message, Outcome, Task


def numbers(*, high: int = 16) -> Iterator[Task]:
    """One task for each number, in both splits. Only the environment sees the answer."""
    question = Message(role="user", content=f"Guess my number, from 1 to {high}. Say one number at a time.")
    for split in ("train", "all-numbers"):
        for number in range(1, high + 1):
            yield Task(id=f"guess-{split}-{number}", messages=(question,), answer=str(number), split=split)


class Guess:
    """high: the largest number. turns: guesses of a game; a hit is worth 1, a miss 0, and a guess nearer than before 0.1."""

    def __init__(self, *, high: int = 16, turns: int = 5) -> None:
        self._high, self._left, self._secret, self._distance = high, turns, 0, high

    def reset(self, task: Task, *, seed: int) -> Outcome:
        """The number is the task's answer."""
        self._secret = int(task.answer or 1)
        return Outcome()

    def step(self, action: str) -> Outcome:
        """Judge one guess: the last number in the action."""
        self._left -= 1
        found = re.findall(r"\d+", action)
        if not found:
            return Outcome(observation="Say a number.", reward=0.0, end=None if self._left else "terminal")
        guess = min(int(found[-1][:9]), self._high + 1)
        if guess == self._secret:
            return Outcome(reward=1.0, end="terminal")
        nearer = abs(guess - self._secret) < self._distance
        self._distance = min(self._distance, abs(guess - self._secret))
        said = "higher" if guess < self._secret else "lower"
        return Outcome(observation=said, reward=0.1 * nearer, end=None if self._left else "terminal")
