"""The commands about data: topics of sources, and tasks that are loaded and validated."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from infra.chain.processor import score
from infra.cli.main import app
from infra.log.kafka import KafkaBus
from infra.log.log import Log
from infra.observe.metrics import Metrics
from schemas import Experience, Feedback, topics
from streams.sources.event import EventSource
from streams.sources.received import rating
from streams.sources.source import run_sources
from tests.actors.rig import until
from tests.infra.cli.test_commands_on_a_broker import printed
from tests.streams.deliveries import until_stored


@pytest.mark.full
def test_a_source_that_waits_for_its_topic_reads_it_once_the_command_has_made_it(
    kafka: str, app_name: str, tmp_path: Path
) -> None:
    config = tmp_path / "headrace.toml"
    name, event = f"{app_name}-zendesk.closed", b'{"id": "1", "answer_id": "hr-a1b2.0-3-0", "value": 1}'
    source_of = f'[[feedback]]\nname = "csat"\nuse = "streams.sources.received:rating"\nfrom = {{ topic = "{name}" }}\n'
    config.write_text(f'app = "{app_name}"\n[kafka]\nbootstrap_servers = "{kafka}"\npartitions = 2\n')
    assert "topics created" in printed(config, "check", "--create")
    config.write_text(config.read_text() + source_of)
    told = printed(config, "check", "--connect", code=1)
    assert "headrace check --create makes it" in " ".join(told.split()) and f"{app_name}.feedback.csat" in told
    source = EventSource(name="csat", function=rating, topic=name)

    async def main() -> Feedback:
        bus = KafkaBus(kafka, deadline_s=30)
        await bus.start()
        log, metrics = Log(bus, app_name), Metrics("process")

        running = asyncio.create_task(run_sources([source], log, metrics, config.parent / "state"))
        await until(lambda: metrics.gauges().get(f"feedback_topic_missing{{source=csat,topic={name}}}") == 1)
        assert f"topics created: {name}" in await asyncio.to_thread(printed, config, "check", "--create")
        assert "none, all were there" in await asyncio.to_thread(printed, config, "check", "--create")
        await bus.send(name, event, key=b"")
        await until_stored(log, topics.VERIFIED, 1)
        (said,) = [message.value async for message in log.scan(topics.VERIFIED)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bus.close()
        assert isinstance(said, Feedback)
        return said

    said = asyncio.run(main())
    assert (said.id, said.source, said.value) == ("1", "csat", 1.0)


JUDGED = """
app = "t"
[[score]]
name = "exact"
use = "streams.scores.exact:exact"
[[score]]
name = "sum"
use = "tests.infra.cli.test_data_commands:even"
"""


@score(version=1, inline=True)
def even(experience: Experience) -> float:
    """A rule that no answer of an odd task can meet."""
    return float(int(experience.answer or 1) % 2 == 0)


def load_tasks(folder: Path, *arguments: str) -> Result:
    (folder / "headrace.toml").write_text(JUDGED)
    arguments = ("load", "tasks", *arguments, "-c", str(folder / "headrace.toml"))
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.mark.parametrize(("answers", "code", "line"), [((2, 4), 0, "2 of 2 tasks"), ((2, 3, None), 1, "1 of 3 tasks")])
def test_validate_says_before_a_run_which_own_answers_the_scores_refuse(
    tmp_path: Path, answers: tuple[int | None, ...], code: int, line: str
) -> None:
    rows = [{"id": f"t{n}", "prompt": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_tasks(tmp_path, str(tmp_path / "tasks.jsonl"), "--validate")
    assert found.exit_code == code, found.output
    assert f"{line}: their own answer gets 1.0 by exact, sum; 0 rows broken" in found.output
    assert ("task t1: its own answer gets sum 0.0" in found.output) == bool(code)
    assert ("task t2 has no answer" in found.output) == bool(code)


def test_tasks_come_from_one_place(tmp_path: Path) -> None:
    found = load_tasks(tmp_path, "tasks.jsonl", "--dataset", "openai/gsm8k")
    assert found.exit_code == 2 and "expected one of a FILE, --dataset owner/name and --use module:name" in found.output


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package is installed")
def test_a_data_set_without_the_package_is_one_line(tmp_path: Path) -> None:
    found = load_tasks(tmp_path, "--dataset", "openai/gsm8k:main", "--validate")
    assert (found.exit_code, found.output.splitlines()) == (
        2, ['headrace: --dataset: needs the package datasets: pip install "datasets>=4"']
    )  # fmt: skip


def test_a_data_set_is_read_by_name_and_what_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "sums").mkdir()
    rows = [{"question": f"{n}+{n}=", "total": str(2 * n)} for n in range(3)]
    (tmp_path / "sums" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--dataset", str(tmp_path / "sums"), "--validate", "--map", "prompt=question"]
    found = load_tasks(tmp_path, *named, "--map", "answer=total", "--split", "train")
    assert found.exit_code == 0 and "3 of 3 tasks" in found.output, found.output
    found = load_tasks(tmp_path, *named, "--split", "dev")
    assert found.exit_code == 2 and len(found.output.splitlines()) == 1
    assert "split 'dev' cannot be had" in found.output
    away = load_tasks(tmp_path, "--dataset", "nobody/nothing", "--validate")
    assert away.exit_code == 2 and "nobody/nothing" in away.output and "local cache" in away.output
