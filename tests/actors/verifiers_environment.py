"""Environments of verifiers' own classes, for tests. It is imported in `.venv/agents`."""

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(4)]


def right(completion: Any, answer: str, **_: Any) -> float:
    return float(answer in completion[-1]["content"])


def brief(completion: Any, **_: Any) -> float:
    return float(len(completion[-1]["content"]) < 20)


async def successor(number: int) -> str:
    """The number behind a number."""
    return str(number + 1)


def ranked(completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(completions)


def load_environment(kind: str = "single") -> vf.Environment:
    print("what an environment says while it is loaded")
    rows = Dataset.from_list(ROWS)
    if kind == "single":
        rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
        return vf.SingleTurnEnv(
            dataset=rows, eval_dataset=rows.select(range(2)), system_prompt="Be brief.", rubric=rubric
        )
    if kind == "tool":
        return vf.ToolEnv(dataset=rows, tools=[successor], max_turns=4, rubric=vf.Rubric(funcs=[right]))
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[ranked]))
