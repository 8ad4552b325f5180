"""`headrace trace` says what an answer waits for, and until when, at each place on its way."""

import asyncio
import io
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from infra.cli.look.trace import answer_json, show_answer
from infra.cli.look.waits import waits_for
from infra.cli.settings import Settings, load_settings
from infra.ledger.index import LogIndex
from infra.ledger.trace import trace_answer
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Block, Closure, Control, Drawn, DropMarker, Feedback, PolicyEvent, make_experience
from schemas.fields import Lane
from schemas.ids import experience_id
from schemas.parts import Span
from schemas.topics import BATCHES, BUFFER, EXPERIENCES, POLICIES, PROGRESS, VERIFIED, Topic
from tests.infra.ledger.ledger_records import RUN, batch, closure

START_MS, HOUR_MS = 1_763_715_600_000, 3_600_000
GROUP = "a.0"
NAME = experience_id(GROUP, 0, 0)
SOURCES = """
[[feedback]]
name = "user"
use = "streams.sources.received:rating"
from = { webhook = "/v1/feedback" }
window = "1h"

[[feedback]]
name = "csat"
use = "mine:csat"
from = { file = "tickets.jsonl" }
window = "24h"

[trainer]
min_publish_interval = "5m"

[trainer.lanes]
live = { loss = "topr", min_sequences = 64 }
"""

Records = list[tuple[Topic, Block | Control]]


class Clock:
    """Log-append milliseconds, set by hand."""

    now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


def of(*names: str, size: int = 1, lane: Lane = "live", turn: int = 0) -> Block:
    group = names[0].rsplit(".", 1)[0]
    return Block(
        tuple(
            make_experience(
                tokens=[1, 2, 3], logprobs=[-0.5], messages=(), spans=(Span(2, 3, 1),), lane=lane, id=name, group=group,
                episode=int(name.split("-")[-2]), group_size=size, turn=turn,
            )
            for name in names
        )
    )  # fmt: skip


def word(source: str, ref: str = NAME) -> Feedback:
    return Feedback(ref=f"hr-{ref}", id=f"{source}-{ref}", value=1.0, source=source)


def settings_in(folder: Path, more: str = SOURCES) -> Settings:
    (folder / "headrace.toml").write_text(f'app = "t"\nrun = "{RUN}"\n{more}')
    return load_settings(folder / "headrace.toml")


def told(folder: Path, records: Records, *, after_ms: int = 1000, name: str = NAME, more: str = SOURCES) -> str:
    """The last line of `trace` about an answer, `after_ms` after these records, of which one came each millisecond."""

    async def main() -> tuple[str, str]:
        settings, clock = settings_in(folder, more), Clock()
        log, index = Log(MemoryBus(clock), "t"), LogIndex(folder / "trace.sqlite", run=RUN, policy="main")
        await log.create_topics(partitions=1, keep_ms=-1)
        for topic, record in records:
            await log.publish(topic, record)
            clock.now_ms += 1
        await index.refresh(log)
        answer = await trace_answer(log, index, name)
        index.close()
        waits = waits_for(answer, settings, START_MS + after_ms)
        console = Console(file=io.StringIO(), width=300)
        show_answer(console, answer, waits)
        assert isinstance(console.file, io.StringIO)
        assert json.loads(json.dumps(answer_json(answer, waits), default=str))["waits"] == waits
        return waits, console.file.getvalue()

    waits, printed = asyncio.run(main())
    last = printed.splitlines()[-1]
    assert last == f"no published version has learned from it{': ' if waits else ''}{waits}"
    return waits


def clock_at(ms: int) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(ms / 1000))


CAME: Records = [(EXPERIENCES, of(NAME)), (VERIFIED, of(NAME))]
CLOSED: Records = [*CAME, (VERIFIED, word("user")), (VERIFIED, word("csat")), (BUFFER, of(NAME))]
BUFFERED: Records = [*CLOSED, (PROGRESS, closure(GROUP, "buffered"))]


def test_an_answer_waits_for_the_sources_that_have_not_spoken_until_its_window_passes(tmp_path: Path) -> None:
    until = clock_at(START_MS + 24 * HOUR_MS)
    assert told(tmp_path, CAME) == f"it waits for user and csat until {until}"
    assert told(tmp_path, [*CAME, (VERIFIED, word("user"))]) == f"it waits for csat until {until}"
    another = word("csat", experience_id("b.0", 0, 0))
    assert told(tmp_path, [*CAME, (VERIFIED, another)]) == f"it waits for user and csat until {until}"


def test_the_window_is_the_one_of_the_settings_of_now(tmp_path: Path) -> None:
    shorter = SOURCES.replace('"24h"', '"2h"')
    assert told(tmp_path, CAME, more=shorter) == f"it waits for user and csat until {clock_at(START_MS + 2 * HOUR_MS)}"


