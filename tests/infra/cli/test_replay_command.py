"""`headrace replay` and `export`: what is printed and promised, and archives from elsewhere."""

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.cli.options import SettingsFile
from infra.cli.repeat.export import fill
from infra.cli.repeat.replay import ReplayResult, check_names, summarize_checkpoints
from infra.cli.repeat.reprocess import laid_over
from infra.cli.repeat.source import ReplaySource, unpacked
from infra.cli.settings import Settings, load_settings
from infra.cli.terminal import Screen
from infra.ledger.archive import writing
from infra.ledger.bundle import Bundle, PartitionRange
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.settings.config import PolicyConfig, Use
from infra.store.memory import MemoryStore
from schemas import Batch, encode, topics
from schemas.errors import ConfigError
from tests.infra.ledger.ledger_records import log_with_ann
from tests.trainer.memory_run import CONFIG, FLOOR, STEPS, train
from trainer.config import LOSSES, TrainerConfig
from trainer.journal import checkpoint
from trainer.learners.learner import LEARNERS, foreign_names
from trainer.learners.scripted import ScriptedLearner
from trainer.replay.replay import Compared, find_start

SCRIPTED = "trainer.learners.scripted:ScriptedLearner"
TORCH, DEEPSPEED = "trainer.learners.torch:TorchLearner", "trainer.learners.deepspeed:DeepSpeedLearner"
Damage = Callable[[Log, MemoryStore], None]


class OtherwiseMade(ScriptedLearner):
    """Says that it was made with other code and more threads."""

    def numerics(self) -> dict[str, str]:
        return {**super().numerics(), "code": "0123456789ab", "threads": "4"}


def exported(
    tmp_path: Path,
    *,
    options: dict[str, Any] = {},  # noqa: B006
    damage: Damage | None = None,
    learner: ScriptedLearner | None = None,
    sealed: tuple[int, ...] = (),
    from_step: int | None = None,
) -> Path:
    """An archive of a finished run; options: of the learner that replays it. sealed: issue numbers of groups that are."""
    file = tmp_path / "run.headrace"

    async def main() -> None:
        log, store = await log_with_ann(sealed)
        config = msgspec.structs.replace(CONFIG, learner=Use(use=SCRIPTED))
        await train(log, store, learner or ScriptedLearner(), config)
        settings = Settings(
            app="t",
            pacing=FLOOR.pacing,
            policy=PolicyConfig(model="somebody/tiny"),
            trainer=msgspec.structs.replace(config, learner=Use(use=SCRIPTED, options=options)),
        )
        start = await find_start(log, store, "t", from_step=from_step, to_step=None)
        if damage is not None:
            damage(log, store)
        with writing(file) as archive:
            archive.finish(await fill(archive, ReplaySource(settings, log, store, "somebody/tiny"), start))

    asyncio.run(main())
    return file


def call(*arguments: object) -> Result:
    env = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


