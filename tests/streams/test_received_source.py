"""What the gateway received becomes Feedback in `verified`, by the source of its path."""

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.chain.processor import feedback
from infra.log.bus import Headers
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.log.placing import key_of
from infra.observe.metrics import Metrics
from infra.settings.config import decode
from infra.store.memory import MemoryStore
from schemas import DeadLetter, Feedback, Received, encode, kafka_headers
from schemas.errors import ConfigError
from schemas.topics import DEAD_LETTERS, FEEDBACK, VERIFIED
from streams.config import StreamsConfig
from streams.sources.event import EventSource
from streams.sources.received import GROUP, rating, take_once
from streams.sources.source import build_sources
from streams.stages.verify import REDELIVERED

HERE = "tests.streams.test_received_source"
REF = "hr-bcdfhjklmnqrtvwzbcdfhjkl.7-3-0"


@feedback(version=1)
def csat(ticket: dict[str, Any]) -> Feedback | None:
    return Feedback(ref=ticket["answer_id"], id=ticket["id"], value=ticket["csat"] / 5)


def said(**fields: Any) -> Received:
    body = msgspec.json.encode({"answer_id": REF, "id": "f-1", **fields})
    return Received(path="/v1/feedback", body=body, id="f-1", ref=REF)


async def read(
    records: list[Received], *sources: EventSource, more_headers: Headers = ()
) -> tuple[list[Feedback], list[DeadLetter]]:
    log = Log(MemoryBus(), "bot", store=MemoryStore())
    await log.create_topics(partitions=2, keep_ms=3_600_000)
    for record in records:
        headers = (*kafka_headers(record), *more_headers)
        await log.bus.send(log.name(FEEDBACK), encode(record), key=key_of(FEEDBACK, record), headers=headers)
    by_path = {source.webhook: source for source in sources}
    reader = await log.subscribed(FEEDBACK, group=GROUP)
    seen: OrderedDict[str, None] = OrderedDict()
    while await take_once(by_path, reader, log, Metrics("process"), seen, poll_s=0.01):
        pass
    await reader.close()
    found = [m.value async for m in log.read_all(VERIFIED) if isinstance(m.value, Feedback)]
    dead = [m.value async for m in log.read_all(DEAD_LETTERS) if isinstance(m.value, DeadLetter)]
    return found, dead


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
    assert found == [Feedback(ref=REF, id="f-1", source="user", **expected)] and not dead


def test_a_webhooks_event_that_was_sent_again_is_read_once_unless_a_person_delivers_it_again() -> None:
    source = EventSource(name="csat", function=csat, webhook="/zendesk")
    body = msgspec.json.encode({"answer_id": REF, "id": "t-1", "csat": 4})
    events = [Received(path="/zendesk", body=body, id=name) for name in ("x", "x", "y", "x")]
    assert len(asyncio.run(read(events, source))[0]) == 2
    assert len(asyncio.run(read(events, source, more_headers=((REDELIVERED, b"dead-letters/0@7"),)))[0]) == 4


def test_a_webhook_is_read_by_the_function_of_its_source() -> None:
    source = EventSource(name="csat", function=csat, webhook="/zendesk")
    body = msgspec.json.encode({"answer_id": REF, "id": "t-1", "csat": 4})
    found, dead = asyncio.run(read([Received(path="/zendesk", body=body, id="x")], USER, source))
    assert found == [Feedback(ref=REF, id="t-1", value=0.8, source="csat")] and not dead


@pytest.mark.parametrize("forged", ["sealed:a-0123456789abcdef:AAA", "sealed:a-0123456789abcdef:AAAA"])
def test_what_only_looks_like_a_seal_harms_nobody_but_who_sent_it(forged: str) -> None:
    path = {"path": "/zendesk", "id": "x"}
    source = EventSource(name="csat", function=csat, webhook="/zendesk")
    whole = Received(body=msgspec.json.encode(forged), **path)
    found, dead = asyncio.run(
        read([said(value=1, kind="value", rater=forged), whole, said(value=0, kind="value")], USER, source)
    )
    assert [one.value for one in found] == [0.0] and len(dead) <= 2


def test_what_no_source_listens_to_is_a_dead_letter_that_can_be_read_again() -> None:
    found, dead = asyncio.run(read([Received(path="/gone", body=b"{}", id="x"), said(value=1, kind="value")], USER))
    assert len(found) == 1
    assert [(one.reason, "/gone" in one.error) for one in dead] == [("no source for this webhook", True)]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({}, "expected one of"),
        ({"topic": "a", "webhook": "/b", "secret_env": "X"}, "expected one of"),
        ({"webhook": "zendesk", "secret_env": "X"}, "expected a path"),
        ({"webhook": "/zendesk"}, "secret_env"),
        ({"webhook": "/v1/models", "secret_env": "X"}, "the gateway's own"),
        ({"webhook": "/openapi.json", "secret_env": "X"}, "the gateway's own"),
        ({"webhook": "/v1/feedback", "secret_env": "X"}, "secret_env"),
    ],
)
def test_a_source_that_listens_nowhere_or_twice_is_refused(where: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode({"feedback": [{"name": "a", "use": f"{HERE}:csat", "from": where}]}, StreamsConfig, "x.toml")


def test_two_sources_of_one_webhook_are_refused() -> None:
    one = {"use": f"{HERE}:csat", "from": {"webhook": "/z", "secret_env": "X"}}
    config = decode({"feedback": [{"name": "a", **one}, {"name": "b", **one}]}, StreamsConfig, "x.toml")
    with pytest.raises(ConfigError, match="listens to"):
        build_sources(config.feedback, Path())
