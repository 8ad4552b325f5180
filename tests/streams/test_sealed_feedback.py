"""Feedback text is redacted, sealed in every topic and file, and forgotten."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from infra.chain.chain import make_step
from infra.chain.processor import feedback
from infra.ledger.forget import complete, destroy
from infra.ledger.index import LogIndex
from infra.ledger.trace import legible
from infra.log.bus import Partition, Record
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.seal import FORGOTTEN, Keys, open_event, open_text, seal_event, seal_text
from schemas import BadFrame, Block, DeadLetter, Feedback, Received
from schemas.errors import Sealed
from schemas.ids import answer_id, experience_id, request_group
from schemas.topics import ALL, DEAD_LETTERS, FEEDBACK, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.rules import Rules
from streams.processors.correct import Correct
from streams.reprocess.letters import redeliver
from streams.reprocess.ranges import Range
from streams.sources import topic
from streams.sources.event import EventSource
from streams.sources.file import FilePosition
from streams.sources.file import take_once as take_from_file
from streams.sources.received import GROUP, rating, take_once
from tests.actors.gateway.gateway_rig import ASK, RunningGateway, engine, says, serving
from tests.actors.gateway.test_gateway_feedback import HOOK, signature
from tests.names import session_name
from tests.streams.collect.collecting import answer, block
from tests.streams.collect.test_corrections import Letters
from tests.streams.processors.by_default import reward

WRITTEN = "it should say WILHELMINA"
SESSION = session_name("acme", "chat-81")
ASKED = request_group(SESSION, 7, 0)
ANSWER = experience_id(ASKED, 0, 0)
OTHER = experience_id(request_group(session_name("acme", "chat-82"), 7, 0), 0, 0)
RULES = Rules(
    deadline_ms=1000, keep_ms=10**9, sources={"user": FeedbackRules(window_ms=1000, late="amend")}, corrects=True
)


def test_a_text_is_opened_by_its_sessions_key_for_its_own_answer_only_and_never_again_once_it_is_destroyed() -> None:
    keys = Keys(MemoryStore())
    shut = seal_text(WRITTEN, keys, ANSWER)
    assert "WILHELMINA" not in shut and shut != seal_text(WRITTEN, keys, ANSWER)
    assert open_text(shut, keys, ANSWER) == WRITTEN
    with pytest.raises(BadFrame):
        open_text(shut, keys, OTHER)
    keys.destroy(session_name("acme", "chat-82"))
    assert open_text(shut, keys, ANSWER) == WRITTEN
    keys.destroy(SESSION)
    with pytest.raises(Sealed):
        open_text(shut, keys, ANSWER)
    assert open_text(seal_text(WRITTEN, keys, ANSWER), keys, ANSWER) == WRITTEN, "who comes back has a new key"


def test_an_event_about_several_sessions_is_forgotten_with_the_first_of_them() -> None:
    keys = Keys(MemoryStore())
    sessions = [session_name("acme", f"chat-{number}") for number in range(3)]
    body = b'{"note": "WILHELMINA"}'
    for destroyed in sessions:
        shut = seal_event(body, keys, sessions)
        assert b"WILHELMINA" not in shut and open_event(shut, keys) == body
        keys.destroy(destroyed)
        with pytest.raises(Sealed):
            open_event(shut, keys)
    assert seal_event(body, keys, ()) == open_event(body, keys) == body, "one about nobody's answers"


def test_what_was_never_sealed_stays_as_it_is() -> None:
    keys = Keys(MemoryStore())
    assert seal_text(WRITTEN, keys, "add-3745.2.0-7-0") == WRITTEN, "the answer of an explorer is nobody's"
    for text in (WRITTEN, "sealed:", "sealed:nokey:AAAA", "sealed: by hand"):
        assert open_text(text, keys, ANSWER) == text


def correction(keys: Keys) -> Received:
    body = {"answer_id": answer_id(ANSWER), "id": "f-1", "kind": "correction", "rater": "ann"}
    body["correction"] = seal_text(WRITTEN, keys, ANSWER)
    return Received(path="/v1/feedback", body=msgspec.json.encode(body), id="f-1", ref=answer_id(ANSWER))


async def heard(log: Log, function: Any = rating) -> Metrics:
    metrics, path = Metrics("process"), "/v1/feedback"
    await heard_events(EventSource(name="user", function=function, webhook=path), log, metrics, path=path)
    return metrics


async def everything(log: Log) -> bytes:
    """All bytes of all topics."""
    return b"".join([message.record.value for topic in ALL async for message in log.scan(topic)])


async def log_with(*, answered: bool) -> tuple[Log, Keys, MemoryStore]:
    store = MemoryStore()
    log = Log(MemoryBus(), "bot", store=store)
    await log.create_topics(partitions=1, keep_ms=3_600_000)
    if answered:
        member = answer(ASKED, 0, size=1, lane="live")
        await log.publish(VERIFIED, block(msgspec.structs.replace(member, scores=(), tenant="acme")))
    assert log.keys is not None
    await log.publish(FEEDBACK, correction(log.keys))
    return log, log.keys, store


async def collected(log: Log, folder: Path) -> tuple[list[Block], dict[str, float]]:
    metrics = Metrics("process")
    steps = (make_step("correct", Correct(speller=Letters())), make_step("reward", reward))
    collector = Collector(log, metrics, 0, CollectSettings(folder, RULES, steps))
    await collector.recover(0, lambda: False)
    records: list[Record] = [message.record async for message in log.scan(VERIFIED)]
    folded, _ = await collector.fold(records)
    await collector.save()
    collector.close()
    return [sent for result in folded for decision in result.decisions for sent in decision.blocks], metrics.counters()


def test_an_edit_is_learned_from_and_lies_nowhere_in_the_clear(tmp_path: Path) -> None:
    async def check() -> None:
        log, keys, _ = await log_with(answered=True)
        await heard(log)
        (said,) = [m.value async for m in log.scan(VERIFIED) if isinstance(m.value, Feedback)]
        assert said.text is not None and legible(said, keys).text == WRITTEN
        sent, _ = await collected(log, tmp_path)
        expert = [member for made in sent for member in made.experiences if member.lane == "expert"]
        assert [item.messages[-1].content for item in expert] == [WRITTEN]
        assert b"WILHELMINA" not in await everything(log)

    asyncio.run(check())
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not [file for file in files if b"WILHELMINA" in file.read_bytes()]


async def test_an_edit_whose_key_is_destroyed_is_counted_and_teaches_nothing(tmp_path: Path) -> None:
    log, keys, _ = await log_with(answered=True)
    await heard(log)
    keys.destroy(SESSION)
    sent, counters = await collected(log, tmp_path)
    assert not [member for made in sent for member in made.experiences if member.lane in ("expert", "human")]
    assert counters["dropped{reason=forgotten}"] >= 1


async def test_feedback_that_was_forgotten_before_it_was_read_is_counted_and_goes_no_further() -> None:
    log, keys, _ = await log_with(answered=False)
    keys.destroy(SESSION)
    metrics = await heard(log)
    assert [m async for m in log.scan(VERIFIED)] == []
    assert metrics.counters()["feedback_events{outcome=forgotten,source=user}"] == 1


async def test_a_source_of_ones_own_reads_the_text_and_a_dead_letter_holds_it_sealed() -> None:
    read = []

    @feedback(version=1)
    def careful(said: dict[str, Any]) -> Feedback | None:
        read.append(said["correction"])
        raise RuntimeError("it cannot be said")

    log, _, _ = await log_with(answered=False)
    metrics = await heard(log, careful)
    assert metrics.counters()["feedback_events{outcome=failed,source=user}"] == 1
    assert read == [WRITTEN] and b"WILHELMINA" not in await everything(log)


Way = Literal["webhook", "topic", "file"]
TENANT, USER, FOREIGN = "acme", "ann@example.org", "zendesk.closed"
NOTE = "it should say WILHELMINA, ask ada@lovelace.example"


@feedback(version=1)
def note(event: dict[str, Any]) -> Feedback | None:
    """A correction, or an exception that repeats what was written."""
    if event["broken"]:
        raise ValueError(f"cannot read {event['note']}")
    return Feedback(ref=event["answer_id"], id=event["id"], type="correction", text=event["note"], rater=event["mail"])


def events(answer: str) -> list[bytes]:
    told = {"answer_id": answer, "note": NOTE, "mail": "bob@example.org"}
    return [json.dumps({**told, "id": f"e{broken}", "broken": broken}).encode() for broken in (False, True)]


async def said(way: Way, served: RunningGateway, answer: str, log: Log) -> Metrics:
    """Two events by one way, and what a worker makes of them."""
    metrics, source = Metrics("process"), EventSource(name="note", function=note)
    if way == "webhook":
        async with served.http() as http:
            for body in events(answer):
                told = await http.post("/zendesk", content=body, headers={"x-signature": signature(body).hex()})
                assert told.status_code == 202
        await heard_events(source, log, metrics)
    elif way == "topic":
        await log.bus.create_topic(FOREIGN, 1, {})
        for body in events(answer):
            await log.bus.send(FOREIGN, body, key=b"")
        reader = await log.bus.subscribed([FOREIGN], group="t")
        await topic.take_once(source, reader, log, metrics)
        await reader.close()
    else:
        source.file = served.folder.parent / "events.jsonl"
        source.file.write_bytes(b"\n".join([*events(answer), b""]))
        await take_from_file(source, FilePosition(), log, metrics, served.folder.parent / "state")
    return metrics


async def heard_events(
    source: EventSource, log: Log, metrics: Metrics, group: str = GROUP, path: str = "/zendesk"
) -> None:
    reader = await log.subscribed(FEEDBACK, group=group)
    while await take_once({path: source}, reader, log, metrics, poll_s=0.01):
        pass
    await reader.close()


@asynccontextmanager
async def answered(folder: Path) -> AsyncIterator[tuple[RunningGateway, str]]:
    """A gateway with a webhook, and the id of an answer it gave to a named user."""
    async with serving(folder, engine(says("Hello.")), webhooks=(HOOK,), store=MemoryStore()) as served:
        client = await served.opened(TENANT)
        done = await client.chat.completions.create(
            model="m", messages=ASK, user=USER, extra_headers={"x-session-id": "s"}
        )
        await served.recorded(1)
        yield served, done.id


async def forgotten(log: Log, folder: Path) -> None:
    assert log.store is not None
    keys = Keys(log.store)
    key_ids = destroy(keys, TENANT, USER)
    index = LogIndex(folder / "trace.sqlite", run="test", policy="main")
    assert (await complete(log, index, keys, "9f", key_ids)).texts == 1
    index.close()


async def written(log: Log) -> tuple[Feedback, DeadLetter]:
    (message,) = [m.value async for m in log.scan(VERIFIED) if isinstance(m.value, Feedback)]
    (letter,) = [m.value async for m in log.scan(DEAD_LETTERS) if isinstance(m.value, DeadLetter)]
    return message, letter


@pytest.mark.parametrize("way", ["webhook", "topic", "file"])
async def test_what_an_event_says_is_in_no_topic_in_the_clear_and_cannot_be_read_once_its_user_is_forgotten(
    tmp_path: Path, way: Way
) -> None:
    async with answered(tmp_path / "gateway") as (served, answer):
        log = served.log
        metrics = await said(way, served, answer, log)
        item, letter = await written(log)
        assert legible(item, log.keys).text == "it should say WILHELMINA, ask [email]"
        assert letter.error == "note failed: ValueError", "an exception may repeat what was written"
        assert metrics.counters()["feedback_events{outcome=failed,source=note}"] == 1
        found = await everything(log)
        files = [path for path in served.folder.rglob("*") if path.is_file() and "keys" not in path.parts]
        found += b"".join([path.read_bytes() for path in files])
        assert not [word for word in (b"WILHELMINA", b"ada@", b"bob@", b"ann@") if word in found]
        await forgotten(log, tmp_path)
        later = Log(log.bus, "test", store=served.store)
        assert legible(item, later.keys).text == FORGOTTEN
        again = Metrics("process")
        if way == "webhook":
            await heard_events(EventSource(name="note", function=note), later, again, group="later")
        else:
            again = await said(way, served, answer, later)
        assert again.counters() == {"feedback_events{outcome=forgotten,source=note}": 2.0}
        assert await written(later) == (item, letter)


@pytest.mark.parametrize(
    ("left", "forget"),
    [(True, False), (False, False), (True, True)],
    ids=["still in its topic", "trimmed there", "forgotten"],
)
async def test_a_sealed_letter_goes_back_to_its_topic_unless_its_user_is_forgotten(
    tmp_path: Path, left: bool, forget: bool
) -> None:
    async with answered(tmp_path / "gateway") as (served, answer):
        log = served.log
        assert isinstance(log.bus, MemoryBus)
        await said("topic", served, answer, log)
        if not left:
            await log.bus.delete_records(Partition(FOREIGN, 0), 2)
        if forget:
            await forgotten(log, tmp_path)
        later = Log(log.bus, "test", store=served.store)
        places = await log.bus.end_offsets(log.name(DEAD_LETTERS))
        ranges = [Range(DEAD_LETTERS, place.index, 0, end) for place, end in places.items()]
        report = await redeliver(later, ranges, lambda count: None)
        if forget:
            assert report.refused == {"still does not decode": 1} and "forgotten" in report.examples[0]
            return
        assert report.delivered == {FOREIGN: 1}
        reader = await log.bus.assigned({place: 2 for place in await log.bus.end_offsets(FOREIGN)})
        (record,) = await reader.get_many(timeout_s=5.0)
        await reader.close()
        event = json.loads(record.value)
        assert event["note"] == (NOTE if left else "it should say WILHELMINA, ask [email]")
        assert event["answer_id"] == answer
