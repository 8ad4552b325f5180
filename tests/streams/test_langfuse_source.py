"""Feedback from Langfuse and from OpenTelemetry."""

import asyncio
import base64
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.settings.config import decode
from infra.settings.plugin import load
from schemas import Feedback
from schemas.errors import ConfigError
from streams.config import LangfuseConfig, StreamsConfig
from streams.sources import langfuse, otel
from streams.sources.event import EventSource
from streams.sources.file import load_state
from streams.sources.langfuse import LangfuseAway, LangfuseState, langfuse_score, run_langfuse, take_round
from streams.sources.otel import EVENT, evaluation_result, split_otlp
from streams.sources.source import build_sources, run_sources
from tests.actors.rig import running
from tests.http_endpoint import Reply, http_endpoint
from tests.streams.test_source import opened, stored, until

REF = "hr-a1b2.0-3-0"
NAMED: dict[str, Any] = {"metadata": {"answer_id": REF}}


PUBLIC, SECRET = "pk-lf-1", "sk-lf-2"
GROUPS = {
    "details": ("comment", "configId", "metadata"),
    "subject": ("subject",),
    "annotation": ("authorUserId", "queueId"),
}
CORE = ("id", "projectId", "name", "value", "dataType", "source", "timestamp", "environment", "createdAt", "updatedAt")