def verdict(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code
    return found


def test_an_exported_run_replays_equal_with_no_broker(tmp_path: Path) -> None:
    file = exported(tmp_path)
    result = call("replay", file, "--verify")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.output
    num = sum(line.startswith("step ") for line in lines)
    assert num > 3 and all(line.endswith("  equal") for line in lines if line.startswith("step "))
    assert f"all {num} checkpoints equal" in lines and "times faster than the run" in result.stdout
    assert "promised" not in result.stdout
    found = verdict(call("replay", file, "--verify", "--json"))
    assert found["equal"] and found["bits_promised"] and len(found["checkpoints"]) == num
    assert found["steps"] == found["to_step"] + 1 and not found["faults"]


def test_an_export_from_the_newest_checkpoint_holds_no_block(tmp_path: Path) -> None:
    file = exported(tmp_path, from_step=STEPS * 10)
    found = json.loads(call("export", file, tmp_path / "again.headrace", "--json").stdout)
    assert found["steps"] == found["records"]["buffer"] == 0
    again = json.loads(call("replay", file, "--json").stdout)
    assert again["steps"] == again["exit_code"] == 0


def test_without_verify_nothing_is_judged_and_with_it_a_step_without_a_checkpoint_is_no_success(tmp_path: Path) -> None:
    file = exported(tmp_path, damage=other_advantages)
    result = call("replay", file, "--to", "11")
    assert result.exit_code == 0 and "equal" not in result.stdout and "DIFFERS" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("12 steps from step -1 to 11")
    result = call("replay", file, "--verify", "--to", "0")
    assert result.exit_code == 1 and "nothing is verified: no step led to a checkpoint" in result.stdout


def other_advantages(log: Log, store: MemoryStore) -> None:
    """Alter step 9 of the journal so that it still decodes."""
    assert isinstance(log.bus, MemoryBus)
    records = log.bus.log(Partition(log.name(topics.BATCHES), 0)).records
    for at, record in enumerate(records):
        batch = log.decode(record).value
        if isinstance(batch, Batch) and batch.step == 9:
            items = tuple(msgspec.structs.replace(item, advantage=item.advantage + 1.0) for item in batch.items)
            altered = encode(msgspec.structs.replace(batch, items=items))
            records[at] = msgspec.structs.replace(record, value=altered)


def test_a_difference_is_told_with_where_it_begins_and_exit_code_1(tmp_path: Path) -> None:
    file = exported(tmp_path, damage=other_advantages)
    result = call("replay", file, "--verify")
    assert result.exit_code == 1
    assert "DIFFERS: the run recorded " in result.stdout and "the first at step" in result.stdout
    assert "so it is in the steps after that" in result.stdout
    assert not verdict(call("replay", file, "--verify", "--json"))["equal"]


@pytest.mark.parametrize(
    ("options", "learner", "told", "differs", "equal"),
    [
        ({"device": "cuda", "drift": 0.001}, None, ["device: cpu in the run, cuda here", "settings: "],
         "device, settings", False),
        ({}, OtherwiseMade(), ["code: 0123456789ab in the run", "threads: 4 in the run"], "code, threads", True),
    ],
    ids=["hardware", "code"],
)  # fmt: skip
def test_other_hardware_or_code_is_told_and_its_differences_are_no_failure(
    tmp_path: Path, options: dict[str, Any], learner: ScriptedLearner | None, told: list[str], differs: str, equal: bool
) -> None:
    file = exported(tmp_path, options=options, learner=learner)
    result = call("replay", file, "--verify")
    assert result.exit_code == 0, result.output
    assert all(words in result.stdout for words in told)
    assert f"bits are not promised here (differs from the run: {differs})" in result.stdout
    found = verdict(call("replay", file, "--verify", "--json"))
    assert not found["bits_promised"] and found["equal"] is equal and ", ".join(found["differs"]) == differs


def altered_checkpoint(log: Log, store: MemoryStore) -> None:
    oldest = checkpoint.manifests(store, "t")[0]
    store.put(oldest.state, store.get(oldest.state)[:-1] + b"x")


def test_an_archive_with_an_altered_checkpoint_is_one_line(tmp_path: Path) -> None:
    result = call("replay", exported(tmp_path, damage=altered_checkpoint), "--verify")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "got no usable checkpoint: checkpoint of step -1: " in line and "its bytes are not those" in line


def test_an_archive_holds_no_address_and_no_option_of_an_engine(tmp_path: Path) -> None:
    from infra.cli.repeat.source import shaping

    settings = msgspec.convert(
        {
            "app": "t",
            "kafka": {"bootstrap_servers": "kafka.internal:9092"},
            "store": {"url": "s3://bucket"},
            "engine": {"use": "a:B", "options": {"api_key": "secret"}},
        },
        Settings,
    )
    text = msgspec.json.encode(shaping(settings)).decode()
    assert not any(word in text for word in ("kafka.internal", "s3://", "secret", "api_key"))


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x28\xb5\x2f\xfd" + bytes(20), None])
def test_what_is_no_archive_or_not_there_is_one_line_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    result = call("replay", file)
    assert result.exit_code == (2 if content is None else 1) and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert str(file) in line and (content is not None or "no run folder and no archive is there" in line)


def test_a_damaged_store_is_told_with_the_exit_code(tmp_path: Path) -> None:
    result = ReplayResult(
        run="t", from_step=-1, to_step=3, steps=4, equal=True, bits_promised=True, checkpoints=(), not_compared=0,
        faults=("checkpoint of step 3: its bytes are not those the manifest names",), differs={}, replay_s=1.0, run_s=2.0,
    )  # fmt: skip
    equal = Compared(step=3, version=1, got="a", expected=("a",), made_with={})
    console = Screen(file=io.StringIO(), width=200)
    summarize_checkpoints(console, msgspec.structs.replace(result, checkpoints=(equal,)))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "1 checkpoints equal, 1 damaged in the store: so it exits with 1\n"


def test_a_folder_that_is_no_run_is_one_line_and_stays_as_it_was(tmp_path: Path) -> None:
    result = call("replay", tmp_path)
    assert result.exit_code == 2 and "headrace.toml" in result.stderr
    (tmp_path / "headrace.toml").write_text('app = "t"\n')
    for arguments in (["replay", tmp_path], ["export", tmp_path, tmp_path / "out"]):
        result = call(*arguments)
        assert result.exit_code == 2 and "no run was started here" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["headrace.toml"]


def test_an_export_says_how_many_blocks_are_sealed_and_that_their_keys_are_not_in_it(tmp_path: Path) -> None:
    file = exported(tmp_path, sealed=(6, 7, 20))
    result = call("export", file, tmp_path / "again.headrace")
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    assert "3 of 29 blocks are sealed, and their keys are not in the file" in told
    assert "cannot be replayed from it, only where the run's store is" in told
    found = json.loads(call("export", file, tmp_path / "third.headrace", "--json").stdout)
    assert found["sealed"] == 3 and found["records"]["buffer"] == 29


def test_a_replay_that_could_verify_nothing_is_no_success_and_says_whose_keys_it_lacks(tmp_path: Path) -> None:
    file = exported(tmp_path, sealed=tuple(range(2 * STEPS)), from_step=12)  # behind the warm-up, on demonstrations
    result = call("replay", file, "--verify")
    assert result.exit_code == 1, result.output
    assert "nothing is verified" in result.stdout and "checkpoints equal" not in result.stdout
    assert "their texts are sealed, and the keys are not here" in result.stdout
    assert "forgotten" not in result.stdout
    found = verdict(call("replay", file, "--verify", "--json"))
    assert found["verified"] == 0 and found["without_key"] and found["forgotten"] == []
    assert call("replay", file).exit_code == 0, "what is not asked to verify replays what it can"


def test_a_replay_that_ends_early_verifies_what_came_before_and_says_that_no_more_is(tmp_path: Path) -> None:
    file = exported(tmp_path, sealed=(20,))
    result = call("replay", file, "--verify")
    assert result.exit_code == 0, result.output
    assert "none after it is verified" in result.stdout and "all " not in result.stdout
    found = verdict(call("replay", file, "--verify", "--json"))
    (step,) = found["without_key"]
    assert found["checkpoints"][-1]["step"] < step and found["verified"] > 0 and found["steps"] == found["to_step"] + 1


def test_reprocess_lays_a_few_tables_over_the_settings_and_takes_whole_settings_as_they_are(tmp_path: Path) -> None:
    config, part, whole = (tmp_path / name for name in ("headrace.toml", "part.toml", "whole.toml"))
    config.write_text('app = "t"\n[verify.filter]\nmin_tokens = 2\nmax_tokens = 9\n')
    part.write_text("[verify.filter]\nmin_tokens = 4\n")
    whole.write_text('app = "t"\n[verify.filter]\nmin_tokens = 4\n')
    found = laid_over(SettingsFile(config), part)
    assert (found.app, found.verify.filter.min_tokens, found.verify.filter.max_tokens) == ("t", 4, 9)
    assert laid_over(SettingsFile(config), whole).verify.filter.max_tokens != 9
    with pytest.raises(ConfigError, match=r"--with .*gone\.toml: no such file"):
        laid_over(SettingsFile(config), tmp_path / "gone.toml")


def foreign(path: Path, model: str = "model", **trainer: Any) -> Path:
    """An archive with these settings of a trainer, and with nothing else in it."""
    settings = {"app": "t", "policy": {"model": model}, "trainer": trainer}
    with writing(path) as archive:
        archive.add("model/config.json", b"{}")
        archive.finish(Bundle(app="t", settings=settings, topics={topics.BUFFER.name: (PartitionRange(0, 0),)}))
    return path


def runs(mark: Path) -> dict[str, Any]:
    """A lane whose loss would write `mark`."""
    return {"loss": "subprocess:Popen", "options": {"args": ["touch", str(mark)]}}


@pytest.mark.parametrize("place", ["loss", "learner"])
def test_replaying_an_archive_runs_nothing_that_it_names(tmp_path: Path, place: str) -> None:
    mark = tmp_path / "mark"
    lane = runs(mark)
    named: dict[str, Any] = (
        {"lanes": {"usual": lane}}
        if place == "loss"
        else {"learner": {"use": lane["loss"], "options": lane["options"]}}
    )
    result = call("replay", foreign(tmp_path / "run", **named))
    assert result.exit_code == 2 and not mark.exists()
    (line,) = result.stderr.splitlines()
    assert "subprocess:Popen" in line and "--trust-plugins" in line


def test_trusted_names_are_printed_before_they_are_imported(tmp_path: Path) -> None:
    named = {"use": "no_such_module_anywhere:Learner"}
    result = call("replay", foreign(tmp_path / "run", learner=named), "--trust-plugins")
    assert result.exit_code == 2
    told = (result.stdout + result.stderr).splitlines()
    assert told[0] == 'trusted: trainer.learner.use = "no_such_module_anywhere:Learner"'
    assert 'no module "no_such_module_anywhere"' in told[-1]


def test_a_settings_file_beside_the_data_runs_nothing_either(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "evil.py").write_text(f"open({str(mark)!r}, 'w')\ndef loss(inputs): ...\n")
    toml = 'app = "t"\nplugins = ["plugins"]\n[trainer.lanes.usual]\nloss = "evil:loss"\n'
    (tmp_path / "headrace.toml").write_text(toml)
    source = ReplaySource(load_settings(tmp_path / "headrace.toml"), Log(MemoryBus(), "t"), MemoryStore(), "")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="evil:loss"):
        check_names(Console(), source, trusted=False)
    assert not mark.exists() and sys.path == before


