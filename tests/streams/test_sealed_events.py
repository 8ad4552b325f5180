"""What people write about answers, wherever it comes from, is redacted and sealed where we first write it, and forgotten."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from infra.chain.processor import feedback
from infra.ledger.forget import complete, destroy
from infra.ledger.index import LogIndex
from infra.ledger.trace import legible
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.seal import FORGOTTEN, Keys
from schemas import DeadLetter, Feedback
from schemas.topics import DEAD_LETTERS, FEEDBACK, VERIFIED
from streams.reprocess.letters import redeliver
from streams.reprocess.ranges import Range
from streams.sources import received, topic
from streams.sources.event import EventSource
from streams.sources.file import FilePosition
from streams.sources.file import take_once as take_from_file
from tests.actors.gateway.gateway_rig import RunningGateway, engine, says, serving
from tests.actors.gateway.test_gateway_feedback import HOOK, signature
from tests.streams.test_sealed_feedback import everything

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
        await heard(source, log, metrics)
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


async def heard(source: EventSource, log: Log, metrics: Metrics, group: str = received.GROUP) -> None:
    reader = await log.subscribed(FEEDBACK, group=group)
    while await received.take_once({"/zendesk": source}, reader, log, metrics, poll_s=0.01):
        pass
    await reader.close()


@asynccontextmanager
async def answered(folder: Path) -> AsyncIterator[tuple[RunningGateway, str]]:
    """A gateway with a webhook, and the id of an answer it gave to a named user."""
    async with serving(folder, engine(says("Hello.")), webhooks=(HOOK,), store=MemoryStore()) as served:
        key = served.key(tenant=TENANT)
        await served.keys_read()
        client = served.client(key)
        done = await client.completions.create(model="m", prompt="Hi", user=USER, extra_headers={"x-session-id": "s"})
        await served.recorded(1)
        yield served, done.id


async def forgotten(log: Log, folder: Path) -> None:
    """As `headrace forget` does."""
    assert log.store is not None
    keys = Keys(log.store)
    key_ids = destroy(keys, TENANT, USER)
    index = LogIndex(folder / "trace.sqlite", run="test", policy="main")
    assert (await complete(log, index, keys, "9f", key_ids)).texts == 1
    index.close()


async def written(log: Log) -> tuple[Feedback, DeadLetter]:
    (one,) = [m.value async for m in log.read_all(VERIFIED) if isinstance(m.value, Feedback)]
    (letter,) = [m.value async for m in log.read_all(DEAD_LETTERS) if isinstance(m.value, DeadLetter)]
    return one, letter


@pytest.mark.parametrize("way", ["webhook", "topic", "file"])
def test_what_an_event_says_is_in_no_topic_in_the_clear_and_cannot_be_read_once_its_user_is_forgotten(
    tmp_path: Path, way: Way
) -> None:
    async def check() -> None:
        async with answered(tmp_path / "gateway") as (served, answer):
            log = served.log
            metrics = await said(way, served, answer, log)
            one, letter = await written(log)
            assert legible(one, log.keys).text == "it should say WILHELMINA, ask [email]"
            assert letter.error == "note failed: ValueError", "an exception may repeat what was written"
            assert metrics.counters()["feedback_events{outcome=failed,source=note}"] == 1
            found = await everything(log)
            files = [path for path in served.folder.rglob("*") if path.is_file() and "keys" not in path.parts]
            found += b"".join([path.read_bytes() for path in files])
            assert not [word for word in (b"WILHELMINA", b"ada@", b"bob@", b"ann@") if word in found]
            await forgotten(log, tmp_path)
            later = Log(log.bus, "test", store=served.store)
            assert legible(one, later.keys).text == FORGOTTEN
            if way == "webhook":
                again = Metrics("process")
                await heard(EventSource(name="note", function=note), later, again, group="later")
                assert again.counters() == {"feedback_events{outcome=forgotten,source=note}": 2.0}

    asyncio.run(check())


def broken_event(answer: str) -> bytes:
    return events(answer)[1]


@pytest.mark.parametrize(
    ("left", "forget", "delivered"),
    [(True, False, broken_event), (False, False, None), (True, True, None)],
    ids=["still in its topic", "trimmed there", "forgotten"],
)
def test_a_sealed_letter_goes_back_to_its_topic_unless_its_user_is_forgotten(
    tmp_path: Path, left: bool, forget: bool, delivered: Callable[[str], bytes] | None
) -> None:
    async def check() -> None:
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

    asyncio.run(check())
