"""The workflow: how one episode of a task is run against the policy, and how a configured one is found."""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from actors.session import Session
from infra.plugin import load
from schemas import Score, Task


class Workflow(Protocol):
    """One run of a task. Options are keyword-only parameters."""

    async def __call__(self, task: Task, session: Session) -> Sequence[Score]:
        """Talk to `session` until the episode is over; returns rewards of an environment, if there is one.

        What it raises fails this episode alone: what was sampled until then is kept, and the error is recorded.
        """


class Workflows:
    """Workflows by their `use`, each loaded once; tasks that name none take the configured one."""

    def __init__(self, default: str, options: Mapping[str, object]) -> None:
        self._default = default
        self._loaded = {default: cast(Workflow, load(default, options, "explore.workflow"))}

    def get(self, use: str) -> Workflow:
        """The workflow a task names; raises ConfigError for one that is not there."""
        use = use or self._default
        if use not in self._loaded:
            self._loaded[use] = cast(Workflow, load(use, {}, "task.workflow"))
        return self._loaded[use]
