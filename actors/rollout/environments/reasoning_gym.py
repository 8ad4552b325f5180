"""reasoning-gym tasks as an environment, with the tasks of `actors.tasksets.reasoning_gym`.

Guarantee: no verifier runs an answer as code. The verifiers in RUNS_ANSWERS would (they call Python's eval, or sympy's parser,
which calls it); their tasks fail.
"""

from typing import Any

from actors.rollout.environment import Outcome
from actors.tasksets.reasoning_gym import open_dataset
from schemas import Task
from schemas.errors import ConfigError

RUNS_ANSWERS = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
})  # fmt: skip


class ReasoningGym:
    """A reasoning-gym task, with the generator's own verifier as the reward.

    tries: Maximum answers. again: Observation after a wrong answer. options: Options of the generator, as in the taskset.

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
        """Make the task's entry again. Raises ValueError for a task of another taskset, ConfigError for RUNS_ANSWERS."""
        generator, of_seed, index = (task.meta.get(name) for name in ("generator", "seed", "index"))
        if not isinstance(generator, str) or not isinstance(of_seed, int) or not isinstance(index, int):
            raise ValueError(f"task {task.id}: meta names no generator, seed and index of reasoning-gym")
        if generator in RUNS_ANSWERS:
            raise ConfigError(
                f"task {task.id}: the verifier of {generator} runs the answer as code; judge it by a score"
            )
        self._dataset = open_dataset(generator, size=index + 1, seed=of_seed, options=self._options)
        self._entry = self._dataset[index]
        self._left = self._tries
        return Outcome()

    def step(self, action: str) -> Outcome:
        self._left -= 1
        reward = float(self._dataset.score_answer(action, self._entry))
        done = reward >= 1.0 or not self._left
        return Outcome(observation="" if done else self._again, reward=reward, end="terminal" if done else None)
