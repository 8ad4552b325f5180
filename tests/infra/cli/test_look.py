"""Reading the log for a person: newest records, `peek`, and what `trace` says an answer waits for."""

import asyncio
import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from infra.cli.look.peek import show
from infra.cli.look.reader import LastHour, newest
from infra.cli.look.trace import answer_json, show_answer, waits_for
from infra.cli.settings import Settings, load_settings
from infra.ledger.index import LogIndex
from infra.ledger.trace import trace_answer
from infra.log.bus import Record
from infra.log.log import Log, LogMessage
from infra.log.memory import MemoryBus
from schemas import (
    Block,
    Closure,
    Control,
    Drawn,
    DropMarker,
    Feedback,
    PolicyEvent,
    Progress,
    Tick,
    decode,
    encode,
    make_experience,
    topics,
)
from schemas.fields import Span
from schemas.ids import experience_id
from schemas.topics import BATCHES, BUFFER, EXPERIENCES, POLICIES, PROGRESS, VERIFIED, Topic
from tests.infra.ledger.ledger_records import RUN, batch, closure
from tests.schemas.record_samples import blocks, controls
from tests.streams.deliveries import Clock


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 5))
def test_the_newest_records_are_the_last_stored_over_all_partitions(partitions: list[int], last: int) -> None:
    async def main() -> None:
        times = iter(range(10_000))
        log = Log(MemoryBus(lambda: next(times)), "t")
        await log.create_topics(partitions=3, keep_ms=-1)
        for number, partition in enumerate(partitions):
            await log.publish(topics.VERIFIED, Tick(partition=partition, due_ms=number))
        found = [item.value.due_ms for item in await newest(log, topics.VERIFIED, last) if isinstance(item.value, Tick)]
        assert found == list(range(len(partitions)))[-last:] if last else found == []

    asyncio.run(main())


lives = st.lists(
    st.tuples(st.integers(0, 7200), st.integers(0, 7200), st.sampled_from(["stopped", "failed", "running"]))
)


