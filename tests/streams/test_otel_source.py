"""Evaluations as OpenTelemetry events: what its own SDK emits, as a collector writes it to a topic, becomes feedback."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry._logs import LogRecord
from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from infra.observe.metrics import Metrics
from infra.settings.config import decode
from schemas import Feedback
from schemas.errors import ConfigError
from streams.config import StreamsConfig
from streams.sources import otel
from streams.sources.otel import EVENT, evaluation_result, split_otlp
from streams.sources.source import build_sources, run_sources
from tests.streams.test_source import opened, stored, until

REF = "hr-a1b2.0-3-0"


def emitted(*events: Mapping[str, Any], name: str = EVENT) -> bytes:
    """What a collector writes of events that OpenTelemetry's SDK emits: one message."""
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


def read(attributes: Mapping[str, Any], *, event: str = EVENT, **options: Any) -> Feedback | None:
    (record,) = split_otlp(emitted(attributes, name=event))
    found = evaluation_result(json.loads(record), name="helpful", **options)
    assert found is None or isinstance(found, Feedback)
    return found


def test_an_evaluation_becomes_feedback_on_the_answer_that_its_response_id_names() -> None:
    plain = read(result(0.75))
    assert plain is not None and (plain.ref, plain.type, plain.value) == (REF, "value", 0.75)
    stars = read(result(4), lowest=1.0, highest=5.0)
    assert stars is not None and stars.value == 0.75
    labelled = result(**{"gen_ai.evaluation.score.label": "pass"})
    valued, label = read(labelled, labels={"pass": 1.0}), read(labelled)
    assert valued is not None and valued.value == 1.0
    assert label is not None and (label.type, label.text) == ("label", "pass")
    named = read(result(1.0, **{"log.record.uid": "e-17"}))
    assert named is not None and named.id == "e-17"


def test_other_events_and_other_evaluations_are_ignored() -> None:
    assert read(result(1.0), event="gen_ai.client.inference.operation.details") is None
    assert read({**result(1.0), "gen_ai.evaluation.name": "brief"}) is None
    assert evaluation_result({"body": {"stringValue": "a line of a log"}}, name="helpful") is None


def test_an_event_has_the_same_id_however_often_it_is_delivered_and_others_have_others() -> None:
    first, again, other = (read(result(value)) for value in (1.0, 1.0, 0.5))
    assert first is not None and again is not None and other is not None
    assert first.id == again.id != other.id


@settings(deadline=None)
@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.text(), lambda of: st.dictionaries(st.text(), of)).map(repr)
)
def test_whatever_is_no_message_of_otlp_is_left_as_it_is(value: bytes | str) -> None:
    found = value.encode("utf-8", "replace") if isinstance(value, str) else value
    assert split_otlp(found) == [found]


def test_a_topic_that_a_collector_writes_is_read_event_by_event(tmp_path: Path) -> None:
    table = {
        "name": "helpful",
        "use": "streams.sources.otel:evaluation_result",
        "options": {"name": "helpful"},
        "from": {"topic": "otel.logs", "otlp": True},
    }
    sources = build_sources(decode({"feedback": [table]}, StreamsConfig, "bot.toml").feedback, tmp_path)

    def uid(number: int) -> dict[str, Any]:
        return {"log.record.uid": str(number)}

    async def scene() -> None:
        log, metrics = await opened(), Metrics("process")
        await log.bus.create_topic("otel.logs", 1, {})
        running = asyncio.create_task(run_sources(sources, log, metrics, tmp_path))
        broken = result(7.0, **uid(3))
        mine = [result(1.0, **uid(1)), broken, {"gen_ai.evaluation.name": "brief"}, result(0.5, **uid(2))]
        await log.bus.send("otel.logs", emitted(*mine), key=b"")
        for wrong in (b'{"resourceLogs": 7}', b"no JSON"):
            await log.bus.send("otel.logs", wrong, key=b"")
        await log.bus.send("otel.logs", emitted(result(0.25, **uid(4))), key=b"")
        await until(log, ["1", "2", "4"])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        dead = (await stored(log))[1]
        reasons = sorted((one.offset, one.reason) for one in dead)
        assert reasons == [(0, "event invalid"), (1, "event failed"), (2, "event invalid")]
        assert metrics.counters()["feedback_events{outcome=ignored,source=helpful}"] == 1
        (letter,) = [one for one in dead if one.offset == 0]
        assert split_otlp(letter.value) == [letter.value] and b'"3"' in letter.value, "one event, to be delivered again"

    asyncio.run(scene())


def test_a_message_of_very_many_records_is_one_dead_letter() -> None:
    assert len(split_otlp(emitted(*[{}] * otel.MAX_RECORDS))) == otel.MAX_RECORDS
    flood = emitted(*[{}] * (otel.MAX_RECORDS + 1))
    assert split_otlp(flood) == [flood]


def test_otlp_is_of_a_topic() -> None:
    table = {"name": "a", "use": "a:b", "from": {"file": "e.jsonl", "otlp": True}}
    with pytest.raises(ConfigError, match="got otlp = true without topic"):
        decode({"feedback": [table]}, StreamsConfig, "bot.toml")
