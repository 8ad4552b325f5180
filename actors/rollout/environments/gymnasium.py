"""Gymnasium environments in text.

    id ─> gymnasium.make ─> reset(seed, options) ─> written ─> [agent] ─> read, in the action space? ─> step ─> …
                                                                              └─no─> said so, and nothing is stepped

Observations: text unchanged, `render_mode = "ansi"` as drawn, everything else as JSON with rounded numbers. Actions: one of
`actions` or a number for a Discrete space, text for a Text space, JSON for other spaces.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from actors.rollout.environment import Outcome
from infra.settings.plugin import load
from schemas import Task
from schemas.errors import ConfigError

MAX_SHOWN_CHARS = 100


class Gymnasium:
    """Any Gymnasium environment, with observations and actions as text.

    id: Name for gymnasium.make; "module:Name-v0" if a module registers it. options: Options of the environment. actions: Names
    of the actions of a Discrete space, in order. digits: Digits of numbers in observations. write: Function "module:name" from
    observation and info to text. read: Function "module:name" from the agent's text to an action; it raises ValueError with a
    text for the agent.

    Example: Gymnasium(id="FrozenLake-v1", options={"render_mode": "ansi"}, actions=["left", "down", "right", "up"])
    """

    def __init__(
        self,
        *,
        id: str,
        options: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        digits: int = 3,
        write: str = "",
        read: str = "",
    ) -> None:
        self._id, self._options, self._digits = id, dict(options or {}), digits
        self._actions = {action.casefold(): number for number, action in enumerate(actions)}
        self._write: Callable[[Any, Any], str] | None = load(write, {}, "write") if write else None
        self._read: Callable[[str], Any] | None = load(read, {}, "read") if read else None
        self._world: Any = None
        if ":" not in id:  # an id with a module is known only once that is imported
            try:
                gymnasium.spec(id)
            except gymnasium.error.Error as error:
                raise ConfigError(f"id: {error}") from error

    def reset(self, task: Task, *, seed: int) -> Outcome:
        """Begin an episode. The task's meta may name its own `seed`, and the `reset` options of the environment.

        Raises ConfigError where `actions` and the action space differ.
        """
        self.close()
        self._world = gymnasium.make(self._id, **self._options)
        space = self._world.action_space
        if self._actions and not (isinstance(space, spaces.Discrete) and space.n == len(self._actions)):
            raise ConfigError(f"actions: got {len(self._actions)} names, expected one for each action of {space}")
        own = task.meta.get("seed")
        observation, info = self._world.reset(seed=own if isinstance(own, int) else seed)
        return Outcome(observation=self._written(observation, info))

    def step(self, action: str) -> Outcome:
        """Do one action. Text that names no action costs the agent a turn; the observation then shows the expected format."""
        space = self._world.action_space
        try:
            chosen = self._read(action) if self._read is not None else self._chosen(action, space)
        except ValueError as error:
            return Outcome(observation=str(error))
        if not space.contains(chosen):
            return Outcome(observation=f"got {action[:MAX_SHOWN_CHARS]!r}, expected {self._expected(space)}")
        observation, reward, terminated, truncated, info = self._world.step(chosen)
        return Outcome(
            observation=self._written(observation, info),
            reward=float(reward),
            end="terminal" if terminated else "truncated" if truncated else None,
        )

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def _chosen(self, action: str, space: Any) -> Any:
        """The action that a text names, in the type of its space; raises ValueError."""
        if isinstance(space, spaces.Text):
            return action
        said = self._actions.get(action.strip().casefold()) if self._actions else _json(action)
        try:
            return _shaped(said, space)
        except (TypeError, ValueError, OverflowError, KeyError) as error:
            shown = action[:MAX_SHOWN_CHARS]
            raise ValueError(f"got {shown!r}, expected {self._expected(space)}") from error

    def _expected(self, space: Any) -> str:
        if self._actions:
            return f"one of {', '.join(self._actions)}"
        if isinstance(space, spaces.Discrete):
            return f"a number from {space.start} to {space.start + space.n - 1}"
        return f"JSON of {space}"

    def _written(self, observation: Any, info: Any) -> str:
        if self._write is not None:
            return self._write(observation, info)
        if self._world.render_mode == "ansi":
            return str(self._world.render()).strip("\n")
        plain = _plain(observation, self._digits)
        return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shaped(said: Any, space: Any) -> Any:
    """JSON as an element of a space; raises TypeError, ValueError, OverflowError or KeyError for JSON that does not fit."""
    if isinstance(space, spaces.Discrete):
        if isinstance(said, bool) or not isinstance(said, int):
            raise TypeError("no whole number")
        return space.dtype.type(said)
    if isinstance(space, spaces.Dict):
        if set(said) != set(space.spaces):
            raise KeyError("other names")
        return {name: _shaped(said[name], item) for name, item in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_shaped(each, item) for each, item in zip(said, space.spaces, strict=True))
    if isinstance(space, spaces.Text):
        return said
    return np.asarray(said, dtype=space.dtype)


def _plain(value: Any, digits: int) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item, digits) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item, digits) for item in value]
    if isinstance(value, float):
        return round(value, digits)
    return value if isinstance(value, str | int | bool | None) else str(value)