@settings(max_examples=10, deadline=None)
@given(lives, st.integers(1, 3))
def test_every_process_of_the_last_hour_is_found_with_its_last_report(
    processes: list[tuple[int, int, str]], looks: int
) -> None:
    """Each process reports every 90 s while it lives; the log is looked at `looks` times while it grows."""
    said = []
    for number, (item, other, last) in enumerate([*processes, (0, 7200, "running")]):
        begin, end = sorted((item, other))
        said += [(second, f"explore/vm/{number}", "running") for second in range(begin, end, 90)]
        said.append((end, f"explore/vm/{number}", last))
    said.sort()

    async def check() -> None:
        now_ms = [0]
        log = Log(MemoryBus(lambda: now_ms[0]), "app")
        await log.create_topics(partitions=2, keep_ms=-1)
        hour = LastHour(log)
        truth: dict[str, list[tuple[float, str]]] = {}
        for at, (second, name, state) in enumerate(said):
            now_ms[0] = second * 1000
            await log.publish(topics.REPORTS, Progress(role="explore", instance=name, state=state))
            truth.setdefault(name, []).append((second, state))
            if at % (len(said) // looks + 1) == 0:
                await hour.spoken()
        found = await hour.spoken()
        assert {name for name, told in truth.items() if told[-1][0] >= 3600} == found.keys()
        for name, spoken in found.items():
            last_s, state = truth[name][-1]
            assert (spoken.reports[-1][1], spoken.reports[-1][0].state) == (last_s, state)
            assert spoken.first_s <= min(second for second, _ in truth[name] if second >= 3600)
            assert all(at_s >= last_s - 60 for _, at_s in spoken.reports)

    asyncio.run(check())


def message(record: Control | Block) -> LogMessage:
    data = encode(record)
    return LogMessage(Record("t.x", 3, 77, 1_763_715_600_000, b"", data), value=decode(data))


def shown(entry: LogMessage) -> str:
    console = Console(file=io.StringIO(), width=80, soft_wrap=True)
    show(console, entry, as_json=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(max_examples=60)
@given(controls() | blocks())
def test_whatever_a_record_holds_it_can_be_shown_and_is_json(record: Control | Block) -> None:
    message_record = message(record)
    assert shown(message_record).startswith("3/77 ")
    console = Console(file=io.StringIO())
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(console, message_record, as_json=True)
    (line,) = out.getvalue().rstrip("\n").split("\n")
    assert json.loads(line)["offset"] == 77


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

[trainer.lanes]
live = { loss = "topr", min_sequences = 64 }
"""

Records = list[tuple[Topic, Block | Control]]


def of(name: str) -> Block:
    member = make_experience(
        tokens=[1, 2, 3], logprobs=[-0.5], messages=(), spans=(Span(2, 3, 1),), lane="live", id=name, group=GROUP,
        episode=0, group_size=1, turn=0,
    )  # fmt: skip
    return Block((member,))


def word(source: str) -> Feedback:
    return Feedback(ref=f"hr-{NAME}", id=f"{source}-{NAME}", value=1.0, source=source)


def settings_in(folder: Path, more: str = SOURCES) -> Settings:
    (folder / "headrace.toml").write_text(f'app = "t"\nrun = "{RUN}"\n{more}')
    return load_settings(folder / "headrace.toml")


def told(folder: Path, records: Records, *, more: str = SOURCES) -> str:
    """The last line of `trace` about an answer, after these records, of which one came each millisecond."""

    async def main() -> tuple[str, str]:
        settings, clock = settings_in(folder, more), Clock()
        log, index = Log(MemoryBus(clock), "t"), LogIndex(folder / "trace.sqlite", run=RUN, policy="main")
        await log.create_topics(partitions=1, keep_ms=-1)
        for topic, record in records:
            await log.publish(topic, record)
            clock.now_ms += 1
        await index.refresh(log)
        answer = await trace_answer(log, index, NAME)
        index.close()
        waits = waits_for(answer, settings)
        console = Console(file=io.StringIO(), width=300)
        show_answer(console, answer, waits)
        assert isinstance(console.file, io.StringIO)
        assert json.loads(json.dumps(answer_json(answer, waits), default=str))["waits"] == waits
        return waits, console.file.getvalue()

    waits, printed = asyncio.run(main())
    last = printed.splitlines()[-1]
    assert last == f"no published version has learned from it{': ' if waits else ''}{waits}"
    return waits


CAME: Records = [(EXPERIENCES, of(NAME)), (VERIFIED, of(NAME))]
CLOSED: Records = [*CAME, (VERIFIED, word("user")), (VERIFIED, word("csat")), (BUFFER, of(NAME))]
BUFFERED: Records = [*CLOSED, (PROGRESS, closure(GROUP, "buffered"))]
CLOSES = "it waits to be closed by process: for feedback until its window ends, or for the rest of its group or session"
BUFFERS = "it waits in the trainer's buffer for a step of lane live"
LEAST = f"{BUFFERS} of 64 answers or more"


def drawn(**dropped: str) -> Control:
    return Drawn(
        token=1, step=1, version=0, groups=(), dropped={name.replace("_", "."): why for name, why in dropped.items()}
    )


@pytest.mark.parametrize(
    ("records", "waits"),
    [
        (CAME[:1], "it waits to be verified and scored by process"),
        (CAME, CLOSES),
        ([*CAME, (VERIFIED, word("user"))], CLOSES),
        (BUFFERED, LEAST),
        ([*BUFFERED, (PROGRESS, drawn(b_0="stale"))], LEAST),
        ([*BUFFERED, (PROGRESS, drawn(a_0="no advantage in the step", b_0="stale"))],
         "the trainer took it out: no advantage in the step"),
        # A later rating sends it again.
        ([*BUFFERED, (PROGRESS, drawn(a_0="stale")), (BUFFER, of(NAME)), (PROGRESS, closure(GROUP, "buffered"))], LEAST),
        ([*BUFFERED, (POLICIES, PolicyEvent(event="published", policy="main", version=0, parent=-1, step=-1, token=1)),
          (BATCHES, batch(0, NAME, lane="live"))], "the version behind step 0 is not published yet"),
        ([*CAME, (PROGRESS, Closure(group=GROUP, outcome="dropped", reason="unlabelled"))], ""),
        ([CAME[0], (VERIFIED, DropMarker(id=NAME, group=GROUP, episode=0, group_size=1, reason="too short"))], ""),
    ],
)  # fmt: skip
def test_an_answer_says_what_it_waits_for(tmp_path: Path, records: Records, waits: str) -> None:
    assert told(tmp_path, records) == waits


def test_a_closed_answer_waits_for_a_step_that_may_take_it(tmp_path: Path) -> None:
    nowhere = "no lane takes it: [trainer.lanes] has usual, and it is of lane live"
    for lanes, waits in (("usual = {}\nlive = {}\n", BUFFERS), ("usual = {}\n", nowhere)):
        assert told(tmp_path, BUFFERED, more=f"[trainer.lanes]\n{lanes}") == waits
