"""`headrace plan` of a model: exact bytes from config.json alone, and the setting that mends what will not fit."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.cli.plan.model import ROUGH, LearnerPlan, Machine, learner_state, plan_model
from infra.cli.settings import load_settings
from infra.model.size import model_size
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.memory import PEAK_MB
from trainer.config import LoraConfig

pytestmark = pytest.mark.slow  # importing transformers alone takes seconds
CONFIGS = Path(__file__).parents[1] / "configs"
# Parameters as the models' cards give them: 8.2, 32.8, 30.5 and 70.6 billion.
PARAMETERS = {
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-70b": 70_553_706_496,
}
TOML = """
app = "t"
[policy]
model = "{model}"
[trainer]
dtype = "bfloat16"
{more}
"""


def plan_config(folder: Path, model: str, more: str = "") -> Path:
    path = folder / "headrace.toml"
    path.write_text(TOML.format(model=CONFIGS / model, more=more))
    return path


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_folder_with_config_json_alone_gives_the_published_number_of_parameters(model: str) -> None:
    assert [path.name for path in (CONFIGS / model).iterdir()] == ["config.json"]
    assert json.loads((CONFIGS / model / "config.json").read_text())["source"]
    size = model_size(CONFIGS / model)
    assert size.trained == size.published == PARAMETERS[model]


def test_the_largest_model_is_sized_without_the_memory_it_would_take(tmp_path: Path) -> None:
    code = PEAK_MB + (
        "import sys; from pathlib import Path; from infra.cli.plan.model import Machine, plan_model\n"
        "from infra.cli.settings import load_settings\n"
        "plan_model(load_settings(Path(sys.argv[1]), []), Machine(80e9, 1e12, 1e11, 120.0))\n"
        "print(peak_mb())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(plan_config(tmp_path, "llama-70b"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(ran.stdout.split()[-1]) < 1000, "the weights alone are 141 GB"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_predicted_bytes_of_weights_gradients_and_optimizer_are_those_a_learner_holds(
    tmp_path: Path, family: str, dtype: str
) -> None:
    folder = build_family(tmp_path / family, family)
    learner = opened("trainer.learners.torch:TorchLearner", str(folder), dtype=dtype)
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    weights = dict(learner.model.module.named_parameters())
    masters = [learner._masters[name] for name in weights if learner._masters[name] is not weights[name]]
    held = {
        "weights": sum(value.nbytes for value in weights.values()),
        "masters": sum(master.nbytes for master in masters),
        # A step lets go of them; they have the shape and dtype of what the optimizer moves.
        "gradients": sum(value.nbytes for value in learner._masters.values()),
        "moments": sum(
            state[key].nbytes for state in learner._optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ),
    }
    plan = LearnerPlan(ranks=1, stage=-1, dtype=dtype, tokens=64, recomputes=False)
    assert learner_state(model_size(folder), plan) == {what: num_bytes for what, num_bytes in held.items() if num_bytes}
    published = sum(tensor.num_bytes for tensor in learner.tensors().values())
    assert published == model_size(folder).published * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_an_adapter_the_base_has_weights_alone_and_the_adapter_all_the_rest(tmp_path: Path, dtype: str) -> None:
    folder = build_family(tmp_path / "qwen3", "qwen3")
    learner = opened("trainer.learners.torch:TorchLearner", str(folder), dtype=dtype, lora=LoraConfig(rank=4))
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    app = plan_config(tmp_path, str(folder), "[trainer.lora]\nrank = 4")
    settings = load_settings(app, [f'trainer.dtype="{dtype}"'])
    found = plan_model(settings, Machine(gpu=80e9, host=2e12, shm=1e11, step_s=120.0))
    rows = {what: value for what, value in found.learner["GPU"].items() if not what.endswith(ROUGH)}
    masters = sum(value.nbytes for value in learner._masters.values())
    assert rows.pop("weights") == sum(parameter.nbytes for parameter in learner.model.module.parameters())
    assert rows == {"gradients": masters, "moments": 2 * masters} | ({"masters": masters} if dtype != "float32" else {})
    published = sum(tensor.num_bytes for tensor in learner.tensors().values())
    assert found.version["anchor_bytes"] == published * found.version["versions"]
    saved = sum(item.num_bytes for name, item in learner.save().items() if item.shape and name != "adapter")
    assert saved == 12 * found.size.trained


def test_every_rank_of_zero_3_holds_its_share(tmp_path: Path) -> None:
    size = model_size(CONFIGS / "qwen3-8b")
    plan = LearnerPlan(ranks=8, stage=3, dtype="bfloat16", tokens=1024, recomputes=True)
    rows = learner_state(size, plan)
    assert rows["weights"] == size.trained * 2 / 8 and rows["moments"] == size.trained * 8 / 8
    assert rows["gradients"] == size.trained * 4 / 8
    beside = msgspec.structs.replace(plan, reference=2, critic=True)
    rows = learner_state(size, beside)
    assert rows["reference"] == size.trained * 2 / 8 and rows["critic"] == size.trained * (4 + 4 + 4 + 8) / 8


def test_what_will_not_fit_names_the_setting_and_with_that_setting_it_fits(tmp_path: Path) -> None:
    machine = Machine(gpu=80e9, host=2e12, shm=2e11, step_s=20.0)
    found = plan_model(load_settings(plan_config(tmp_path, "qwen3-32b", "activation_checkpointing = true")), machine)
    learner, engine, pace = found.problems
    assert "a learner's rank needs" in learner and "stage = 3 } }, trainer.ranks = 16" in learner
    assert "engine.options.tensor_parallel_size = 2" in engine
    assert "pacing.steps_per_version = 4" in pace
    mended = plan_config(
        tmp_path,
        "qwen3-32b",
        "activation_checkpointing = true\nranks = 16\n[trainer.learner]\n"
        'use = "trainer.learners.deepspeed:DeepSpeedLearner"\noptions = { stage = 3 }\n[pacing]\nsteps_per_version = 4\n'
        '[engine]\nuse = "actors.engines.vllm.engine:VllmEngine"\noptions = { tensor_parallel_size = 2 }',
    )
    assert plan_model(load_settings(mended), machine).problems == ()


def planned(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "-c", str(config), *arguments], env={"COLUMNS": "160"})


def test_a_small_shared_memory_is_told_with_what_to_do(tmp_path: Path) -> None:
    config = plan_config(tmp_path, "qwen3-8b", "activation_checkpointing = true")
    result = planned(config, "--gpu-gb", "200", "--host-gb", "1000", "--shm-gb", "0.064")
    assert result.exit_code == 1
    told = " ".join(result.stdout.split())
    assert "the versions that engines hold need 32.8 GB in /dev/shm, which has 64.0 MB free" in told
    assert "--shm-size" in told and "8,190,735,360 parameters" in told and "(computed)" in told


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = planned(plan_config(tmp_path, "nowhere"))
    assert result.exit_code == 2 and "config.json" in result.stderr
