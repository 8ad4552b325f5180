"""How the master wants a task run: the records of `tasks`, made from a task and the settings."""

from msgspec.structs import replace

from actors.config import EvalSuite, MasterConfig
from actors.master.evaluation import eval_group
from schemas import Issued, Task
from schemas.ids import group_id


def rollout(task: Task, config: MasterConfig, *, round: int, attempt: int, sequence: int, min_version: int) -> Task:
    """The task as a group of episodes to learn from."""
    issued = Issued(
        group=group_id(task.id, round),
        attempt=attempt,
        num_episodes=config.num_episodes,
        max_tokens=config.max_tokens,
        sequence=sequence,
        min_version=min_version,
        temperature=config.temperature,
        enough=config.enough,
    )
    return replace(task, issued=issued)


def evaluation(task: Task, config: MasterConfig, *, suite: EvalSuite, version: int, index: int, attempt: int) -> Task:
    """The task as the suite's episodes of exactly this version."""
    issued = Issued(
        group=eval_group(suite.suite, version, index),
        attempt=attempt,
        num_episodes=suite.samples,
        max_tokens=config.max_tokens,
        min_version=version,
        temperature=suite.temperature,
        suite=suite.suite,
        version=version,
    )
    return replace(task, issued=issued)


def round_of(group: str) -> int:
    """The round in a rollout's group id; raises ValueError for an id without one."""
    return int(group.rpartition(".")[2])
