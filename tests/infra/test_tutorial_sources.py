"""The examples of the tutorial about sources: short, and picked up by restarting the stream workers."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.cli.settings import Settings, load_settings
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.plugin import add_plugin_folders
from schemas import Block, Closure, DropMarker, Experience, Message, Span, make_experience
from schemas.ids import answer_id, experience_id
from schemas.topics import BUFFER, EXPERIENCES, PROGRESS, VERIFIED
from streams.sources.source import build_sources, run_sources
from tests.actors.rig import running
from tests.infra.chat_models import STYLES, build_chat_model
from tests.streams.deliveries import memory_log, until_stored, values
from tests.streams.memory_worker import working

PAGE = (Path(__file__).resolve().parents[2] / "infra/docs/tutorials/add-a-source.md").read_text(encoding="utf-8")
BEFORE = """\
app = "app"
plugins = ["plugins"]
[[score]]
name = "exact"
use = "streams.scores.exact:exact"
"""
KINDS = ("A processor", "A score", "A feedback source")
TOPIC = "zendesk.closed"


class SourceExample(msgspec.Struct, frozen=True):
    """One example: the user's code, and the tables that wire it."""

    code: str
    tables: str


def example(kind: str) -> SourceExample:
    """The first two fenced blocks behind the bold words."""
    after = PAGE[PAGE.index(f"**{kind}**") :]
    code = re.search(r"```python[^\n]*\n(.*?)```\n```toml\n(.*?)```", after, re.DOTALL)
    assert code is not None, f"{kind}: expected a python block and a toml block right behind it"
    return SourceExample(code[1], code[2])


def live(group: str, num_sampled: int) -> Block:
    spans = (Span(start=2, stop=2 + num_sampled, version=1),)
    said = (Message(role="user", content="2+2="), Message(role="assistant", content="4"))
    one = make_experience(
        id=experience_id(group, 0, 0), group=group, episode=0, group_size=1, lane="live", spans=spans,
        tokens=list(range(2 + num_sampled)), logprobs=np.full(num_sampled, -0.5), messages=said, answer="4",
    )  # fmt: skip
    return Block((one,))


def settings_of(folder: Path, *tables: str) -> Settings:
    """Settings of a reader who wrote the examples into their files."""
    (folder / "plugins").mkdir(exist_ok=True)
    (folder / "plugins" / "support.py").write_text("\n".join(example(kind).code for kind in KINDS), encoding="utf-8")
    (folder / "headrace.toml").write_text("\n".join((BEFORE, *tables)), encoding="utf-8")
    settings = load_settings(folder / "headrace.toml", [])
    add_plugin_folders(settings.folder, settings.plugins)
    return settings


@asynccontextmanager
async def workers(log: Log, settings: Settings) -> AsyncIterator[None]:
    """Stages and feedback sources of one process, for the length of a block."""
    folder, streams = settings.folder / "state", settings.streams()
    sources = build_sources(settings.feedback, settings.folder)
    listening = asyncio.create_task(run_sources(sources, log, Metrics("process"), folder))
    async with running(listening), working(log, streams, folder):
        yield


def test_each_example_is_at_most_15_lines_of_code_and_wired_by_its_own_tables() -> None:
    for kind in KINDS:
        lines = [line for line in example(kind).code.splitlines() if line.strip() and not line.startswith("#")]
        assert len(lines) <= 15
    tables = [re.findall(r"^\[.*\]$", example(kind).tables, re.MULTILINE) for kind in KINDS]
    assert tables == [["[[processor]]"], ["[[score]]"], ["[[feedback]]", "[reward]"]]


def test_check_accepts_the_examples_together_and_has_nothing_to_note(tmp_path: Path) -> None:
    settings_of(tmp_path, *(example(kind).tables for kind in KINDS))
    build_chat_model(tmp_path / "model", STYLES["chatml"])
    named = ("--set", "policy.model=model")
    checked = CliRunner().invoke(app, ["check", "-c", str(tmp_path / "headrace.toml"), *named])
    assert checked.exit_code == 0 and "note:" not in checked.output, checked.output


async def test_the_examples_are_picked_up_by_restarting_the_stream_workers(tmp_path: Path) -> None:
    async with memory_log() as log:
        await log.bus.create_topic(TOPIC, 1, {})
        async with workers(log, settings_of(tmp_path)):
            await log.publish(EXPERIENCES, live("before.0", 2))
            await until_stored(log, PROGRESS, 1)
        assert [sent.group for sent in await buffered(log)] == ["before.0"]
        async with workers(log, settings_of(tmp_path, *(example(kind).tables for kind in KINDS))):
            await log.publish(EXPERIENCES, live("short.0", 2))
            await log.publish(EXPERIENCES, live("after.0", 12))
            ticket = {"answer_id": answer_id("after.0.0-0-0"), "id": "t-1", "csat": 4}
            await log.bus.send(TOPIC, msgspec.json.encode(ticket), key=b"t-1")
            await until_stored(log, PROGRESS, 3)
        (_, after) = await buffered(log)
        assert {one.name: one.value for one in after.scores} == {"exact": 1.0, "brief": 1.0, "csat": 0.8}
        assert after.reward == pytest.approx((0.8 + 0.2) / 1.2) and "not_trivial@1" in after.stamps
        stubs = [one for one in await values(log, VERIFIED) if isinstance(one, DropMarker)]
        assert [(one.group, one.reason) for one in stubs] == [("short.0", "too short")]
        ends = {one.group: one.outcome for one in await values(log, PROGRESS) if isinstance(one, Closure)}
        assert ends == {"before.0": "buffered", "short.0": "dropped", "after.0": "buffered"}


async def buffered(log: Log) -> list[Experience]:
    return [one for sent in await values(log, BUFFER) if isinstance(sent, Block) for one in sent.experiences]
