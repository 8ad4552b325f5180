"""Feedback sources: every event ends as Feedback, ignored, or a dead letter with the reason."""

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.chain.processor import feedback
from infra.chain.redact import Redactor
from infra.cli.data.skip import Lost, skip_lost
from infra.log.bus import CommitRefused, Headers, Partition
from infra.log.log import Log, record_key
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.seal import Keys, seal_event
from schemas import DeadLetter, Feedback, Received, encode, kafka_headers
from schemas.errors import ConfigError, StoreError
from schemas.topics import DEAD_LETTERS, FEEDBACK, VERIFIED
from streams.reprocess.letters import redeliver
from streams.reprocess.ranges import Range
from streams.sources.event import Event, EventSource, publish_events, read_events
from streams.sources.file import FilePosition, load_state, read_lines
from streams.sources.file import take_once as take_from_file
from streams.sources.received import GROUP, rating, run_received
from streams.sources.received import take_once as received_once
from streams.sources.source import run_sources
from streams.sources.topic import take_once
from streams.stages.verify import REDELIVERED
from tests.actors import rig
from tests.actors.gateway.test_gateway_clock_and_disk import full_disk
from tests.streams.deliveries import memory_log, values

REF = "hr-a1b2.0-3-0"


@feedback(version=1)
def csat(ticket: dict[str, Any]) -> Feedback | None:
    if "csat" not in ticket:
        return None
    return Feedback(ref=ticket["answer_id"], id=ticket["id"], value=ticket["csat"] / 5)


def ticket(**fields: Any) -> bytes:
    return json.dumps({"answer_id": REF, "id": "t-1", "csat": 4, **fields}).encode()


def source(**fields: Any) -> EventSource:
    return EventSource(**{"name": "csat", "function": csat, "topic": "zendesk.closed", **fields})


def events(*values: bytes) -> list[Event]:
    return [Event(value, "zendesk.closed", 0, offset) for offset, value in enumerate(values)]


async def opened(store: MemoryStore | None = None) -> Log:
    log = Log(MemoryBus(), "bot", store=store)
    await log.create_topics(partitions=2, keep_ms=3_600_000)
    return log


async def stored(log: Log) -> tuple[list[Feedback], list[DeadLetter]]:
    said = [message.value async for message in log.scan(VERIFIED) if isinstance(message.value, Feedback)]
    dead = [message.value async for message in log.scan(DEAD_LETTERS) if isinstance(message.value, DeadLetter)]
    return said, dead


@pytest.mark.parametrize(
    ("value", "outcome", "error"),
    [
        (b"{", "invalid", "not JSON"),
        (b"\xff", "invalid", "not JSON"),
        (b"[1]", "invalid", "got a JSON list, expected an object"),
        (b"[" * 100_000, "invalid", "not JSON"),
        (b"{}", "ignored", ""),
        (b'{"csat": 4}', "failed", "csat failed: KeyError: 'answer_id'"),
        (ticket(csat="4"), "failed", "csat failed: TypeError"),
        (ticket(id=81), "invalid", "Expected `str`, got `int`"),
        (ticket(id=""), "invalid", "at `$.id`"),
        (ticket(csat=50), "invalid", "value: got 10.0, expected a number from 0 to 1"),
        (ticket(answer_id="latest"), "invalid", "ref: not an experience id"),
    ],
)
def test_a_bad_event_says_what_is_wrong_with_it(value: bytes, outcome: str, error: str) -> None:
    before, reading, after = asyncio.run(read_events(source(), events(ticket(), value, ticket())))
    assert (reading.outcome, reading.feedback) == (outcome, None)
    assert error in reading.error
    assert before.outcome == after.outcome == "accepted"


@pytest.mark.parametrize(
    ("value", "brief"),
    [
        (b'{"csat": 4}', "csat failed: KeyError: 'answer_id'"),
        (b'{"csat": 4, "by": "answer_id"}', "csat failed: KeyError"),
    ],
)
def test_a_missing_field_is_named_where_its_name_is_not_in_the_event(value: bytes, brief: str) -> None:
    (reading,) = asyncio.run(read_events(source(), events(value)))
    assert reading.brief == brief


