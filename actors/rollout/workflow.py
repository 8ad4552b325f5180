"""Workflows: run an episode of a task against the policy.

Guarantee: a task imports nothing. It names a workflow of the settings, or CONVERSE; the explorer refuses any other name.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, cast

from actors.config import CONVERSE
from actors.rollout.session import Session
from infra.settings.config import Use
from infra.settings.plugin import load
from schemas import Message, Score, Task
from schemas.errors import ConfigError

SHOWN_CHARS = 80
Cause = Literal["agent", "environment", "engine", "tool", "reward", "timeout", "workflow"]


class EpisodeFailed(Exception):
    """A failure whose cause a workflow knows, so that causes are counted apart."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause: Cause = cause


class Workflow(Protocol):
    """Runs a task. Options are keyword-only parameters."""

    async def __call__(self, task: Task, session: Session) -> Sequence[Score]:
        """Request replies from `session` until the episode is over; return the environment's rewards, if any."""


class Workflows:
    """Workflows by the name a task gives; tasks that name none take the configured one. All are loaded at the start."""

    def __init__(self, default: str, options: Mapping[str, object], named: Mapping[str, Use] | None = None) -> None:
        """Raises ConfigError for one that is not there, or whose options do not fit."""
        self._loaded = {"": cast(Workflow, load(default, options, "explore.workflow"))}
        for name, plugin in (named or {}).items():
            self._loaded[name] = cast(Workflow, load(plugin.use, plugin.options, f"explore.workflows.{name}"))
        self._loaded.setdefault(default, self._loaded[""])
        if CONVERSE not in self._loaded:  # the one that ships and runs without options: tasks may name it everywhere
            self._loaded[CONVERSE] = cast(Workflow, load(CONVERSE, {}, "workflow"))

    def get(self, name: str) -> Workflow:
        """The workflow that a task names. Raises ConfigError if the settings do not name it."""
        if name not in self._loaded:
            raise ConfigError(
                f"task.workflow: got {name[:SHOWN_CHARS]!r}, expected a name of [explore.workflows]; a task imports nothing"
            )
        return self._loaded[name]


async def converse(task: Task, session: Session, *, system: str = "") -> tuple[Score, ...]:
    """A single answer to the task's messages. system: System message before the messages of every task. "" for none."""
    messages = (Message(role="system", content=system), *task.messages) if system else task.messages
    await session.reply(messages)
    return ()