def ago(seconds: float) -> str:
    """A time before now, as Langfuse writes it."""
    moment = datetime.now(UTC) - timedelta(seconds=seconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class FakeLangfuse:
    """Langfuse's scores over HTTP, version 3 of its public API as documented: Basic auth, filters, newest first, a cursor.

    scores: by id. broken: what each of the next requests is answered with instead: a status, and a body. most: of a page."""

    def __init__(self) -> None:
        self.most = 100
        self.url = ""
        self.scores: dict[str, dict[str, Any]] = {}
        self.broken: list[tuple[int, bytes]] = []
        self.asked: list[dict[str, str]] = []

    def score(self, id: str, value: object, *, seconds_ago: float = 10.0, **fields: Any) -> None:
        """Make or change a score."""
        now = ago(0)
        kind = "BOOLEAN" if isinstance(value, bool) else "CATEGORICAL" if isinstance(value, str) else "NUMERIC"
        self.scores[id] = {
            "id": id, "projectId": "p", "name": "user-feedback", "value": value, "dataType": kind, "source": "API",
            "timestamp": ago(seconds_ago), "environment": "default", "createdAt": now, "updatedAt": now, "comment": None,
            "configId": None, "metadata": {}, "subject": {"kind": "trace", "id": "0af7"}, "authorUserId": None,
            "queueId": None, **fields,
        }  # fmt: skip

    def answer(self, query: dict[str, str], authorization: str) -> tuple[int, bytes]:
        """Answer to a request."""
        self.asked.append(query)
        if self.broken:
            return self.broken.pop(0)
        if authorization != "Basic " + base64.b64encode(f"{PUBLIC}:{SECRET}".encode()).decode():
            return 401, b'{"message": "Invalid credentials"}'
        groups, limit = query.get("fields", "").split(","), int(query.get("limit", "50"))
        if not 1 <= limit <= 100 or set(groups) - {*GROUPS, ""}:
            return 400, b'{"message": "Invalid request data"}'
        limit = min(limit, self.most)
        found = sorted(self.scores.values(), key=lambda one: (one["timestamp"], one["id"]), reverse=True)
        found = [one for one in found if one["name"] in query.get("name", one["name"]).split(",")]
        found = [
            one for one in found if query.get("fromTimestamp", "") <= one["timestamp"] < query.get("toTimestamp", "z")
        ]
        if "cursor" in query:
            last = tuple(json.loads(base64.urlsafe_b64decode(query["cursor"])))
            found = [one for one in found if (one["timestamp"], one["id"]) < last]
        page, meta = found[:limit], {"limit": limit}
        if len(found) > limit:
            key = json.dumps([page[-1]["timestamp"], page[-1]["id"]])
            meta["cursor"] = base64.urlsafe_b64encode(key.encode()).decode()  # type: ignore[assignment]
        shown = [*CORE, *(name for group in groups for name in GROUPS.get(group, ()))]
        return 200, json.dumps({"data": [{name: one[name] for name in shown} for one in page], "meta": meta}).encode()


@pytest.fixture
def fake() -> Iterator[FakeLangfuse]:
    server = FakeLangfuse()

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        known = parts.path == "/api/public/v3/scores"
        return server.answer(query, headers.get("Authorization", "")) if known else (404, b"{}")

    with http_endpoint(answer) as server.url:
        yield server


def source(fake: FakeLangfuse, **fields: Any) -> EventSource:
    config = LangfuseConfig(score="user-feedback", url=fake.url, every="10ms", **fields)
    return EventSource(name="csat", function=langfuse_score, langfuse=config)


class SourceRounds:
    """Rounds of one source, as a process that may be started again."""

    def __init__(self, mine: EventSource, log: Log, folder: Path) -> None:
        self.source, self.log, self.metrics = mine, log, Metrics("process")
        self.state = folder / "feedback-csat"
        self.known = load_state(self.state.with_suffix(".json"), LangfuseState)

    async def round(self) -> None:
        async with httpx.AsyncClient(auth=(PUBLIC, SECRET)) as client:
            self.known = await take_round(self.source, client, self.known, self.log, self.metrics, self.state)

    async def said(self) -> list[tuple[str, float | None]]:
        return [(record.id.partition("@")[0], record.value) for record in (await stored(self.log))[0]]


def read(score: dict[str, Any], **options: Any) -> Feedback | None:
    found = load("streams.sources.langfuse:langfuse_score", options, "test")({"id": "s", "updatedAt": "t", **score})
    assert found is None or isinstance(found, Feedback)
    return found


def test_a_score_becomes_feedback_of_its_kind_on_the_answer_that_it_names() -> None:
    def said(value: object, kind: str, **options: Any) -> tuple[object, ...] | None:
        item = read({"value": value, "dataType": kind, **NAMED}, **options)
        return None if item is None else (item.ref, item.type, item.value, item.text)

    assert said(0.25, "NUMERIC") == (REF, "value", 0.25, None)
    assert said(4, "NUMERIC", lowest=1.0, highest=5.0) == (REF, "value", 0.75, None)
    assert said(True, "BOOLEAN") == (REF, "value", 1.0, None)
    assert said("good", "CATEGORICAL", categories={"good": 1.0}) == (REF, "value", 1.0, None)
    assert said("odd", "CATEGORICAL", categories={"good": 1.0}) == (REF, "label", None, "odd")
    assert said("better", "CORRECTION") == (REF, "correction", None, "better")
    assert said("", "CORRECTION") is None and said("a note", "TEXT") is None


def test_an_answer_is_named_in_the_metadata_or_by_what_the_score_is_of() -> None:
    value = {"value": 1, "dataType": "NUMERIC"}
    for named in (
        NAMED,
        {"metadata": {"gen_ai.response.id": REF}},
        {"subject": {"kind": "session", "id": REF}},
        {"metadata": {"answer_id": 7}, "subject": {"kind": "observation", "id": REF, "traceId": "0af7"}},
    ):
        item = read({**value, **named, "authorUserId": "ann"})
        assert item is not None and (item.ref, item.rater, item.id) == (REF, "ann", "s@t")
    for unnamed in (
        {},
        {"metadata": None, "subject": None},
        {"subject": {"kind": "trace", "id": "0af7"}},
        {"metadata": []},
    ):
        assert read({**value, **unnamed}) is None


async def test_each_score_counts_once_across_rounds_and_restarts_and_a_changed_one_anew(
    fake: FakeLangfuse, tmp_path: Path
) -> None:
    log = await opened()
    reader = SourceRounds(source(fake), log, tmp_path)
    fake.score("s1", 1.0, seconds_ago=20, **NAMED)
    fake.score("s2", 0.5, **NAMED)
    fake.score("other", 0.5, name="latency", **NAMED)
    fake.score("unnamed", 0.5)
    await reader.round()
    await reader.round()
    assert await reader.said() == [("s1", 1.0), ("s2", 0.5)]
    assert reader.metrics.counters()["feedback_events{outcome=ignored,source=csat}"] == 1
    again = SourceRounds(source(fake), log, tmp_path)
    fake.score("s1", 0.0, seconds_ago=20, updatedAt=ago(-1), **NAMED)
    fake.score("late", 0.25, seconds_ago=1800, **NAMED)  # of a time that was read before
    await again.round()
    assert await again.said() == [("s1", 1.0), ("s2", 0.5), ("late", 0.25), ("s1", 0.0)]


async def test_what_was_not_saved_is_published_again_with_the_same_id(fake: FakeLangfuse, tmp_path: Path) -> None:
    log = await opened()
    fake.score("s1", 1.0, **NAMED)
    (tmp_path / "lost").mkdir()
    await SourceRounds(source(fake), log, tmp_path / "lost").round()
    await SourceRounds(source(fake), log, tmp_path).round()
    first, second = (await stored(log))[0]
    assert first == second


async def test_more_than_a_page_is_read_whole_and_in_order(fake: FakeLangfuse, tmp_path: Path) -> None:
    reader = SourceRounds(source(fake), await opened(), tmp_path)
    for number in range(250):
        fake.score(f"s{number:03}", number / 250, seconds_ago=300 - number // 2, **NAMED)
    await reader.round()
    assert [name for name, _ in await reader.said()] == [f"s{number:03}" for number in range(250)]
    assert len(fake.asked) == 3


async def test_more_than_a_round_takes_is_read_from_its_oldest_on(fake: FakeLangfuse, tmp_path: Path) -> None:
    reader = SourceRounds(source(fake), await opened(), tmp_path)
    fake.most = 4
    for number in range(langfuse.MAX_PAGES * fake.most + 20):
        fake.score(f"s{number:05}", 1.0, seconds_ago=72_000 - 150 * number)
    seen = []
    while not seen or seen[-1] < len(fake.scores):
        await reader.round()
        seen.append(int(reader.metrics.counters()["feedback_events{outcome=ignored,source=csat}"]))
    assert 0 < seen[0] < len(fake.scores) and seen == sorted(set(seen))


async def test_an_overlap_of_more_than_a_request_takes_is_read_to_its_end_and_further(
    fake: FakeLangfuse, tmp_path: Path
) -> None:
    reader = SourceRounds(source(fake, overlap="20m"), await opened(), tmp_path)
    fake.most = 4
    names = [f"s{number:03}" for number in range(langfuse.MAX_PAGES * fake.most + 5)]
    for number, name in enumerate(names):
        fake.score(name, 1.0, seconds_ago=2050 - 5 * number, **NAMED)
    read_to_ms = int(1000 * (datetime.now(UTC).timestamp() - 1000))
    reader.known = LangfuseState(read_to_ms=read_to_ms)
    await reader.round()
    assert [name for name, _ in await reader.said()] == names and reader.known.read_to_ms > read_to_ms


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, b"", "refused"),
        (429, b"", "too often"),
        (401, b"", "keys refused"),
        (410, b"", "refused"),
        (302, b"", "refused"),
        (200, b"<html>", "no scores"),
        (200, b'{"data": {}}', "no scores"),
        (200, b"[" * 100_000, "no scores"),
        (200, b" " * (langfuse.MAX_PAGE_BYTES + 1), "page refused"),
    ],
)
async def test_while_langfuse_is_away_nothing_is_passed_over(
    fake: FakeLangfuse, tmp_path: Path, status: int, body: bytes, reason: str
) -> None:
    reader = SourceRounds(source(fake), await opened(), tmp_path)
    fake.score("s1", 1.0, **NAMED)
    fake.broken = [(status, body)]
    with pytest.raises(LangfuseAway) as away:
        await reader.round()
    assert away.value.reason == reason and reader.known == LangfuseState()
    await reader.round()
    assert await reader.said() == [("s1", 1.0)]