def test_a_hanging_function_is_given_up() -> None:
    release = threading.Event()

    @feedback(version=1)
    def hangs(event: dict[str, Any]) -> None:
        release.wait(30)

    try:
        (reading,) = asyncio.run(read_events(source(function=hangs, timeout_s=0.02), events(ticket())))
        assert reading.outcome == "failed"
        assert "timed out" in reading.error
    finally:
        release.set()


async def test_feedback_goes_to_verified_in_order_and_bad_events_to_dead_letters() -> None:
    log, metrics = await opened(), Metrics("process")
    values = [ticket(id="1", csat=1), b"{", b"{}", ticket(id="2", csat=5)]
    await publish_events(source(), events(*values), log, metrics)
    said, (dead,) = await stored(log)
    assert [word.id for word in said] == ["1", "2"]
    assert (dead.topic, dead.offset, dead.stage, dead.reason) == ("zendesk.closed", 1, "feedback csat", "event invalid")
    assert dead.value == b"{"
    assert metrics.counters() == {
        "feedback_events{outcome=accepted,source=csat}": 2.0,
        "feedback_events{outcome=ignored,source=csat}": 1.0,
        "feedback_events{outcome=invalid,source=csat}": 1.0,
    }


@pytest.mark.parametrize(
    ("made", "error"),
    [({"text": "\ud800"}, "surrogates"), ({"text": "x" * 9_000_000}, "expected at most"), ({"value": 2**64}, "0 to 1")],
)
async def test_feedback_that_no_record_holds_is_a_dead_letter(made: dict[str, Any], error: str) -> None:
    log, metrics = await opened(), Metrics("process")

    @feedback(version=1)
    def label(event: dict[str, Any]) -> Feedback:
        return Feedback(**{"ref": event["answer_id"], "id": event["id"], "type": "label", "text": "good"} | made)

    await publish_events(source(function=label, redactor=Redactor(())), events(ticket()), log, metrics)
    said, (dead,) = await stored(log)
    assert not said and dead.reason == "event invalid" and error in dead.error
    assert metrics.counters() == {"feedback_events{outcome=invalid,source=csat}": 1.0}


class Away(MemoryStore):
    """A store whose next read can fail."""

    fails = False

    def get(self, key: str) -> bytes:
        if not self.fails:
            return super().get(key)
        self.fails = False
        raise StoreError("the store is away")


async def test_a_store_that_is_away_is_asked_again_for_the_key_of_an_event() -> None:
    log = await opened(store := Away())
    body = seal_event(ticket(), Keys(store), ("ann",))
    store.fails = True
    event = Event(body, log.name(FEEDBACK), 0, 0, ours=True)
    await publish_events(source(), [event], log, Metrics("process"))
    assert [word.id for word in (await stored(log))[0]] == ["t-1"]


async def until(log: Log, ids: Sequence[str]) -> None:
    async with asyncio.timeout(20):
        while True:
            if [record.id for record in (await stored(log))[0]] == list(ids):
                return
            await asyncio.sleep(0.02)


async def test_a_topic_is_followed_from_its_beginning_and_again_from_where_it_was_left(tmp_path: Path) -> None:
    log, metrics = await opened(), Metrics("process")
    await log.bus.create_topic("zendesk.closed", 1, {})
    await log.bus.send("zendesk.closed", ticket(id="1"), key=b"")
    for number in ("2", "3"):
        async with rig.running(asyncio.create_task(run_sources([source()], log, metrics, tmp_path))):
            await log.bus.send("zendesk.closed", ticket(id=number), key=b"")
            await until(log, ["1", "2", "3"][: int(number)])
            committed = await log.bus.committed("bot.feedback.csat", "zendesk.closed")
            while set(committed.values()) != {int(number)}:
                await asyncio.sleep(0.01)
                committed = await log.bus.committed("bot.feedback.csat", "zendesk.closed")


