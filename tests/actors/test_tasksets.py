"""Tasks and demonstrations: where they come from, and that the same source gives the same ones."""

import json
from pathlib import Path

import pytest

from actors.tasksets.arithmetic import arithmetic, arithmetic_demonstrations, write_arithmetic
from actors.tasksets.jsonl import demonstrations, jsonl
from actors.tasksets.reasoning_gym import reasoning_gym
from schemas import Message, Task
from schemas.errors import ConfigError


def operands(task: Task) -> frozenset[str]:
    return frozenset(task.messages[0].content.rstrip("=").split("+"))


def test_answers_are_reversed_and_three_digits_wide() -> None:
    tasks = {task.messages[0].content: task.answer for task in arithmetic()}
    assert tasks.get("37+45=", tasks.get("45+37=")) == "280"
    assert {len(answer or "") for answer in tasks.values()} == {3}


def test_splits_share_no_pair_of_operands_in_either_order() -> None:
    pairs: dict[str, set[frozenset[str]]] = {}
    ids: list[str] = []
    for task in arithmetic(seed=3):
        pairs.setdefault(task.split, set()).add(operands(task))
        ids.append(task.id)
    assert {split: len(found) for split, found in pairs.items()} == {"held-out": 500, "dev": 250, "train": 4300}
    assert not pairs["held-out"] & pairs["dev"]
    assert not (pairs["held-out"] | pairs["dev"]) & pairs["train"]
    assert len(set(ids)) == len(ids)


def test_demonstrations_are_of_train_tasks_and_validation_ones_are_unseen() -> None:
    train = {task.id: task for task in arithmetic(seed=1) if task.split == "train"}
    rows = list(arithmetic_demonstrations(seed=1))
    shown = [row for row in rows if row.split == "train"]
    kept = [row for row in rows if row.split == "validation"]
    assert (len(shown), len(kept)) == (2000, 300)
    assert all(train[row.id].answer == row.response == row.answer for row in rows)
    seen = {operands(train[row.id]) for row in shown}
    assert not any(operands(train[row.id]) in seen for row in kept)


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert list(arithmetic(seed=5)) == list(arithmetic(seed=5))
    assert list(arithmetic(seed=5)) != list(arithmetic(seed=6))


def test_written_files_are_read_back_unchanged(tmp_path: Path) -> None:
    tasks, experts = write_arithmetic(tmp_path, seed=2)
    assert list(jsonl(path=str(tasks))) == list(arithmetic(seed=2))
    assert list(demonstrations(path=str(experts))) == list(arithmetic_demonstrations(seed=2))


def test_fields_are_renamed_and_a_prompt_is_one_user_message(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "solution": 2, "level": 0.1}) + "\n\n")
    fields = {"prompt": "question", "answer": "solution", "difficulty": "level"}
    (task,) = jsonl(path=str(path), fields=fields, split="dev")
    assert task.messages == (Message(role="user", content="1+1?"),)
    assert (task.answer, task.difficulty, task.split) == ("2", 0.1, "dev")
    assert task.id == next(jsonl(path=str(path), fields=fields)).id


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "expected one JSON object"),
        ('{"answer": "1"}', "messages"),
        ('{"prompt": ""}{}', "expected one JSON object"),
        ('{"prompt": "1+1?", "difficulty": "hard"}', "difficulty"),
        ("[1, 2]", "expected one JSON object"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=says) as error:
        list(jsonl(path=str(path)))
    assert "tasks.jsonl:2" in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        list(jsonl(path=str(tmp_path / "nowhere.jsonl")))


@pytest.mark.slow
def test_reasoning_gym_tasks_are_the_same_for_the_same_seed() -> None:
    tasks = list(reasoning_gym(generator="chain_sum", size=5, seed=3, options={"min_terms": 3}))
    assert tasks == list(reasoning_gym(generator="chain_sum", size=5, seed=3, options={"min_terms": 3}))
    assert [task.id for task in tasks] == [f"chain_sum-3-{index}" for index in range(5)]
    assert all(task.answer and task.messages[0].content for task in tasks)
    with pytest.raises(ConfigError, match="chain_sum"):
        list(reasoning_gym(generator="no_such_generator"))
    with pytest.raises(ConfigError, match="foo"):
        list(reasoning_gym(generator="chain_sum", options={"foo": 1}))
