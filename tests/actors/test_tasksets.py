"""Tasks and demonstrations: where they come from, and that the same source gives the same ones."""

import json
from pathlib import Path

import pytest

from actors.tasksets.arithmetic import arithmetic, arithmetic_demonstrations, write_arithmetic
from actors.tasksets.files import Broken, count_rows, read_rows, tasks
from actors.tasksets.reasoning_gym import reasoning_gym
from actors.tasksets.taskset import Demonstration
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
    rows, experts = write_arithmetic(tmp_path, seed=2)
    assert list(tasks(path=str(rows))) == list(read_rows(rows, Task))
    assert list(read_rows(rows, Task)) == list(arithmetic(seed=2))
    assert list(read_rows(experts, Demonstration)) == list(arithmetic_demonstrations(seed=2))


def test_fields_are_renamed_and_a_prompt_is_one_user_message(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "solution": 2, "level": 0.1}) + "\n\n")
    fields = {"prompt": "question", "answer": "solution", "difficulty": "level"}
    (task,) = tasks(path=str(path), fields=fields, split="dev")
    assert task.messages == (Message(role="user", content="1+1?"),)
    assert (task.answer, task.difficulty, task.split) == ("2", 0.1, "dev")
    assert task.id == next(tasks(path=str(path), fields=fields)).id


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
def test_a_line_that_is_wrong_is_named_and_the_next_one_read(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + '\n{"prompt": "fine too"}\n')
    broken: list[Broken] = []
    assert len(list(read_rows(path, Task, on_broken=broken.append))) == 2
    assert [one.where for one in broken] == [f"{path}:2"] and says in broken[0].reason
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2"):
        list(tasks(path=str(path)))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("nowhere.jsonl", "nowhere.csv", "nowhere.parquet"):
        with pytest.raises(ConfigError, match="nowhere"):
            list(tasks(path=str(tmp_path / name)))
        with pytest.raises(ConfigError, match="nowhere"):
            count_rows(tmp_path / name)


CSV = """question,answer,level
"What is 1+1?
Take care.",2,easy
only one
1+2?,3,
"1+3?"x,4,hard
"""


def test_a_csv_file_names_the_line_of_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_bytes(CSV.encode() + b"1+\xff?,5,hard\n1+4?,5,007\n")
    fields = {"prompt": "question", "meta.level": "level"}
    broken: list[Broken] = []
    first, last = read_rows(path, Task, fields=fields, on_broken=broken.append)
    assert (first.messages[0].content, first.answer, first.meta) == ("What is 1+1?\nTake care.", "2", {"level": "easy"})
    assert last.meta == {"level": "007"}
    assert [(one.where, one.reason) for one in broken] == [
        (f"{path}:4", "got 1 columns, expected 3 as in the header"),
        (f"{path}:5", "no field 'level', which meta.level is mapped to; there are question, answer"),
        (f"{path}:6", "',' expected after '\"'"),
        (f"{path}:7", "got bytes that are not UTF-8"),
    ]
    assert count_rows(path) == 7  # lines, an upper bound


ROWS = [
    {"question": "1+1?", "answer": 2, "messages": None, "difficulty": 0.25},
    {"question": None, "answer": 3, "messages": [{"role": "user", "content": "1+2?"}], "difficulty": None},
    {"question": None, "answer": 4, "messages": None, "difficulty": None},
]


def check_table(path: Path, row: str, num_rows: int | None) -> None:
    """What ROWS must come back as."""
    broken: list[Broken] = []
    fields = {"prompt": "question"}
    first, second = read_rows(path, Task, fields=fields, split="dev", on_broken=broken.append)
    assert (first.messages[0].content, first.answer, first.difficulty) == ("1+1?", "2", 0.25)
    assert (second.messages, second.answer) == ((Message(role="user", content="1+2?"),), "3")
    assert [one.where for one in broken] == [row] and "no conversation" in broken[0].reason
    assert count_rows(path) == num_rows
    assert first.split == second.split == "dev"


def test_parquet_rows_are_read_and_a_broken_one_named(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    path = tmp_path / "tasks.parquet"
    parquet.write_table(Table.from_pylist(ROWS), path)
    check_table(path, f"{path}: row 3", 3)
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ConfigError, match="expected a Parquet file"):
        list(tasks(path=str(path)))


def saved_dataset(folder: Path) -> Path:
    """What `datasets.Dataset.save_to_disk` writes: Arrow streams, and a state that lists them."""
    from pyarrow import Table, ipc

    folder.mkdir(parents=True)
    table = Table.from_pylist(ROWS)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 1), table.slice(1)), strict=True):
        with ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder / names[1]


def test_a_folder_saved_by_datasets_is_read_with_its_splits(tmp_path: Path) -> None:
    last = saved_dataset(tmp_path / "one")
    check_table(tmp_path / "one", f"{last}: row 2", None)
    both = tmp_path / "both"
    for split in ("train", "test"):
        saved_dataset(both / split)
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    broken: list[Broken] = []
    rows = list(read_rows(both, Task, fields={"prompt": "question"}, on_broken=broken.append))
    assert [row.split for row in rows] == ["train", "train", "test", "test"] and len(broken) == 2
    last.write_bytes(last.read_bytes()[:300])
    with pytest.raises(ConfigError, match="broken behind row"):
        list(read_rows(tmp_path / "one", Task, fields={"prompt": "question"}, on_broken=broken.append))
    with pytest.raises(ConfigError, match="saved by datasets"):
        list(tasks(path=str(tmp_path)))


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