async def test_a_topic_or_file_that_cannot_be_read_is_waited_for_while_other_sources_go_on_and_is_then_read_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = "feedback_topic_missing{source=csat,topic=zendesk.closed}"
    caplog.set_level(logging.INFO)
    log, metrics = await opened(), Metrics("process")
    path = tmp_path / "events.jsonl"
    path.write_bytes(ticket(id="of a file") + b"\n")
    (refused := tmp_path / "refused").mkdir()
    others = [source()]
    others += [source(name=file.stem, topic="", file=file) for file in (path, refused)]
    async with rig.running(asyncio.create_task(run_sources(others, log, metrics, tmp_path / "s"))):
        await until(log, ["of a file"])
        assert metrics.gauges()[waiting] == 1
        await rig.until(lambda: "feedback_polls_failed{reason=Is a directory,source=refused}" in metrics.counters())
        refused.rmdir()
        refused.write_bytes(ticket(id="of a file that was refused") + b"\n")
        await until(log, ["of a file", "of a file that was refused"])
        await log.bus.create_topic("zendesk.closed", 1, {})
        await log.bus.send("zendesk.closed", ticket(id="before it was seen"), key=b"")
        await until(log, ["of a file", "of a file that was refused", "before it was seen"])
        assert metrics.gauges()[waiting] == 0
    told = [record.getMessage() for record in caplog.records if record.name == "streams.sources.topic"]
    assert [line.split()[0] for line in told] == ["feedback_topic_missing", "feedback_topic_there"]
    assert "headrace check --create makes it" in told[0]


async def test_a_file_is_followed_across_restarts_and_half_lines_wait(tmp_path: Path) -> None:
    path, state = tmp_path / "events.jsonl", tmp_path / "feedback-csat"
    log, metrics = await opened(), Metrics("process")
    mine = source(topic="", file=path)
    assert await take_from_file(mine, FilePosition(), log, metrics, state) == FilePosition()
    path.write_bytes(ticket(id="1") + b"\n\n" + ticket(id="2")[:10])
    position = await take_from_file(mine, FilePosition(), log, metrics, state)
    await until(log, ["1"])
    assert load_state(state.with_suffix(".json"), FilePosition) == position
    with path.open("ab") as file:
        file.write(ticket(id="2")[10:] + b"\n{\n")
    position = await take_from_file(mine, load_state(state.with_suffix(".json"), FilePosition), log, metrics, state)
    await until(log, ["1", "2"])
    assert (await stored(log))[1][0].offset == len(ticket(id="1")) + 2 + len(ticket(id="2")) + 1
    assert await take_from_file(mine, position, log, metrics, state) == position


async def test_the_workers_of_a_machine_read_a_file_once_from_where_one_of_them_had_come(tmp_path: Path) -> None:
    log, metrics, path = await opened(), Metrics("process"), tmp_path / "events.jsonl"
    mine = source(topic="", file=path)
    path.write_bytes(ticket(id="1") + b"\n")
    (tmp_path / "worker-1").mkdir()
    await take_from_file(mine, FilePosition(), log, metrics, tmp_path / "worker-1" / "feedback-csat")
    async with rig.running(*[asyncio.create_task(run_sources([mine], log, metrics, tmp_path)) for _ in range(2)]):
        with path.open("ab") as file:
            file.write(ticket(id="2") + b"\n")
        await until(log, ["1", "2"])


async def test_a_file_source_on_a_full_disk_goes_on_and_counts_what_it_could_not_remember(tmp_path: Path) -> None:
    path, state = tmp_path / "events.jsonl", tmp_path / "feedback-csat"
    log, metrics = await opened(), Metrics("process")
    mine = source(topic="", file=path)
    path.write_bytes(ticket(id="1") + b"\n")
    before = await take_from_file(mine, FilePosition(), log, metrics, state)
    with path.open("ab") as file:
        file.write(ticket(id="2") + b"\n")
    with full_disk():
        after = await take_from_file(mine, before, log, metrics, state)
    await until(log, ["1", "2"])
    assert metrics.counters()["feedback_position_not_saved{source=csat}"] == 1
    assert load_state(state.with_suffix(".json"), FilePosition) == before != after
    assert await take_from_file(mine, after, log, metrics, state) == after


