"""What the master publishes next, as its plan decides it."""

import msgspec

from actors.master.gate.gate import GateDecision
from actors.master.gate.guard import Breach
from schemas import EvalResult, Task


class EvalRequest(msgspec.Struct, frozen=True):
    """A suite at a version, to be asked for now.

    missing: tasks to issue. num_tasks, digest: of the whole suite; 0 and "" while its tasks are still being loaded.
    suite: by its name. version: of the policy.
    """

    suite: str
    version: int
    missing: tuple[Task, ...] = ()
    num_tasks: int = 0
    digest: str = ""


class Decisions(msgspec.Struct, frozen=True):
    """What to publish now, each kind in order.

    results: of evals. channels: which version a channel serves. rollouts: new groups. reissues: groups and eval tasks that
    were not finished in time. evals: requests to issue as a whole.
    """

    results: tuple[EvalResult, ...] = ()
    channels: tuple[GateDecision | Breach, ...] = ()
    rollouts: tuple[Task, ...] = ()
    reissues: tuple[Task, ...] = ()
    evals: tuple[EvalRequest, ...] = ()

    @property
    def tasks(self) -> dict[str, tuple[Task, ...]]:
        """What to issue, by kind."""
        evals = tuple(task for request in self.evals for task in request.missing)
        return {"rollout": self.rollouts, "reissue": self.reissues, "eval": evals}


NOTHING = Decisions()
