"""Plans and gates whose decisions count as published as soon as they are made."""

from typing import Literal

from actors.master.gate.gate import Gate
from actors.master.plan import Decisions, Plan
from schemas import PolicyEvent, Task


def rollouts(plan: Plan) -> list[Task]:
    return _acted(plan, "rollouts")


def reissues(plan: Plan) -> list[Task]:
    return _acted(plan, "reissues")


def eval_tasks(plan: Plan) -> list[Task]:
    return _acted(plan, "evals")


def _acted(plan: Plan, kind: Literal["rollouts", "reissues", "evals"]) -> list[Task]:
    """Decisions of one kind; those of the others are left for later."""
    found = plan.decide()
    assert found == plan.decide(), "to decide changes nothing"
    only = Decisions(**{kind: getattr(found, kind)})
    plan.apply(only)
    return [task for tasks in only.tasks.values() for task in tasks]


def decisions(gate: Gate) -> list[PolicyEvent]:
    found = gate.decisions()
    assert found == gate.decisions(), "to decide changes nothing"
    for event in found:
        gate.event(event)
    return found