def test_what_nothing_is_waited_for_closes_with_the_next_record(tmp_path: Path) -> None:
    closes = "it is closed by process with the next record it reads"
    assert told(tmp_path, CAME, after_ms=24 * HOUR_MS + 1) == closes
    assert told(tmp_path, CLOSED[:-1]) == closes
    assert told(tmp_path, CAME, more="") == closes


def test_an_answer_whose_group_is_not_whole_waits_for_the_others(tmp_path: Path) -> None:
    records: Records = [(EXPERIENCES, of(NAME, size=2)), (VERIFIED, of(NAME, size=2))]
    until = clock_at(START_MS + 3_900_000)
    assert told(tmp_path, records) == f"it waits for the rest of its group until {until}"
    other = DropMarker(id=experience_id(GROUP, 0, 1), group=GROUP, episode=1, group_size=2, reason="too short")
    assert told(tmp_path, [*records, (VERIFIED, other)]).startswith("it waits for user and csat until")
    both = of(NAME, experience_id(GROUP, 0, 1), size=2)
    rated: Records = [(VERIFIED, word(source)) for source in ("user", "csat")]
    assert told(tmp_path, [(VERIFIED, both), *rated]).startswith("it waits for user and csat until"), (
        "the other choice of the same request was not rated"
    )


def test_an_answer_that_process_has_not_read_waits_for_it(tmp_path: Path) -> None:
    assert told(tmp_path, CAME[:1]) == "it waits to be verified and scored by process"


def test_a_turn_that_has_all_it_waits_for_waits_for_the_rest_of_its_session(tmp_path: Path) -> None:
    name = experience_id(f"{'q' * 24}.7-3", 0, 0)
    records: Records = [(VERIFIED, of(name, turn=1)), (VERIFIED, word("user", name)), (VERIFIED, word("csat", name))]
    assert told(tmp_path, records, name=name) == (
        "it waits for the rest of its session, until none of it came for 300 s"
    )


@pytest.mark.parametrize(
    ("trainer", "waits"),
    [
        (
            SOURCES,
            "it waits in the trainer's buffer for a step of lane live of 64 answers or more, 5m after the last version at "
            "the earliest",
        ),
        (
            "[trainer.lanes]\nlive = {}\n",
            "it waits in the trainer's buffer for a step of lane live of 64 answers or more, 5m after the last version at "
            "the earliest",
        ),
        ("[trainer.lanes]\nusual = {}\nlive = {}\n", "it waits in the trainer's buffer for a step of lane live"),
        ("", "no lane takes it: [trainer.lanes] has usual, and it is of lane live"),
    ],
)
def test_a_closed_answer_waits_for_a_step_that_may_take_it(tmp_path: Path, trainer: str, waits: str) -> None:
    assert told(tmp_path, BUFFERED, more=trainer) == waits


def test_a_trained_answer_waits_for_the_next_version(tmp_path: Path) -> None:
    records: Records = [*BUFFERED, (POLICIES, published(0, -1)), (BATCHES, batch(0, NAME, lane="live"))]
    assert told(tmp_path, records) == "the version behind step 0 is not published yet"


def test_what_the_trainer_took_out_is_waited_for_no_more_until_a_later_word_sends_it_again(tmp_path: Path) -> None:
    gone = Drawn(token=1, step=1, version=0, groups=(), dropped={GROUP: "no advantage in the step", "b.0": "stale"})
    records: Records = [*BUFFERED, (PROGRESS, gone)]
    assert told(tmp_path, records) == "the trainer took it out: no advantage in the step"
    again: Records = [*records, (BUFFER, of(NAME)), (PROGRESS, closure(GROUP, "buffered"))]
    assert told(tmp_path, again).startswith("it waits in the trainer's buffer")
    other = Drawn(token=1, step=1, version=0, groups=(), dropped={"b.0": "stale"})
    assert told(tmp_path, [*BUFFERED, (PROGRESS, other)]).startswith("it waits in the trainer's buffer")


def test_what_ended_otherwise_waits_for_nothing(tmp_path: Path) -> None:
    dropped: Records = [*CAME, (PROGRESS, Closure(group=GROUP, outcome="dropped", reason="unlabelled"))]
    assert told(tmp_path, dropped) == ""
    marker = DropMarker(id=NAME, group=GROUP, episode=0, group_size=1, reason="too short")
    assert told(tmp_path, [CAME[0], (VERIFIED, marker)]) == ""


def published(version: int, step: int) -> PolicyEvent:
    return PolicyEvent(event="published", policy="main", version=version, parent=version - 1, step=step, token=1)
