"""`headrace bench plan`: the arithmetic by hand, twice as much never needs less, and what nobody measured is not guessed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.cli.plan.plan import CapacityPlan, Installed, Rates, capacity
from infra.cli.plan.record_bytes import RECORD_BYTES, RecordBytes, measure
from infra.cli.plan.unit_costs import UnitCost, UnitCosts, read_costs
from schemas import Block, Experience
from schemas.topics import BUFFER, EXPERIENCES, VERIFIED
from tests.actors.rig import MASTER
from tests.infra.ledger.whole_loop import trained_steps, whole_loop

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


def cost(value: float) -> UnitCost:
    return UnitCost("", value, "µs of CPU", "by hand")


COSTS = UnitCosts(
    verify=(cost(100), cost(100)), collect=(cost(100), cost(100)), alone=cost(250), waits=cost(100), word=cost(1000),
    request=cost(1000), event=cost(10),
)  # fmt: skip
SIZES = RecordBytes(
    group={"tasks": 1000.0, "buffer": 5000.0},
    answer={"verified": 2000.0, "blobs": 10.0},
    word={"verified": 100.0, "buffer": 300.0},
    silence={"progress": 40.0},
    report={"reports": 800.0},
)
RATES = Rates(groups=10, requests=100, size=10, prompt=50, answer=100, rated=0.5)
THERE = Installed(partitions=12, copies=3, keep_days=10, engine=4000, learner=30_000)


def part(plan: CapacityPlan, name: str) -> Any:
    return next(one for one in plan.parts if one.part == name)


def test_a_plan_is_the_arithmetic_that_a_person_does() -> None:
    plan = capacity(RATES, COSTS, SIZES, THERE)
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
    assert plan.first == "engines of gateways" and plan.times == pytest.approx(3 / 2.5)
    topics = {one.topic: one for one in plan.topics}
    assert topics["buffer"].per_s == 10 * 5000 + 50 * 300
    assert topics["buffer"].per_day == 65_000 * 86_400 * 3 and topics["buffer"].kept == 10 * topics["buffer"].per_day
    assert topics["progress"].per_s == 50 * 40
    assert topics["verified"].per_s == 100 * 2000 + 50 * 100
    assert topics["blobs"].per_day == 1000 * 86_400, "the bucket counts its own copies"
    in_topics = sum(one.per_s for one in plan.topics if one.topic != "blobs")
    assert plan.each_broker == {
        "per_s": in_topics,
        "kept": sum(one.kept for one in plan.topics if one.topic != "blobs") / 3,
    }
    # Master, trainer, a worker, a gateway and three explorers, each with a report every two seconds, for 25 hours.
    assert topics["reports"].per_s == 7 / 2 * 800
    assert topics["reports"].kept == pytest.approx(2800 * 3600 * 25 * 3)
    assert plan.problems == []


def test_what_the_settings_name_is_compared_and_partitions_bound_what_can_work() -> None:
    rates = msgspec.structs.replace(RATES, groups=1000, requests=0)
    there = msgspec.structs.replace(THERE, partitions=2, process=8, explore=300)
    plan = capacity(rates, COSTS, SIZES, there)
    # 1000 x 10 x 200 µs are 2 s a second, 3.33 workers; of 8 only 2 have a partition. 250 explorers of 2.
    assert part(plan, "stream workers").needs == 4
    assert part(plan, "stream workers").share == pytest.approx(2 / 0.6 / 2)
    assert part(plan, "explorers").share == 125 and plan.first == "explorers"
    assert plan.problems == [
        "trainer: 33.3 times as fast is needed: more of trainer.ranks, or a faster card",
        "partitions: 250 are needed, kafka.partitions = 2",
    ]


amounts = st.floats(0.001, 1e6)
rates = st.builds(
    Rates, groups=amounts, requests=amounts, size=st.integers(1, 64), prompt=st.integers(1, 100_000),
    answer=st.integers(1, 100_000), rated=st.floats(0, 1),
)  # fmt: skip
some = st.integers(0, 1000)
installed = st.builds(
    Installed, partitions=st.integers(1, 1000), copies=st.integers(1, 5), keep_days=st.floats(0.01, 1000), process=some,
    serve=some, explore=some, engine=st.floats(1, 1e6), learner=st.floats(1, 1e6),
)  # fmt: skip


@given(rates, installed, st.floats(1, 100))
def test_more_of_everything_never_needs_less(rates: Rates, there: Installed, times: float) -> None:
    more = msgspec.structs.replace(rates, groups=times * rates.groups, requests=times * rates.requests)
    longer = msgspec.structs.replace(rates, prompt=rates.prompt + 10, answer=rates.answer + 10)
    before = capacity(rates, COSTS, SIZES, there)
    for after in (capacity(more, COSTS, SIZES, there), capacity(longer, COSTS, SIZES, there)):
        for one, other in zip(before.parts, after.parts, strict=True):
            assert one.needs is not None and other.needs is not None and one.needs <= other.needs
        for topic, grown in zip(before.topics, after.topics, strict=True):
            assert topic.per_s <= grown.per_s and topic.per_day <= grown.per_day and topic.kept <= grown.kept
        assert len(before.problems) <= len(after.problems)


@given(rates, installed)
@example(
    Rates(groups=614144.809203995, requests=1.0, size=31, prompt=1, answer=219, rated=0.0),
    Installed(partitions=1, copies=1, keep_days=1.0, engine=1.0, learner=614144.809203995),
)
def test_what_has_as_many_as_are_needed_keeps_up(rates: Rates, there: Installed) -> None:
    needs = {one.part: one.needs or 0 for one in capacity(rates, COSTS, SIZES, there).parts}
    enough = msgspec.structs.replace(
        there,
        partitions=max(1, needs["partitions"]),
        process=needs["stream workers"],
        serve=max(needs["gateways"], needs["engines of gateways"]),
        explore=needs["explorers"],
        learner=there.learner * max(1, needs["trainer"]),
    )
    plan = capacity(rates, COSTS, SIZES, enough)
    assert plan.problems == [] and plan.times is not None and plan.times > 1 - 1e-9


def test_what_nobody_measured_is_asked_for_and_not_guessed() -> None:
    plan = capacity(RATES, COSTS, SIZES, msgspec.structs.replace(THERE, engine=0, learner=0))
    unknown = {one.part: one.unknown for one in plan.parts if one.needs is None}
    assert set(unknown) == {"engines of gateways", "explorers", "trainer"}
    assert "10,000 tokens a second; --engine-tokens-per-s" in unknown["explorers"]
    assert "15,000 sampled tokens a second; --learner-tokens-per-s" in unknown["trainer"]
    assert plan.first == "gateways"


def test_costs_are_read_from_what_benchmarks_print_ones_own_first(tmp_path: Path) -> None:
    shipped = read_costs()
    assert shipped.learner is None, "it depends on model and card"
    assert all(one.value > 0 and one.source.endswith(": shipped") for one in shipped.every())
    (tmp_path / "gateway.json").write_text('{"cpu_ms_per_answer": 2.5}')
    shape = {"shape": "16 answers of 256 to one prompt of 512", "headrace": {"tokens_per_s": 900.0}}
    (tmp_path / "learner.json").write_text(json.dumps({"shapes": [shape]}))
    own = read_costs(tmp_path)
    assert own.request.value == 2500 and own.request.source == f"bench gateway: {tmp_path / 'gateway.json'}"
    assert own.learner is not None and own.learner.value == 900 and own.verify == shipped.verify


def test_bytes_of_a_group_are_those_of_a_loop_that_trained_it(tmp_path: Path) -> None:
    async def held() -> tuple[dict[str, float], Experience]:
        async with whole_loop(tmp_path) as log:
            await trained_steps(log, 10)
            found, first = {}, None
            for topic in (EXPERIENCES, VERIFIED, BUFFER):
                sizes: dict[str, int] = {}
                async for message in log.read_all(topic):
                    if isinstance(message.value, Block) and message.value.experiences[0].lane == "usual":
                        first = first or message.value.experiences[0]
                        one = message.record
                        headers = sum(len(name) + len(value) for name, value in one.headers)
                        size = len(one.key) + len(one.value) + headers + RECORD_BYTES
                        sizes[message.value.group] = sizes.get(message.value.group, 0) + size
                found[topic.name] = sum(sizes.values()) / len(sizes)
            assert first is not None
            return found, first

    found, one = asyncio.run(held())
    made = measure(size=MASTER.num_episodes, prompt=one.num_prompt, answer=one.num_sampled).group
    for topic, num_bytes in found.items():
        assert made[topic] == pytest.approx(num_bytes, rel=0.25), topic


def test_every_lone_answer_is_closed_once_whether_somebody_speaks_of_it_or_not() -> None:
    made = measure(size=4, prompt=30, answer=20)
    assert set(made.silence) == {"progress"} and made.silence["progress"] < made.word["progress"]
    assert set(made.word) == {"feedback", "verified", "buffer", "batches", "progress"}
    assert set(made.answer) == {"experiences", "verified"} and set(made.report) >= {"reports"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(TOML)
    return path


def planned(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "-c", str(config), *arguments], env={"COLUMNS": "160"})


def test_the_command_reads_the_settings_and_says_what_is_full_first(config: Path) -> None:
    asked = ["--groups-per-s", "2", "--requests-per-s", "50", "--engine-tokens-per-s", "4000"]
    result = planned(config, *asked, "--learner-tokens-per-s", "20000")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "2 groups of 10, 50 requests a second (computed)" in shown and "a day, 3 copies" in shown
    each = json.loads(planned(config, *asked, "--json").stdout)["each_broker"]
    assert f"brokers: 3 at least, one a copy; each of 3 writes {each['per_s'] / 1e3:,.1f} kB/s" in shown
    assert "kept, 10 days" in shown and "full first: " in shown and "bench hop: shipped" in shown
    figures = json.loads(planned(config, *asked, "--json").stdout)
    assert figures["computed"] is True and figures["rates"]["size"] == 10
    assert figures["first"] is not None and figures["there"]["partitions"] == 12


def test_what_will_not_keep_up_is_an_exit_code_and_a_line(config: Path) -> None:
    result = planned(config, "--requests-per-s", "5000")
    assert result.exit_code == 1 and "will not keep up: stream workers: " in result.stdout
    assert "full first, of what is known: " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--groups-per-s, --requests-per-s: both are 0"),
        (["--requests-per-s", "1", "--measured", "nowhere"], "--measured: nowhere is no folder"),
    ],
)
def test_a_plan_of_nothing_or_by_nothing_is_one_line(arguments: list[str], words: str, config: Path) -> None:
    result = planned(config, *arguments)
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"cpu_ms_per_answer": 0}', '{"cpu_ms_per_answer": "much"}', "[1]"])
def test_a_file_that_no_benchmark_printed_is_one_line_that_names_it(text: str, config: Path, tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text(text)
    result = planned(config, "--requests-per-s", "1", "--measured", str(tmp_path))
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert "gateway.json" in result.stderr and "headrace bench gateway --json" in result.stderr
