"""A reasoning-gym task as an environment: each answer is judged by the generator's own verifier.

The tasks are those of `actors.tasksets.reasoning_gym`, whose meta names generator, seed and index. A wrong answer may be
tried again while tries are left; the reward of a try is the verifier's.
"""

from typing import Any

from actors.environment import Outcome
from actors.tasksets.reasoning_gym import open_dataset
from schemas import Task


class ReasoningGym:
    """tries: answers at most. again: what is said after a wrong one. options: of the generator, as of the taskset.

    Example: ReasoningGym(tries=3)
    """

    def __init__(
        self, *, tries: int = 1, again: str = "That is not right. Try again.", options: dict[str, Any] | None = None
    ) -> None:
        if tries < 1:
            raise ValueError(f"tries: got {tries}, expected 1 or more")
        self._tries, self._again, self._options = tries, again, options or {}
        self._left = tries
        self._dataset: Any = None
        self._entry: Any = None

    def reset(self, task: Task, *, seed: int) -> Outcome:
        """Make the task's entry again. Raises ValueError for a task of another taskset."""
        generator, of_seed, index = (task.meta.get(name) for name in ("generator", "seed", "index"))
        if not isinstance(generator, str) or not isinstance(of_seed, int) or not isinstance(index, int):
            raise ValueError(f"task {task.id}: meta names no generator, seed and index of reasoning-gym")
        self._dataset = open_dataset(generator, size=index + 1, seed=of_seed, options=self._options)
        self._entry = self._dataset[index]
        self._left = self._tries
        return Outcome()

    def step(self, action: str) -> Outcome:
        """Judge one answer."""
        self._left -= 1
        reward = float(self._dataset.score_answer(action, self._entry))
        done = reward >= 1.0 or not self._left
        return Outcome(observation="" if done else self._again, reward=reward, end="terminal" if done else None)
