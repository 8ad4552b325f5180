"""The environment: the world an agent acts in, one instance per episode.

Like dm_env (reset, then step until an end), it answers with text, an optional reward and an optional end. Rewards
belong to the turn that earned them. An environment is named by `use`; its options are the fields of a struct or the
parameters of a class. `reset` and `step` may be `async def`, or plain functions, which then run in a thread.

Guarantee: an exception or a timeout of an environment is a named error for its own episode alone.
"""

import contextlib
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgspec

from infra.chain.calls import Failure, Trouble, as_tasks, in_thread
from infra.settings.plugin import load
from schemas import Task

EnvironmentEnd = Literal["terminal", "truncated"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `reset` or `step`. observation: text for the policy, "" for none. reward: reward of the turn, None for none.
    end: "terminal" or "truncated" (by a limit); None continues.

    Example: Outcome(observation="higher", reward=0.0)
    """

    observation: str = ""
    reward: float | None = None
    end: EnvironmentEnd | None = None


class Environment(Protocol):
    """An environment of one episode, not for concurrent use. If it has `close()`, headrace always calls it once."""

    def reset(self, task: Task, *, seed: int) -> Outcome | Awaitable[Outcome]:
        """Begin the episode. `observation` is appended to the task's messages; "" adds nothing."""

    def step(self, action: str) -> Outcome | Awaitable[Outcome]:
        """Answer the agent's action. For an unreadable action return an observation that explains it, not an error."""


class EnvironmentFailed(RuntimeError):
    """An environment crashed, hung or answered nonsense; the message says which, and why."""


class GuardedEnvironment:
    """An environment behind its guard: each call ends within `timeout_s` as an Outcome or as EnvironmentFailed.

    trouble: shared by all episodes, so that their calls that hang count together. Use with `async with`: at its end the
    environment is closed.
    """

    def __init__(self, use: str, options: Mapping[str, object], *, timeout_s: float, trouble: Trouble) -> None:
        self._name = use.rpartition(":")[2]
        self._environment: Any = load(use, options, "environment")
        self._timeout_s = timeout_s
        self._trouble = trouble

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            with contextlib.suppress(EnvironmentFailed):  # the episode is over; it has nothing to say any more
                await self._call(lambda _: close(), "close")

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        """Raises EnvironmentFailed."""
        return self._sound(await self._call(lambda _: self._environment.reset(task, seed=seed), "reset"), "reset")

    async def step(self, action: str) -> Outcome:
        """Raises EnvironmentFailed."""
        return self._sound(await self._call(lambda _: self._environment.step(action), "step"), "step")

    async def _call(self, function: Callable[[None], Any], what: str) -> object:
        if inspect.iscoroutinefunction(getattr(self._environment, what)):
            (result,) = await as_tasks(function, [None], self._timeout_s, self._trouble)
        else:
            (result,) = await in_thread(function, [None], self._timeout_s, self._trouble)
        if isinstance(result, Failure):
            raise EnvironmentFailed(f"environment {self._name}: {what} {result.kind}: {result.detail}")
        return result

    def _sound(self, result: object, what: str) -> Outcome:
        if not isinstance(result, Outcome):
            got = type(result).__name__
            raise EnvironmentFailed(f"environment {self._name}: {what} returned {got}, expected an Outcome")
        try:
            checked = msgspec.convert(msgspec.structs.asdict(result), Outcome)
        except msgspec.ValidationError as error:
            raise EnvironmentFailed(f"environment {self._name}: {what}: {error}") from error
        if checked.reward is not None and not math.isfinite(checked.reward):
            raise EnvironmentFailed(f"environment {self._name}: {what}: reward {checked.reward}, expected a number")
        return checked


def world_seed(group: str) -> int:
    """The seed of a group's world: the same for each of its episodes, and in every process.

    >>> world_seed("guess-11.0") == world_seed("guess-11.0") != world_seed("guess-11.1")
    True
    """
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:6], "big")