async def test_a_score_that_makes_no_sense_is_a_dead_letter_and_the_next_goes_on(
    fake: FakeLangfuse, tmp_path: Path
) -> None:
    reader = SourceRounds(source(fake), await opened(), tmp_path)
    fake.score("bad", 7.0, seconds_ago=20, **NAMED)
    fake.score("worse", None, seconds_ago=15, timestamp=ago(15), **NAMED)
    fake.score("worst", 1.0, seconds_ago=12, **NAMED)
    fake.scores["worst"]["id"] = None
    fake.score("good", 1.0, **NAMED)
    await reader.round()
    said, dead = await stored(reader.log)
    assert [word.id.partition("@")[0] for word in said] == ["good"]
    assert [(letter.topic, letter.reason) for letter in dead] == [
        ("langfuse:csat", "event invalid"), ("langfuse:csat", "event failed"), ("langfuse:csat", "event failed"),
    ]  # fmt: skip
    assert "from 0 to 1" in dead[0].error and b"bad" in dead[0].value


def test_a_source_runs_until_it_is_ended_and_counts_what_failed(fake: FakeLangfuse, tmp_path: Path) -> None:
    async def scene() -> None:
        log, metrics = await opened(), Metrics("process")
        fake.broken = [(503, b"")]
        fake.score("s1", 1.0, updatedAt="t", **NAMED)
        state = tmp_path / "s" / "feedback-csat"
        async with running(asyncio.create_task(run_langfuse(source(fake), log, metrics, state))):
            await until(log, ["s1@t"])
        assert metrics.counters()["feedback_polls_failed{reason=refused,source=csat}"] == 1

    os.environ |= {"LANGFUSE_PUBLIC_KEY": PUBLIC, "LANGFUSE_SECRET_KEY": SECRET}
    try:
        asyncio.run(scene())
    finally:
        del os.environ["LANGFUSE_PUBLIC_KEY"], os.environ["LANGFUSE_SECRET_KEY"]