@pytest.mark.parametrize(
    ("config", "told"),
    [
        *(
            ({"lanes": {"usual": {"loss": name}}}, "")
            for loss in LOSSES
            for name in (loss, f"trainer.losses.losses:{loss}")
        ),
        *(({"learner": {"use": use}}, "") for use in LEARNERS),
        ({"lanes": {"usual": {"loss": "os:system"}}}, 'trainer.lanes.usual.loss = "os:system"'),
        ({"lanes": {"usual": {"loss": "trainer.losses.losses:load"}}}, "trainer.losses.losses:load"),
        ({"lanes": {"usual": {"loss": "infra.cli.commands.init:init"}}}, "infra.cli.commands.init:init"),
        ({"lanes": {"expert": {"loss": "../grpo"}}}, "../grpo"),
        ({"learner": {"use": "builtins:exec"}}, 'trainer.learner.use = "builtins:exec"'),
        ({"learner": {"use": TORCH, "options": {"model": "/etc"}}}, "trainer.learner.options.model"),
        ({"learner": {"use": DEEPSPEED, "options": {"json": {"wandb": {}}}}}, "trainer.learner.options.json"),
    ],
)
def test_what_ships_is_known_by_its_name_and_by_its_module_and_anything_else_is_told(
    config: dict[str, Any], told: str
) -> None:
    found = foreign_names(msgspec.convert(config, TrainerConfig))
    assert len(found) == bool(told) and all(told in name for name in found)


