"""Tasks and demonstrations: files, generators, and the loader."""

import json
import re
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from actors.tasksets.files import Broken, as_rows, read_rows, tasks
from actors.tasksets.instructions import (
    CONFLICTS,
    HELD_OUT_KEYS,
    HELD_OUT_STARTS,
    HELD_OUT_TOPICS,
    HELD_OUT_WORDS,
    KINDS,
    SHOWN,
    UNSEEN_PAIRS,
    demonstrations,
    instructions,
)
from actors.tasksets.loader import FOLDER, LoadResult, example_block, load_examples, load_tasks, with_images
from actors.tasksets.taskset import Demonstration, Preference
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Message, Task
from schemas.errors import ConfigError
from schemas.experience import pair_fault
from schemas.topics import MAX_RECORD_BYTES, TASKSET_RAW
from streams.scores.instructions import follows
from streams.scores.instructions import instructions as share
from tests.actors.rig import EOS, CharTokenizer, memory_log
from tests.actors.rig import task as plain_task
from tests.streams.scores.answers import answered
from tests.tiny_models import drawings


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
    assert [fault.where for fault in broken] == [f"{path}:2"] and says in broken[0].reason
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2"):
        list(tasks(path=str(path)))


def test_a_cell_of_a_wrong_type_is_named() -> None:
    cells = {"row 1": {"prompt": "?", "meta": "hard", "level": 3}, "row 2": {"messages": [1j], "level": 3}}
    broken: list[Broken] = []
    assert list(as_rows(cells.items(), Task, fields={"meta.level": "level"}, on_broken=broken.append)) == []
    assert broken[0] == Broken("row 1", "meta: got str, expected an object")
    assert broken[1].where == "row 2" and "complex" in broken[1].reason


def test_the_id_of_a_row_without_one_is_that_of_its_conversation_and_of_what_belongs_to_it() -> None:
    rows: list[dict[str, object]] = [{}, {"answer": 2}, {"meta": {"a": 1, "b": 2}}, {"meta": {"b": 2, "a": 1}}]
    ids = [task.id for task in as_rows((("", {"prompt": "?", **row}) for row in rows), Task)]
    assert ids[0] == "253b2901a49e5e9d" and ids[2] == ids[3] and len(set(ids)) == 3
    shown = as_rows((("", {"prompt": "?", "response": text}) for text in "abba"), Demonstration)
    assert len({row.id for row in shown}) == 2


ROWS = [
    {"question": "1+1?", "answer": 2, "messages": None, "difficulty": 0.25},
    {"question": None, "answer": 3, "messages": [{"role": "user", "content": "1+2?"}], "difficulty": None},
    {"question": None, "answer": 4, "messages": None, "difficulty": None},
]


def test_parquet_rows_are_read_and_a_broken_one_named(tmp_path: Path) -> None:
    from pyarrow import Table, parquet

    path, broken = tmp_path / "tasks.parquet", list[Broken]()
    parquet.write_table(Table.from_pylist(ROWS), path)
    first, second = read_rows(path, Task, fields={"prompt": "question"}, split="dev", on_broken=broken.append)
    assert (first.messages[0].content, first.answer, first.difficulty) == ("1+1?", "2", 0.25)
    assert (second.messages, second.answer) == ((Message(role="user", content="1+2?"),), "3")
    assert [fault.where for fault in broken] == [f"{path}: row 3"] and "no conversation" in broken[0].reason
    assert first.split == second.split == "dev"
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(ConfigError, match="expected a Parquet file"):
        list(tasks(path=str(path)))


def test_a_row_whose_image_is_gone_or_none_is_named_and_the_others_are_loaded(tmp_path: Path) -> None:
    pictures = drawings(4)
    messages = [(Message(role="user", content="count", images=(drawing.image,)),) for drawing in pictures]
    tasks = [plain_task(f"task-{number}", messages=asked) for number, asked in enumerate(messages)]
    (tmp_path / FOLDER).mkdir()
    _, spoiled, earlier, whole = pictures
    (tmp_path / FOLDER / spoiled.image.sha256).write_bytes(b"no picture")
    (tmp_path / FOLDER / whole.image.sha256).write_bytes(whole.picture)
    store, broken = MemoryStore(), list[Broken]()
    store.put(BLOBS + earlier.image.sha256, earlier.picture)  # an earlier load brought it
    loaded = list(with_images(tasks, tmp_path / "tasks.jsonl", store, broken.append))
    assert loaded == tasks[2:]
    assert [tasks[0].id in broken[0].where, "missing" in broken[0].reason] == [True, True]
    assert [tasks[1].id in broken[1].where, "altered" in broken[1].reason] == [True, True]
    assert len(broken) == 2


def row(name: str, split: str = "train") -> Demonstration:
    messages = (Message(role="user", content="37+45="),)
    return Demonstration(id=name, messages=messages, response="280", answer="280", split=split)