def test_it_is_built_from_settings_and_says_what_is_missing(fake: FakeLangfuse, tmp_path: Path) -> None:
    table = {
        "name": "csat",
        "use": "streams.sources.langfuse:langfuse_score",
        "options": {"highest": 5.0},
        "from": {"langfuse": {"score": "stars", "url": fake.url, "secret_key_env": "HEADRACE_NO_SUCH"}},
    }
    (built,) = build_sources(decode({"feedback": [table]}, StreamsConfig, "bot.toml").feedback, tmp_path)

    async def run() -> None:
        await run_langfuse(built, await opened(), Metrics("process"), tmp_path / "feedback-csat")

    os.environ["LANGFUSE_PUBLIC_KEY"] = PUBLIC
    try:
        with pytest.raises(ConfigError, match="has no HEADRACE_NO_SUCH"):
            asyncio.run(run())
    finally:
        del os.environ["LANGFUSE_PUBLIC_KEY"]
    both = {**table, "from": {"topic": "t", "langfuse": {"score": "stars"}}}
    with pytest.raises(ConfigError, match="got 2 of topic"):
        decode({"feedback": [both]}, StreamsConfig, "bot.toml")


def emitted(*events: Mapping[str, Any], name: str = EVENT) -> bytes:
    exporter = InMemoryLogRecordExporter()
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    for number, attributes in enumerate(events):
        record = LogRecord(timestamp=1_772_000_000_000_000_000 + number, event_name=name, attributes=dict(attributes))
        provider.get_logger("judge").emit(record)
    return json.dumps(MessageToDict(encode_logs(exporter.get_finished_logs()))).encode()