def test_a_replaced_or_cut_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\ntwo\n")
    position, lines = read_lines(path, FilePosition())
    assert lines == [(0, b"one"), (4, b"two")]
    path.write_bytes(b"new\n")
    position, lines = read_lines(path, position)
    assert lines == [(0, b"new")]
    other = tmp_path / "other"
    other.write_bytes(b"rotated, and longer\n")
    other.replace(path)
    assert read_lines(path, position)[1] == [(0, b"rotated, and longer")]


def test_a_line_without_end_is_invalid_instead_of_blocking_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * (1024 * 1024 + 5) + b"\nnext\n")
    position, lines = read_lines(path, FilePosition())
    assert [len(line) for _, line in lines] == [1024 * 1024]
    assert read_lines(path, position)[1] == [(1024 * 1024, b"xxxxx"), (1024 * 1024 + 6, b"next")]


class LosingReader:
    """A reader whose group rebalances between each read and its commit."""

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self.get_many = inner.get_many
        self.seek = inner.seek

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        raise CommitRefused("the group has rebalanced")


async def test_a_rebalance_between_reading_and_committing_ends_nothing() -> None:
    async with memory_log() as log:
        await log.bus.create_topic("tickets", 1, {})
        await log.bus.send("tickets", ticket(), key=b"k")
        reader = await log.bus.assigned({Partition("tickets", 0): 0}, group="g")
        assert await take_once(source(topic="tickets"), LosingReader(reader), log, Metrics("process")) == 1  # type: ignore[arg-type]
        assert [type(record) for record in await values(log, VERIFIED)] == [Feedback]


async def test_a_topic_that_was_made_anew_is_read_from_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    async with memory_log() as log:
        await log.bus.create_topic("tickets", 1, {})
        await log.bus.send("tickets", ticket(), key=b"k")
        reader = await log.bus.assigned({Partition("tickets", 0): 500}, group="g")
        taken = [await take_once(source(topic="tickets"), reader, log, Metrics("process")) for _ in range(2)]
        assert taken == [0, 1] and "made_anew" in caplog.text


ANSWERED = "hr-bcdfhjklmnqrtvwzbcdfhjkl.7-3-0"


def said(**fields: Any) -> Received:
    body = msgspec.json.encode({"answer_id": ANSWERED, "id": "f-1", **fields})
    return Received(path="/v1/feedback", body=body, id="f-1", ref=ANSWERED)


async def test_feedback_that_was_deleted_unread_stops_the_worker_until_skip_has_named_the_loss() -> None:
    log, metrics = await opened(), Metrics("process")
    at = await log.publish(FEEDBACK, said(value=1.0), partition=0)
    reader = await log.subscribed(FEEDBACK, group=GROUP)
    await reader.commit({Partition(log.name(FEEDBACK), at.partition): 0})
    await reader.close()
    await log.bus.delete_records(Partition(log.name(FEEDBACK), at.partition), 1)
    with pytest.raises(ConfigError, match="headrace skip feedback"):
        await run_received([USER], log, metrics)
    assert await skip_lost(log, "feedback") == [Lost(FEEDBACK, 0, 0, 1)]
    await log.publish(FEEDBACK, said(value=0.0, id="f-2"), partition=0)
    async with rig.running(asyncio.create_task(run_received([USER], log, metrics))):
        await until(log, ["f-2"])


async def read(
    records: list[Received], *sources: EventSource, more_headers: Headers = (), log: Log | None = None
) -> tuple[list[Feedback], list[DeadLetter]]:
    log = log or await opened(MemoryStore())
    for record in records:
        headers = (*kafka_headers(record), *more_headers)
        await log.bus.send(log.name(FEEDBACK), encode(record), key=record_key(FEEDBACK, record), headers=headers)
    by_path = {source.webhook: source for source in sources}
    reader = await log.subscribed(FEEDBACK, group=GROUP)
    seen: OrderedDict[str, None] = OrderedDict()
    while await received_once(by_path, reader, log, Metrics("process"), seen, poll_s=0.01):
        pass
    await reader.close()
    return await stored(log)