def test_a_demonstration_is_an_expert_experience_that_nobody_sampled() -> None:
    experience = example_block(row("add-3745", "validation"), CharTokenizer()).experiences[0]
    assert list(experience.tokens) == [*(ord(character) for character in "37+45=280"), EOS]
    assert (experience.num_prompt, experience.num_sampled) == (6, 4)
    assert (experience.lane, experience.group, experience.group_size) == ("expert", "expert-add-3745.0", 1)
    assert [(span.version, span.ratio) for span in experience.spans] == [(-1, False)]
    assert list(experience.logprobs) == [0.0] * 4
    assert experience.response == "280"
    assert (experience.answer, experience.task, experience.held_out) == ("280", "add-3745", True)
    assert (experience.kind, experience.meta) == ("demonstration", {})


async def test_a_second_load_adds_nothing_and_repeated_rows_are_counted() -> None:
    log = await memory_log()
    progress: list[int] = []
    tasks = [plain_task("a"), plain_task("b"), plain_task("a")]
    first = await load_tasks(log, tasks, on_progress=progress.append)
    second = await load_tasks(log, [*tasks, plain_task("c")])
    records = [message.value async for message in log.scan(TASKSET_RAW)]
    assert first == LoadResult(loaded=2, repeated=1, known=0)
    assert second == LoadResult(loaded=1, repeated=1, known=2)
    assert sorted(record.id for record in records if isinstance(record, Task)) == ["a", "b", "c"]
    assert progress == [3]


async def test_a_row_that_cannot_be_read_stops_the_load_after_what_came_before() -> None:
    def rows():  # type: ignore[no-untyped-def]
        yield from (plain_task(f"task-{index}") for index in range(600))
        raise ValueError("line 601")

    log = await memory_log()
    with pytest.raises(ValueError, match="601"):
        await load_tasks(log, rows())
    assert len([message async for message in log.scan(TASKSET_RAW)]) == 512


async def test_a_task_that_no_record_takes_is_named_and_the_next_one_loaded() -> None:
    log, broken = await memory_log(), list[Broken]()
    long = plain_task("long", messages=(Message(role="user", content="9" * MAX_RECORD_BYTES),))
    done = await load_tasks(log, [plain_task("a"), long, plain_task("b")], on_broken=broken.append)
    assert done == LoadResult(loaded=2, repeated=0, known=0)
    assert [fault.where for fault in broken] == ["task long"] and "expected at most" in broken[0].reason


def preference(name: str, chosen: str, rejected: str) -> Preference:
    return Preference(id=name, messages=(Message(role="user", content="2+2="),), chosen=chosen, rejected=rejected)


def test_a_pair_is_two_marked_answers_of_one_group_that_nobody_sampled() -> None:
    one, other = example_block(preference("q", "4", "five"), CharTokenizer()).experiences
    assert (one.kind, other.kind) == ("chosen", "rejected")
    assert (one.response, other.response, one.lane, one.group_size) == ("4", "five", "human", 2)
    assert list(other.tokens) == [*(ord(character) for character in "2+2=five"), EOS]
    assert one.group == other.group and one.is_given and not one.spans[0].ratio
    assert pair_fault((one, other)) == ""


async def test_pairs_are_loaded_once_and_those_with_equal_sides_are_named(tmp_path: Path) -> None:
    log = await memory_log()
    sides = [("a", "4", "5"), ("a", "4", "6"), ("b", "4", "4"), ("a", "4", "5")]
    rows = [{"id": name, "prompt": "2+2=", "chosen": chosen, "rejected": rejected} for name, chosen, rejected in sides]
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode(cells) + b"\n" for cells in rows))
    broken: list[Broken] = []
    first = await load_examples(log, read_rows(file, Preference, on_broken=broken.append), CharTokenizer())
    second = await load_examples(log, [preference("a", "4", "5"), preference("a", "4", "6")], CharTokenizer())
    assert first == LoadResult(loaded=2, repeated=1, known=0) and second.loaded == 0
    assert [fault.where for fault in broken] == [f"{file}:3"] and "pair b: got equal sides" in broken[0].reason


async def test_what_is_longer_than_the_context_is_named_and_the_next_one_loaded() -> None:
    log = await memory_log()
    broken: list[Broken] = []
    long = msgspec.structs.replace(row("long"), response="280" * 9)
    experts = await load_examples(
        log, [row("a"), long, row("b")], CharTokenizer(), max_tokens=10, on_broken=broken.append
    )
    pairs = [preference("c", "4", "5"), preference("d", "4", "five and a half"), preference("e", "4", "6")]
    pairs = await load_examples(log, pairs, CharTokenizer(), max_tokens=10, on_broken=broken.append)
    assert (experts.loaded, pairs.loaded) == (2, 2)
    assert [fault.where for fault in broken] == ["demonstration long", "pair d"]
    assert broken[0].reason == "got 34 tokens, expected at most 10, which is the model's context"


