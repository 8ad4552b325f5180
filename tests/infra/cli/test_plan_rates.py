"""`headrace plan` of rates: the arithmetic by hand, more never needs less, and what is not measured is not guessed."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.cli.plan.rates import NEEDED, PartNeed, Rates, RatesPlan, UnitCost, plan_rates, read_costs

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
    "bytes.answer.verified.once": 2000, "bytes.word.verified.once": 100, "bytes.word.buffer.once": 300,
    "bytes.silence.progress.once": 40, "bytes.report.reports.once": 800,
}  # fmt: skip
COSTS = {name: UnitCost(value, "", "by hand") for name, value in VALUES.items()}
RATES = Rates(
    groups=10, requests=100, size=10, prompt=50, answer=100, rated=0.5, engine=4000, learner=30_000, partitions=12,
    copies=3, keep_days=10,
)  # fmt: skip


def part(plan: RatesPlan, name: str) -> PartNeed:
    return next(each for each in plan.parts if each.part == name)


def problems(plan: RatesPlan) -> list[str]:
    return [part.problem for part in plan.parts if part.problem]


def test_a_plan_is_the_arithmetic_that_a_person_does() -> None:
    plan = plan_rates(RATES, COSTS)
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


def test_what_the_settings_name_is_compared_and_partitions_bound_what_can_work() -> None:
    rates = msgspec.structs.replace(RATES, groups=1000, requests=0, partitions=2, process=8, explore=300)
    plan = plan_rates(rates, COSTS)
    # 1000 x 10 x 200 µs are 2 s a second, 3.33 workers; of 8 only 2 have a partition. 250 explorers of 2.
    assert part(plan, "stream workers").needs == 4
    assert part(plan, "stream workers").share == pytest.approx(2 / 0.6 / 2)
    assert part(plan, "explorers").share == 125 and plan.busiest == part(plan, "explorers")
    assert problems(plan) == [
        "trainer: 33.3 times as fast is needed: more of trainer.ranks, or a faster card",
        "partitions: 250 are needed, kafka.partitions = 2",
    ]


amounts, counts = st.floats(0.001, 1e6), st.integers(0, 1000)
rates = st.builds(
    Rates, groups=amounts, requests=amounts, size=st.integers(1, 64), prompt=st.integers(1, 100_000),
    answer=st.integers(1, 100_000), rated=st.floats(0, 1), engine=st.floats(1, 1e6), learner=st.floats(1, 1e6),
    partitions=st.integers(1, 1000), copies=st.integers(1, 5), keep_days=st.floats(0.01, 1000), process=counts,
    serve=counts, explore=counts,
)  # fmt: skip


def test_what_nobody_measured_is_asked_for_and_not_guessed() -> None:
    plan = plan_rates(msgspec.structs.replace(RATES, engine=0, learner=0), COSTS)
    unknown = {part.part: part.unknown for part in plan.parts if part.needs is None}
    assert unknown == {
        "engines of gateways": "10,000 tokens a second: --engine-tokens-per-s",
        "explorers": "10,000 tokens a second: --engine-tokens-per-s",
        "trainer": "15,000 tokens a second: --learner-tokens-per-s",
    }
    assert plan.busiest == part(plan, "gateways")


def test_every_shipped_cost_is_above_zero_and_names_its_benchmark() -> None:
    costs = read_costs()
    assert {*NEEDED} < costs.keys() and any(name.startswith("bytes.group.") for name in costs)
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
    assert figures["computed"] is True and figures["rates"]["rates"]["partitions"] == 12


def test_what_will_not_keep_up_is_an_exit_code_and_a_line(config: Path) -> None:
    result = planned(config, "--requests-per-s", "5000")
    assert result.exit_code == 1 and "will not keep up: stream workers: " in result.stdout
    assert "full first, of what is known: " in result.stdout


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"request": {"value": 0, "unit": "", "source": ""}}', '{"request": 1}']
)
def test_a_file_that_no_benchmark_wrote_is_one_line_that_names_it(
    text: str | None, config: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "costs.json").write_text(text)
    result = planned(config, "--requests-per-s", "1", "--costs", str(tmp_path / "costs.json"))
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "costs.json" in result.stderr


def test_a_plan_of_nothing_is_one_line(config: Path) -> None:
    result = planned(config)
    assert result.exit_code == 2 and "--requests-per-s" in result.stderr and len(result.stderr.splitlines()) == 1