def result(value: float | None = None, **more: Any) -> dict[str, Any]:
    said = {"gen_ai.evaluation.name": "helpful", "gen_ai.response.id": REF, **more}
    return said if value is None else {**said, "gen_ai.evaluation.score.value": value}


def read_event(attributes: Mapping[str, Any], *, event: str = EVENT, **options: Any) -> Feedback | None:
    (record,) = split_otlp(emitted(attributes, name=event))
    found = evaluation_result(json.loads(record), name="helpful", **options)
    assert found is None or isinstance(found, Feedback)
    return found


def test_an_evaluation_becomes_feedback_on_the_answer_that_its_response_id_names() -> None:
    plain = read_event(result(0.75))
    assert plain is not None and (plain.ref, plain.type, plain.value) == (REF, "value", 0.75)
    stars = read_event(result(4), lowest=1.0, highest=5.0)
    assert stars is not None and stars.value == 0.75
    labelled = result(**{"gen_ai.evaluation.score.label": "pass"})
    valued, label = read_event(labelled, labels={"pass": 1.0}), read_event(labelled)
    assert valued is not None and valued.value == 1.0
    assert label is not None and (label.type, label.text) == ("label", "pass")
    named = read_event(result(1.0, **{"log.record.uid": "e-17"}))
    assert named is not None and named.id == "e-17"


def test_an_event_has_the_same_id_however_often_it_is_delivered_and_others_have_others() -> None:
    first, again, other = (read_event(result(value)) for value in (1.0, 1.0, 0.5))
    assert first is not None and again is not None and other is not None
    assert first.id == again.id != other.id


async def test_a_topic_that_a_collector_writes_is_read_event_by_event(tmp_path: Path) -> None:
    table = {
        "name": "helpful",
        "use": "streams.sources.otel:evaluation_result",
        "options": {"name": "helpful"},
        "from": {"topic": "otel.logs", "otlp": True},
    }
    sources = build_sources(decode({"feedback": [table]}, StreamsConfig, "bot.toml").feedback, tmp_path)

    def uid(number: int) -> dict[str, Any]:
        return {"log.record.uid": str(number)}

    log, metrics = await opened(), Metrics("process")
    await log.bus.create_topic("otel.logs", 1, {})
    broken = result(7.0, **uid(3))
    mine = [result(1.0, **uid(1)), broken, {"gen_ai.evaluation.name": "brief"}, result(0.5, **uid(2))]
    async with running(asyncio.create_task(run_sources(sources, log, metrics, tmp_path))):
        await log.bus.send("otel.logs", emitted(*mine), key=b"")
        for wrong in (b'{"resourceLogs": 7}', b"no JSON"):
            await log.bus.send("otel.logs", wrong, key=b"")
        await log.bus.send("otel.logs", emitted(result(0.25, **uid(4))), key=b"")
        await until(log, ["1", "2", "4"])
    dead = (await stored(log))[1]
    reasons = sorted((letter.offset, letter.reason) for letter in dead)
    assert reasons == [(0, "event invalid"), (1, "event failed"), (2, "event invalid")]
    assert metrics.counters()["feedback_events{outcome=ignored,source=helpful}"] == 1
    (letter,) = [letter for letter in dead if letter.offset == 0]
    assert split_otlp(letter.value) == [letter.value] and b'"3"' in letter.value, "one event, to be delivered again"


def test_a_message_of_very_many_records_is_one_dead_letter() -> None:
    assert len(split_otlp(emitted(*[{}] * otel.MAX_RECORDS))) == otel.MAX_RECORDS
    flood = emitted(*[{}] * (otel.MAX_RECORDS + 1))
    assert split_otlp(flood) == [flood]
