"""`headrace check` on an app that has started: what the newest checkpoint lacks, and what cannot fit."""

import struct
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.local.address import BrokerPorts
from infra.policies.tensors import Tensor
from infra.store.directory import DirectoryStore
from tests.infra.chat_models import STYLES, build_chat_model
from tests.infra.tiny_families import build_family
from trainer.journal import checkpoint
from trainer.journal.checkpoint import Checkpoint, Position

SETTINGS = """
app = "bot"
[engine]
use = "actors.engines.scripted:ScriptedEngine"
[policy]
model = "model"
[trainer.lanes]
usual = {{}}
{lanes}
"""


def check(folder: Path, lanes: str = "") -> tuple[int, str]:
    """Exit code and output, without its line breaks."""
    (folder / "headrace.toml").write_text(SETTINGS.format(lanes=lanes))
    result = CliRunner().invoke(app, ["check", "-c", str(folder / "headrace.toml")], env={"TERM": "dumb"})
    return result.exit_code, " ".join(result.output.split())


def tensor(*shape: int) -> Tensor:
    return Tensor("F32", shape, b"\0" * 4 * shape[0] * shape[1])


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A folder whose app has a model of one weight and a checkpoint of step 3."""
    header = msgspec.json.encode({"head": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}})
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "address.json").write_bytes(msgspec.json.encode(BrokerPorts(port=1, controller_port=1)))
    build_chat_model(tmp_path / "model", STYLES["chatml"])
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 24)
    write(tmp_path, 3, {"model/head": tensor(2, 3)})
    return tmp_path


def write(folder: Path, step: int, learner: dict[str, Tensor], made_with: dict[str, str] | None = None) -> None:
    state = Checkpoint(position=Position(step=step), learner=learner, uses={}, references=())
    checkpoint.save(DirectoryStore(folder / "store"), "bot", state, made_with=made_with or {})


PAIRS = 'human = { loss = "dpo", optional = true }'


def test_a_lane_that_will_begin_a_reference_is_told_before_the_trainer_starts(started):
    code, said = check(started, PAIRS)
    assert code == 0
    assert "checkpoint of step 3 has no reference, a lane wants one: it begins as the version that training" in said
    assert "checkpoint" not in check(started)[1]


def test_a_reference_that_no_lane_wants_is_told(started):
    write(started, 5, {"model/head": tensor(2, 3), "reference/head": tensor(2, 3)})
    assert "checkpoint of step 5 has a reference that no lane wants: it is left out" in check(started)[1]
    assert "checkpoint" not in check(started, PAIRS)[1]


def test_a_checkpoint_of_another_model_is_refused_with_the_way_out(started):
    write(started, 4, {"model/head": tensor(2, 4)})
    code, said = check(started)
    assert code == 2 and "head is (2, 4), policy.model has (2, 3)" in said and "another name in `run`" in said


def test_a_checkpoint_of_other_adapters_is_refused_with_the_way_out(started):
    words = "a run keeps what it trains; expected the settings it was made with, or another name in `run`"
    for lora, state, told in (
        ("\n[trainer.lora]\nrank = 8", {}, "is of full weights, the settings ask for an adapter of rank 8"),
        ("", {"model/q.lora_A.weight": tensor(4, 3)}, "is of an adapter of rank 4, the settings ask for full weights"),
        ("\n[trainer.lora]\nrank = 8", {"model/q.lora_A.weight": tensor(4, 3)}, "of rank 4, the settings ask for"),
    ):
        if state:
            write(started, 4, state)
        code, said = check(started, lora)
        assert code == 2 and told in said and words in said, said
    code, said = check(started, "\n[trainer.lora]\nrank = 4")
    assert code == 0 and "an adapter of rank" in said


@pytest.mark.parametrize(
    ("ranks", "stage", "told"),
    [
        (2, 3, ""),
        (3, 3, "was made by 2 rank(s) of ZeRO 3, the settings ask for 3 rank(s) of ZeRO 3: weights, optimizer and"),
        (
            2,
            2,
            "the settings ask for 2 rank(s) of ZeRO 2: weights, optimizer and reference are kept, nothing begins anew",
        ),
        (0, 0, "was made by 2 rank(s) of ZeRO 3, the settings ask for one process"),
    ],
)
def test_other_ranks_or_another_stage_are_told_with_what_is_kept(started, ranks, stage, told):
    write(started, 4, {"model/head": tensor(2, 3)}, {"ranks": "2", "zero": "3"})
    use = "trainer.learners.deepspeed:DeepSpeedLearner"
    learner = f'[trainer]\nranks = {ranks}\nlearner = {{ use = "{use}", options = {{ stage = {stage} }} }}'
    code, said = check(started, learner if ranks else "")
    assert code == 0 and (told in said if told else "was made by" not in said), said


def test_a_target_that_the_model_does_not_have_is_refused_before_anything_starts(tmp_path):
    build_family(tmp_path / "model", "qwen3_moe")
    code, said = check(tmp_path, '\n[trainer.lora]\ntargets = ["q_proj", "up_proj"]')
    assert code == 2 and 'trainer.lora.targets: got "up_proj", which names no module' in said, said


def test_a_critic_that_no_loss_wants_is_refused(started):
    code, said = check(started, "[trainer.critic]")
    assert code == 2 and "trainer.critic: got a critic, expected a lane whose loss uses it" in said


def test_looking_at_an_app_that_never_started_leaves_no_store_behind(tmp_path):
    build_chat_model(tmp_path / "model", STYLES["chatml"])
    assert check(tmp_path)[0] == 0 and not (tmp_path / "store").exists()


@pytest.mark.parametrize(("first_train_step", "code"), [(0, 2), (150, 0)])
def test_a_warm_up_added_to_a_run_that_began_without_one_is_refused(
    started: Path, first_train_step: int, code: int
) -> None:
    position = Position(step=200, warmed_up=True, first_train_step=first_train_step)
    state = Checkpoint(position=position, learner={"model/head": tensor(2, 3)}, uses={}, references=())
    checkpoint.save(DirectoryStore(started / "store"), "bot", state, made_with={})
    warm_up = 'expert = { loss = "sft", optional = true }\n[trainer.warmup]\nlane = "expert"'
    found, said = check(started, warm_up)
    assert found == code, said
    assert ("this run began without a warm-up" in said) == (code == 2)
