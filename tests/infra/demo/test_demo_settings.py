"""The demo's settings file: what each task and engine gives, and that a folder keeps its options."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from actors.rollout.workflow import Workflows
from actors.tasksets.files import read_rows
from actors.tasksets.guess import HIGH, HIGHER, INVALID, LOWER, TURNS, guess, guess_demonstrations
from actors.tasksets.taskset import Demonstration
from infra.cli.demo.char_model import build_char_model
from infra.cli.demo.demo import write_settings
from infra.cli.demo.settings import ENGINES, TASKS, DemoOptions
from infra.cli.demo.tasks import DemoTask
from infra.cli.settings import Settings, load_settings
from infra.settings.plugin import find
from schemas import Message
from schemas.errors import ConfigError
from streams.stages.chain_builder import build_collect, build_tasks, build_verify

EVERY = [(name, engine) for name, task in TASKS.items() for engine in task.engines]


def settings(folder: Path, **options: object) -> Settings:
    return load_settings(write_settings(DemoOptions(directory=folder, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("task", "engine"), EVERY)
def test_every_task_and_engine_gives_settings_that_hold(task: str, engine: str, tmp_path: Path) -> None:
    found = settings(tmp_path, task=task, engine=engine, seed=7, minutes=1.5)
    build_tasks(found.streams())
    build_verify(found.streams())
    build_collect(found.streams())
    Workflows(found.explore.workflow, found.explore.options, found.explore.workflows)
    assert callable(find(found.engine.use)) and callable(find(TASKS[task].write))
    assert (found.master.seed, found.master.stop.after) == (7, "110s" if task == "traffic" else "1.5m")
    assert TASKS[task].suite in {one.suite for one in found.master.evals}
    assert not found.kafka.bootstrap_servers, "it brings its own broker"


@pytest.mark.parametrize(
    "task",
    [task for task in TASKS.values() if "vllm" in task.engines and task.vocabulary],
    ids=lambda task: task.name,
)
def test_the_models_that_vllm_may_serve_have_heads_that_its_attention_on_cpus_takes(
    task: DemoTask, tmp_path: Path
) -> None:
    folder = build_char_model(tmp_path / "model", 0, task.vocabulary, task.size)
    config = json.loads((folder / "config.json").read_text())
    assert config.get("text_config", config)["head_dim"] in (32, 64, 80, 96, 112, 128)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_no_demo_waits_between_versions_for_anything_but_answers(task: DemoTask, tmp_path: Path) -> None:
    assert settings(tmp_path, task=task.name, engine=task.engines[0]).trainer.publish_interval == "0s"


def test_an_engine_a_task_does_not_run_on_is_refused(tmp_path: Path) -> None:
    assert TASKS["shapes"].engines == ("torch",) and TASKS["traffic"].engines == ("vllm",)
    assert all(set(task.engines) <= set(ENGINES) for task in TASKS.values())
    with pytest.raises(ConfigError, match="'vllm', expected one of torch"):
        settings(tmp_path, task="shapes", engine="vllm")
    with pytest.raises(ConfigError, match="expected one of instructions, add, guess, shapes"):
        settings(tmp_path, task="chess")


def test_the_guessing_games_turns_extend_each_other_in_its_own_tokens(tmp_path: Path) -> None:
    """Whatever two-token answer is sampled: numbers that run together, blanks, nothing at all."""
    from infra.model.model import load_tokenizer

    build_char_model(tmp_path / "model", 0, TASKS["guess"].vocabulary)
    tokenizer = load_tokenizer(tmp_path / "model")
    question = Message(role="user", content="01-15")
    end = tokenizer.eos_ids[0]
    for answer in ("08", "0812", "<>", "", "-08"):
        prompt = tokenizer.encode_chat([question])
        sampled = [*tokenizer.encode(answer), end]
        said = tokenizer.decode(sampled[:-1])
        history = [question, Message(role="assistant", content=said), Message(role="user", content=">")]
        assert tokenizer.encode_chat(history) == [*prompt, *sampled, *tokenizer.encode(">")], answer
    assert tokenizer.encode("08") and len(tokenizer.encode("08")) == 1


def test_the_weak_player_is_weak_and_every_number_is_played() -> None:
    rows = list(guess_demonstrations(seed=1, games=600))
    games = {row.id.rpartition("-")[0] for row in rows}
    lengths = Counter(row.id.rpartition("-")[0] for row in rows)
    assert len(games) == 600 and max(lengths.values()) == 5
    found = sum(row.response == row.meta["number"] for row in rows)
    assert 0.21 < found / len(games) < 0.33  # 0.27 of many games; 3.5 standard deviations are 0.06
    assert rows == list(guess_demonstrations(seed=1, games=600)) != list(guess_demonstrations(seed=2, games=600))
    tasks = list(guess())
    for split in ("train", "all-numbers"):
        assert sorted(task.answer or "" for task in tasks if task.split == split) == [f"{n:02d}" for n in range(1, 17)]
    assert len({task.id for task in tasks}) == 32


def test_the_guessing_game_is_one_game_in_its_settings_its_tasks_and_its_demonstrations(tmp_path: Path) -> None:
    options = settings(tmp_path, task="guess").explore.options
    world = options["environment"]["options"]
    assert (world["high"], world["turns"], options["max_turns"]) == (HIGH, TURNS, TURNS)
    assert (world["higher"], world["lower"], world["invalid"]) == (HIGHER, LOWER, INVALID)


def test_the_model_with_an_eye_reads_the_pictures_of_its_task_and_waits_for_no_more_than_there_are(
    tmp_path: Path,
) -> None:
    from actors.tasksets.shapes import KINDS, draw
    from infra.model.model import load_tokenizer
    from infra.model.vision import load_vision
    from infra.store.images import decode_image

    task = TASKS["shapes"]
    build_char_model(tmp_path / "model", 0, task.vocabulary, task.size)
    tokenizer, vision = load_tokenizer(tmp_path / "model"), load_vision(tmp_path / "model")
    assert vision is not None
    drawing = draw(KINDS[0], Random(0))
    pixels = decode_image(drawing.image, drawing.picture)
    assert vision.prepare(pixels).shape == (3, *pixels.shape[:2]), "no pixel is made up or lost"
    prompt = tokenizer.encode_chat([Message(role="user", content=drawing.kind, images=(drawing.image,))])
    vision.check(prompt, 1)
    assert tokenizer.decode(tokenizer.encode(drawing.answer)) == drawing.answer

    find(task.write)(tmp_path / "tasks", seed=0)
    rows = read_rows(tmp_path / "tasks" / "experts.jsonl", Demonstration)
    shown = Counter(row.split for row in rows)
    warmup = settings(tmp_path / "run", task="shapes", engine="torch").trainer.warmup
    assert warmup is not None and warmup.min_experiences <= shown["train"]


def test_whom_the_weak_player_shows_never_guesses_outside_what_is_left() -> None:
    """It repeats itself, and that is all it does wrong: how to choose among what is left is for rewards to teach."""
    for row in guess_demonstrations(seed=3, games=200):
        said = [message.content for message in row.messages[1:]]
        least, most = 1, HIGH
        for before, word in zip(said[::2], said[1::2], strict=True):
            least, most = (max(least, int(before) + 1), most) if word == HIGHER else (least, min(most, int(before) - 1))
        assert least <= int(row.response) <= most or row.response == said[-2], row


def test_the_stop_is_decided_on_another_suite_than_the_reported_one(tmp_path: Path) -> None:
    for task in ("instructions", "add"):
        found = settings(tmp_path / task, task=task)
        suites = {suite.suite: suite.tasks for suite in found.master.evals}
        assert found.master.stop.suite == "dev" and suites["held-out"] >= 200


def test_the_same_folder_goes_on_only_with_the_same_options(tmp_path: Path) -> None:
    settings(tmp_path, seed=1)
    settings(tmp_path, seed=1)
    with pytest.raises(ConfigError, match="other options"):
        settings(tmp_path, seed=2)