USER = EventSource(name="user", function=rating, webhook="/v1/feedback")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"value": 0.5, "kind": "value"}, {"value": 0.5}),
        ({"value": True, "kind": "value", "rater": "ann"}, {"value": 1.0, "rater": "ann"}),
        ({"label": "rude", "kind": "label"}, {"type": "label", "text": "rude"}),
        ({"correction": "42", "kind": "correction"}, {"type": "correction", "text": "42"}),
        ({"retract": True, "kind": "retraction"}, {"type": "retraction"}),
    ],
)
def test_what_a_client_said_is_feedback_of_its_source(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found, dead = asyncio.run(read([said(**fields)], USER))
    assert found == [Feedback(ref=ANSWERED, id="f-1", source="user", **expected)] and not dead


def test_a_webhooks_event_that_was_sent_again_is_read_once_unless_a_person_delivers_it_again() -> None:
    source = EventSource(name="csat", function=csat, webhook="/zendesk")
    body = msgspec.json.encode({"answer_id": ANSWERED, "id": "t-1", "csat": 4})
    events = [Received(path="/zendesk", body=body, id=name) for name in ("x", "x", "y", "x")]
    assert len(asyncio.run(read(events, source))[0]) == 2
    assert len(asyncio.run(read(events, source, more_headers=((REDELIVERED, b"dead-letters/0@7"),)))[0]) == 4


@pytest.mark.parametrize("forged", ["sealed:a-0123456789abcdef:AAA", "sealed:a-0123456789abcdef:AAAA"])
def test_what_only_looks_like_a_seal_harms_nobody_but_who_sent_it(forged: str) -> None:
    path = {"path": "/zendesk", "id": "x"}
    source = EventSource(name="csat", function=csat, webhook="/zendesk")
    whole = Received(body=msgspec.json.encode(forged), **path)
    found, dead = asyncio.run(
        read([said(value=1, kind="value", rater=forged), whole, said(value=0, kind="value")], USER, source)
    )
    assert [found_item.value for found_item in found] == [0.0] and len(dead) <= 2


async def test_a_webhooks_event_that_its_function_failed_on_is_delivered_again_as_it_came() -> None:
    log, hook = await opened(), Received(path="/zendesk", body=ticket(csat="4"), id="x")

    @feedback(version=1)
    def mended(event: dict[str, Any]) -> Feedback | None:
        return csat({**event, "csat": float(event["csat"])})

    _, (dead,) = await read([hook], EventSource(name="csat", function=csat, webhook="/zendesk"), log=log)
    for change in ({"topic": "feedback"}, {"offset": 1000}):  # as earlier releases wrote it; past what retention kept
        await log.publish(DEAD_LETTERS, msgspec.structs.replace(dead, **change))  # type: ignore[arg-type]
    ends = await log.bus.end_offsets(log.name(DEAD_LETTERS))
    report = await redeliver(
        log, [Range(DEAD_LETTERS, at.index, 0, end) for at, end in ends.items()], lambda count: None
    )
    assert report.delivered == {"bot.feedback": 1, "feedback": 1} and report.refused == {"still does not decode": 1}
    assert await values(log, FEEDBACK) == [hook] * 3
    found, _ = await read([], EventSource(name="csat", function=mended, webhook="/zendesk"), log=log)
    assert [said.ref for said in found] == [REF] * 2


def test_what_no_source_listens_to_is_a_dead_letter_that_can_be_read_again() -> None:
    found, dead = asyncio.run(read([Received(path="/gone", body=b"{}", id="x"), said(value=1, kind="value")], USER))
    assert len(found) == 1
    assert [(letter.reason, "/gone" in letter.error) for letter in dead] == [("no source for this webhook", True)]