def test_only_the_settings_that_shape_a_step_are_taken_from_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = {
        "app": "t",
        "plugins": ["/tmp"],
        "engine": {"use": "subprocess:Popen"},
        "kafka": {"bootstrap_servers": "evil:9092"},
        "store": {"url": "s3://evil"},
        "policy": {"model": "somebody/tiny"},
    }
    with writing(path) as archive:
        archive.finish(Bundle(app="t", settings=settings))
    folder = tmp_path / "out"
    folder.mkdir()
    found = unpacked(path, folder).settings
    assert found.plugins == () and found.engine.use != "subprocess:Popen"
    assert found.kafka.bootstrap_servers == "" and found.store.url == "store"


@pytest.mark.parametrize("model", ["/etc", "../outside", "..", "a/../../b", "~/x", "", "a/b/c", "model/../x"])
def test_an_archive_names_no_model_of_this_machine(tmp_path: Path, model: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"policy\.model"):
        unpacked(foreign(tmp_path / "run", model=model), folder)


def test_what_an_archive_may_unpack_is_bounded_and_the_flag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with writing(path) as archive:
        archive.add("zeros", bytes(2**21))
        archive.finish(Bundle(app="t", settings={"app": "t"}))
    result = call("replay", path, "--max-unpacked", 2**20)
    assert result.exit_code == 1 and "--max-unpacked" in result.stderr


@pytest.mark.parametrize("command", ["replay", "export"])
def test_a_run_s_folder_names_no_store_that_is_imported_unless_it_is_trusted(tmp_path: Path, command: str) -> None:
    mark = tmp_path / "mark"
    options = f'{{ args = ["touch", "{mark}"] }}'
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n[store]\nuse = "subprocess:Popen"\noptions = {options}\n')
    result = call(command, tmp_path, *((tmp_path / "archive",) if command == "export" else ()))
    assert result.exit_code == 2 and not mark.exists()
    assert "subprocess:Popen" in result.stderr and "--trust-plugins" in result.stderr
