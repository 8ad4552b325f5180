"""`headrace plan`: rates by hand and no guesses, exact bytes of a model, and the setting that mends what will not fit."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.cli.plan.model import ROUGH, LearnerPlan, Machine, learner_state, plan_model
from infra.cli.plan.rates import PartNeed, RateFlags, RatesPlan, UnitCost, plan_rates, read_costs
from infra.cli.plan.size import model_size
from infra.cli.settings import Settings, load_settings
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from trainer.config import LoraConfig

TOML = """
app = "t"
[kafka]
bootstrap_servers = "kafka-1:9092"
partitions = 12
replication = 3
[keep]
replay = "10d"
[expect]
process = 1
[master]
num_episodes = 10
"""
VALUES = {
    "verify_short": 100, "verify_long": 100, "collect_short": 100, "collect_long": 100, "verify_alone": 250,
    "answer_waits": 100, "feedback_joined": 1000, "request": 1000, "event": 10, "bytes.group.tasks.once": 1000,
    "bytes.group.buffer.member": 100, "bytes.group.buffer.token": 3, "bytes.group.buffer.prompt": 20,
    "bytes.answer.verified.once": 2000, "bytes.rating.verified.once": 100, "bytes.rating.buffer.once": 300,
    "bytes.unrated.progress.once": 40, "bytes.report.reports.once": 800,
}  # fmt: skip
COSTS = {name: UnitCost(value, "", "by hand") for name, value in VALUES.items()}
ASKED = RateFlags(
    groups_per_s=10, requests_per_s=100, prompt=50, answer=100, rated=0.5, engine_tokens_per_s=4000,
    learner_tokens_per_s=30_000,
)  # fmt: skip


def settings_of(folder: Path, *sets: str) -> Settings:
    (folder / "headrace.toml").write_text(TOML)
    return load_settings(folder / "headrace.toml", ["expect.process=0", *sets])


def part(plan: RatesPlan, name: str) -> PartNeed:
    return next(each for each in plan.parts if each.part == name)


def problems(plan: RatesPlan) -> list[str]:
    return [part.problem for part in plan.parts if part.problem]


def test_a_plan_is_the_arithmetic_that_a_person_does(tmp_path: Path) -> None:
    plan = plan_rates(ASKED, settings_of(tmp_path), COSTS)
    # A record costs 16 / 15 x (250 - 100) = 160 µs. Stream workers: 10 x 10 x 200 µs are 0.02 s a second, and 100 x (250 in
    # verify, 100 + 160 in collect, half of them 1000 + 160 for feedback) µs are 0.109 s; 0.6 are planned.
    assert part(plan, "stream workers").needs == 1
    assert part(plan, "stream workers").share == pytest.approx(0.129 / 0.6)
    # Gateways: 100 x (1000 + 100 x 10) µs are 0.2 s a second.
    assert part(plan, "gateways").share == pytest.approx(0.2 / 0.6)
    # 10,000 tokens a second on each side, of 4,000 that an engine samples; 15,000 are trained, of 30,000.
    assert (part(plan, "engines of gateways").needs, part(plan, "explorers").needs) == (3, 3)
    assert part(plan, "trainer").share == pytest.approx(0.5)
    assert part(plan, "partitions").needs == 3
    assert plan.busiest is not None and plan.busiest.part == "engines of gateways"
    assert plan.busiest.share == pytest.approx(2.5 / 3)
    # A group of the buffer has 10 members of 100 tokens: 10 x 100 + 1000 x 3 + 50 x 20 bytes.
    assert plan.topics["buffer"].per_s == 10 * 5000 + 50 * 300
    assert (
        plan.topics["buffer"].day == 65_000 * 86_400 * 3
        and plan.topics["buffer"].kept == 10 * plan.topics["buffer"].day
    )
    assert (plan.topics["progress"].per_s, plan.topics["verified"].per_s) == (50 * 40, 100 * 2000 + 50 * 100)
    assert plan.broker.per_s == sum(need.per_s for need in plan.topics.values())
    assert plan.broker.kept == sum(need.kept for need in plan.topics.values()) / 3
    # Master, trainer, a worker, a gateway and three explorers, each with a report every two seconds, for 25 hours.
    assert plan.topics["reports"].per_s == 7 / 2 * 800
    assert plan.topics["reports"].kept == pytest.approx(2800 * 3600 * 25 * 3)
    assert problems(plan) == []


def test_what_the_settings_name_is_compared_and_partitions_bound_what_can_work(tmp_path: Path) -> None:
    asked = msgspec.structs.replace(ASKED, groups_per_s=1000, requests_per_s=0)
    settings = settings_of(tmp_path, "kafka.partitions=2", "expect.process=8", "expect.explore=300")
    plan = plan_rates(asked, settings, COSTS)
    # 1000 x 10 x 200 µs are 2 s a second, 3.33 workers; of 8 only 2 have a partition. 250 explorers of 2.
    assert part(plan, "stream workers").needs == 4
    assert part(plan, "stream workers").share == pytest.approx(2 / 0.6 / 2)
    assert part(plan, "explorers").share == 125 and plan.busiest == part(plan, "explorers")
    assert problems(plan) == [
        "trainer: 33.3 times as fast is needed: more of trainer.ranks, or a faster card",
        "partitions: 250 are needed, kafka.partitions = 2",
    ]


def test_what_nobody_measured_is_asked_for_and_not_guessed(tmp_path: Path) -> None:
    asked = msgspec.structs.replace(ASKED, engine_tokens_per_s=0, learner_tokens_per_s=0)
    plan = plan_rates(asked, settings_of(tmp_path), COSTS)
    unknown = {part.part: part.unknown for part in plan.parts if part.needs is None}
    assert unknown == {
        "engines of gateways": "10,000 tokens a second: --engine-tokens-per-s",
        "explorers": "10,000 tokens a second: --engine-tokens-per-s",
        "trainer": "15,000 tokens a second: --learner-tokens-per-s",
    }
    assert plan.busiest == part(plan, "gateways")


def test_every_shipped_cost_is_above_zero_and_names_its_benchmark() -> None:
    costs = read_costs()
    assert {name for name in VALUES if not name.startswith("bytes.")} < costs.keys() and any(
        name.startswith("bytes.group.") for name in costs
    )
    assert all(cost.value > 0 for name, cost in costs.items() if not name.startswith("bytes."))
    assert all(cost.source.startswith("make bench NAME=") for cost in costs.values())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(TOML)
    return path


def planned(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "-c", str(config), *arguments], env={"COLUMNS": "160"})


def test_the_command_reads_the_settings_and_says_what_is_full_first(config: Path) -> None:
    asked = ["--groups-per-s", "2", "--requests-per-s", "50", "--engine-tokens-per-s", "4000"]
    asked += ["--learner-tokens-per-s", "20000"]
    result = planned(config, *asked)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "2 groups of 10, 50 requests a second (computed)" in shown and "a day, 3 copies" in shown
    figures = json.loads(planned(config, *asked, "--json").stdout)
    per_s = figures["rates"]["broker"]["per_s"]
    assert f"brokers: 3 at least, one a copy; each of 3 writes {per_s / 1e3:,.1f} kB/s" in shown
    assert "kept, 10 days" in shown and "full first: " in shown and "make bench NAME=hop" in shown
    assert figures["computed"] is True


def test_what_will_not_keep_up_is_an_exit_code_and_a_line_and_a_plan_of_nothing_a_mistake(config: Path) -> None:
    result = planned(config, "--requests-per-s", "5000")
    assert result.exit_code == 1 and "will not keep up: stream workers: " in result.stdout
    result = planned(config)
    assert result.exit_code == 2 and "--requests-per-s" in result.stderr and len(result.stderr.splitlines()) == 1
    result = planned(config, "--requests-per-s", "50", "--step-s", "0")
    assert result.exit_code == 2 and "--step-s" in result.stderr


CONFIGS = Path(__file__).parents[1] / "configs"
# Parameters as the models' cards give them: 8.2, 32.8, 30.5 and 70.6 billion.
PARAMETERS = {
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-70b": 70_553_706_496,
}
MODEL_TOML = """
app = "t"
[policy]
model = "{model}"
[trainer]
dtype = "bfloat16"
{more}
"""


def plan_config(folder: Path, model: str, more: str = "") -> Path:
    path = folder / "headrace.toml"
    path.write_text(MODEL_TOML.format(model=CONFIGS / model, more=more))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("model", PARAMETERS)
def test_a_folder_with_config_json_alone_gives_the_published_number_of_parameters(model: str) -> None:
    assert [path.name for path in (CONFIGS / model).iterdir()] == ["config.json"]
    assert json.loads((CONFIGS / model / "config.json").read_text())["source"]
    size = model_size(CONFIGS / model)
    assert size.trained == size.published == PARAMETERS[model]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_predicted_bytes_of_weights_gradients_and_optimizer_are_those_a_learner_holds(
    tmp_path: Path, family: str, dtype: str
) -> None:
    folder = build_family(tmp_path / family, family)
    learner = opened(str(folder), dtype=dtype)
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


@pytest.mark.slow
def test_with_an_adapter_the_base_has_weights_alone_and_the_adapter_all_the_rest(tmp_path: Path) -> None:
    folder = build_family(tmp_path / "qwen3", "qwen3")
    learner = opened(str(folder), dtype="bfloat16", lora=LoraConfig(rank=4))
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    settings = load_settings(plan_config(tmp_path, str(folder), "[trainer.lora]\nrank = 4"))
    found = plan_model(settings, Machine(gpu=80e9, host=2e12, shm=1e11, step_s=120.0))
    rows = {what: value for what, value in found.learner["GPU"].items() if not what.endswith(ROUGH)}
    masters = sum(value.nbytes for value in learner._masters.values())
    assert rows.pop("weights") == sum(parameter.nbytes for parameter in learner.model.module.parameters())
    assert rows == {"gradients": masters, "moments": 2 * masters, "masters": masters}
    assert found.store["a whole version"] == sum(tensor.num_bytes for tensor in learner.tensors().values())


@pytest.mark.slow
def test_every_rank_of_zero_3_holds_its_share_with_a_reference_and_a_critic() -> None:
    size = model_size(CONFIGS / "qwen3-8b")
    plan = LearnerPlan(ranks=8, stage=3, dtype="bfloat16", tokens=1024, recomputes=True, reference=2, critic=True)
    each = {"weights": 2, "masters": 4, "gradients": 4, "moments": 8, "reference": 2, "critic": 4 + 4 + 4 + 8}
    assert learner_state(size, plan) == {what: num_bytes * size.trained / 8 for what, num_bytes in each.items()}


@pytest.mark.slow
def test_what_will_not_fit_names_the_setting_and_with_that_setting_it_fits(tmp_path: Path) -> None:
    machine = Machine(gpu=80e9, host=2e12, shm=2e11, step_s=120.0)
    found = plan_model(load_settings(plan_config(tmp_path, "qwen3-32b", "activation_checkpointing = true")), machine)
    learner, engine = found.problems
    assert "a learner's rank needs" in learner and "trainer.ranks = 16, " in learner and "stage = 3" in learner
    assert "engine.options.tensor_parallel_size = 2" in engine
    mended = (
        "activation_checkpointing = true\nranks = 16\n[trainer.learner]\n"
        'use = "trainer.learners.deepspeed:DeepSpeedLearner"\noptions = { stage = 3 }\n'
        '[engine]\nuse = "actors.engines.vllm.engine:VllmEngine"\noptions = { tensor_parallel_size = 2 }'
    )
    assert plan_model(load_settings(plan_config(tmp_path, "qwen3-32b", mended)), machine).problems == ()
