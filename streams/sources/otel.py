"""Feedback from OpenTelemetry events `gen_ai.evaluation.result`, in a topic that a collector writes.

The collector's Kafka exporter writes many log records into a message (encoding `otlp_json`); each record is an event. Other
records are ignored and counted. OpenTelemetry events have no id: a hash of content, answer and time is the id.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from infra.chain.processor import feedback
from schemas import Feedback

EVENT = "gen_ai.evaluation.result"
MAX_RECORDS = 10_000  # of one message
IDENTITY = ("log.record.uid", "event.id")


@feedback(version=1)
def evaluation_result(
    record: dict[str, Any],
    *,
    name: str,
    lowest: float = 0.0,
    highest: float = 1.0,
    labels: dict[str, float] | None = None,
) -> Feedback | None:
    """Evaluation by OpenTelemetry's semantic conventions, on the answer that `gen_ai.response.id` names.

    name: Name of the evaluation (`gen_ai.evaluation.name`); the source ignores others. lowest: Score value that becomes 0.
    highest: Score value that becomes 1. labels: Values of evaluations that have only a label; a label that is missing here
    stays a label.
    """
    if "resourceLogs" in record:
        raise ValueError("resourceLogs: expected log records of OTLP as JSON")
    attributes = read_attributes(record)
    event = record.get("eventName") or attributes.get("event.name")
    if event != EVENT or attributes.get("gen_ai.evaluation.name") != name:
        return None
    value, label = attributes.get("gen_ai.evaluation.score.value"), attributes.get("gen_ai.evaluation.score.label")
    said: dict[str, Any] = {}
    if isinstance(value, int | float) and not isinstance(value, bool):
        said = {"value": (value - lowest) / (highest - lowest)}
    elif label in (labels or {}):
        said = {"value": (labels or {})[label]}
    elif label:
        said = {"type": "label", "text": label}
    else:
        raise ValueError("gen_ai.evaluation.score: expected a value or a label")
    return Feedback(ref=attributes["gen_ai.response.id"], id=identity(record, attributes), **said)


def split_otlp(value: bytes) -> list[bytes]:
    """Return the log records of an OTLP message, each as JSON. Any other message, and a message of more than MAX_RECORDS log
    records, stays whole, so that its function refuses it and it becomes one dead letter.
    """
    try:
        message = msgspec.json.decode(value, type=_Logs)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [value]
    records = [record for of in message.resource_logs for scope in of.scope_logs for record in scope.log_records]
    return [bytes(record) for record in records] if len(records) <= MAX_RECORDS else [value]


def read_attributes(record: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in record.get("attributes") or ():
        kind, value = next(iter(attribute["value"].items()), ("", 0))
        if kind == "intValue":  # a text, since 64 bits do not fit a number of JSON
            value = int(value)
        if kind in ("stringValue", "intValue", "doubleValue", "boolValue"):
            found[attribute["key"]] = value
    return found


def identity(record: Mapping[str, Any], attributes: Mapping[str, Any]) -> str:
    if given := next((attributes[name] for name in IDENTITY if isinstance(attributes.get(name), str)), ""):
        return str(given)
    when = record.get("timeUnixNano") or record.get("observedTimeUnixNano")
    said = [when, record.get("traceId"), record.get("spanId")]
    return hashlib.blake2b(msgspec.json.encode([said, dict(sorted(attributes.items()))]), digest_size=16).hexdigest()


class _Scope(msgspec.Struct, rename="camel"):
    log_records: list[msgspec.Raw] = []


class _Resource(msgspec.Struct, rename="camel"):
    scope_logs: list[_Scope] = []


class _Logs(msgspec.Struct, rename="camel"):
    resource_logs: list[_Resource]