@pytest.mark.parametrize(
    ("kind", "argument", "right", "wrong"),
    [
        ("word", "rain", ["Rain falls.", "the rain"], ["Rainbows", "", "train"]),
        ("max_words", 3, ["Rain falls here.", "rain"], ["Rain falls over there.", ""]),
        ("sentences", 2, ["It rains. We run!", 'He said "go." I went.'], ["It rains.", "It rains. We run", "A. B. C."]),
        ("lower_case", True, ["it rains.", "déjà vu"], ["It rains.", "", "..."]),
        ("no_commas", True, ["It rains and pours."], ["Rain, snow", "雨、雪", ""]),
        ("ending", "so they say", ["Rain is wet, so they say.", "so they SAY"], ["so they say it", "rain"]),
        ("start", "today", ["Today it rains.", '"today', "TODAY"], ["It rains today", "", "todays rain"]),
        ("bullets", 2, ["- rain\n- snow", "* rain\n\n* snow"], ["- rain", "rain\n- snow\n- ice", "- rain\n-"]),
        ("quotes", True, ['"It rains."', "“It rains.”"], ['It "rains"', '"rain" and "snow"', '""', '"']),
        (
            "json",
            ["size"],
            ['{"size": "big"}', '```json\n{"size": 3}\n```'],
            ["{}", '{"size": ""}', '["size"]', "size"],
        ),
    ],
)
def test_each_kind_knows_what_follows_it(kind: str, argument: object, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not follows(text, kind, argument)] == []  # type: ignore[arg-type]
    assert [text for text in wrong if follows(text, kind, argument)] == []  # type: ignore[arg-type]


def test_the_score_is_the_share_that_is_followed_and_an_answer_that_was_cut_off_follows_none() -> None:
    answer = '[["word", "rain"], ["lower_case", true]]'
    half = answered("Rain falls.", answer=answer)
    assert share(half) == 0.5
    assert share(msgspec.structs.replace(half, end="truncated")) == 0.0
    assert share(msgspec.structs.replace(half, answer=None)) is None
    with pytest.raises(ValueError, match="no list"):
        share(msgspec.structs.replace(half, answer="4"))


def kinds(task: Task) -> list[str]:
    return str(task.meta["kinds"]).split("+")


def pairs(task: Task) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in combinations(kinds(task), 2)}


def test_no_two_splits_share_a_topic_word_key_or_phrase_and_pairs_of_kinds_are_held_out() -> None:
    rows = list(instructions(seed=3))
    given: dict[str, set[str]] = {"train": set(), "dev": set(), "held-out": set()}
    for task in rows:
        for _, argument in msgspec.json.decode(task.answer or ""):
            arguments = argument if isinstance(argument, list) else [argument]
            given[task.split].update(argument for argument in arguments if isinstance(argument, str))
    assert len(set().union(*given.values())) == sum(map(len, given.values()))
    train = [task for task in rows if task.split in ("train", "dev")]
    held_out = [task for task in rows if task.split == "held-out"]
    assert not set().union(*map(pairs, train)) & (UNSEEN_PAIRS | CONFLICTS)
    unseen = [task for task in held_out if task.id.startswith("unseen")]
    assert len(held_out) == 200 and held_out[-len(unseen) :] == unseen and len(unseen) == 80
    assert all(bool(pairs(task) & UNSEEN_PAIRS) == (task in unseen) for task in held_out)
    assert (
        {kind for task in train for kind in kinds(task)}
        == {kind for task in held_out for kind in kinds(task)}
        == set(KINDS)
    )
    prompts = [task.messages[0].content for task in rows]
    assert len(set(prompts)) == len(prompts)
    assert rows == list(instructions(seed=3)) != list(instructions(seed=4))


def test_every_kind_is_in_a_tenth_of_the_prompts_for_training() -> None:
    asked = [task.meta["kinds"].split("+") for task in instructions() if task.split == "train"]
    assert all(sum(kind in kinds for kinds in asked) >= 0.1 * len(asked) for kind in KINDS)


def test_no_prompt_for_training_and_no_demonstration_has_a_word_that_is_held_out() -> None:
    held_out = {*f"{HELD_OUT_TOPICS} {HELD_OUT_WORDS} {HELD_OUT_STARTS} {HELD_OUT_KEYS}".split()}
    prompts = [task.messages[0].content for task in instructions() if task.split != "held-out"]
    shown = [text for row in demonstrations() for text in (row.messages[0].content, row.response)]
    assert not {word for text in (*prompts, *shown) for word in re.findall("[a-z]+", text.lower())} & held_out


def test_demonstrations_follow_their_instructions_and_show_single_kinds() -> None:
    rows = list(demonstrations(seed=3))
    for row in rows:
        rules = msgspec.json.decode(row.answer or "")
        assert len(rules) == 2 and rules[1][0] in SHOWN, row
        assert all(follows(row.response, kind, argument) for kind, argument in rules), row
    assert sum(row.split == "train" for row in rows) == 360 and len({row.id for row in rows}) == len(rows)
