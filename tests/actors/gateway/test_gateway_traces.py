"""Spans of answers, read by a receiver of OTLP: what they say, what they never say, and that no answer waits for them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from actors.gateway.config import TracesConfig
from infra.observe.alarms import STILL
from tests.actors.gateway.gateway_rig import engine, says, serving
from tests.http_endpoint import http_endpoint


class TraceReceiver:
    """What a receiver of OTLP/HTTP got. status: what it answers with."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.bodies = b""
        self.url = ""
        self.status = 200

    def take(self, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        kind = {name.lower(): value for name, value in headers.items()}["content-type"]
        assert path == "/v1/traces" and kind == "application/x-protobuf"
        request = ExportTraceServiceRequest.FromString(body)
        if self.status == 200:
            self.bodies += body
            self.spans += [s for of in request.resource_spans for scope in of.scope_spans for s in scope.spans]
        return self.status, ExportTraceServiceResponse().SerializeToString()


@pytest.fixture
def collector() -> Iterator[TraceReceiver]:
    found = TraceReceiver()
    with http_endpoint(found.take) as url:
        found.url = f"{url}/v1/traces"
        yield found


def attributes(span: Any) -> dict[str, Any]:
    kinds = {"string_value": str, "int_value": int, "double_value": float}
    found: dict[str, Any] = {}
    for one in span.attributes:
        if one.value.HasField("array_value"):
            found[one.key] = [item.string_value or item.int_value for item in one.value.array_value.values]
        else:
            kind = one.value.WhichOneof("value")
            found[one.key] = kinds[kind](getattr(one.value, kind))
    return found


async def test_each_answer_is_one_span_with_its_id_tokens_version_and_end(
    collector: TraceReceiver, tmp_path: Path
) -> None:
    ids, finishes = [], []
    traces = TracesConfig(endpoint=collector.url)
    async with serving(tmp_path, engine(says("Hello.")), traces=traces) as served:
        client = served.client(served.key(train="no"))
        await served.keys_read()
        messages: Any = [{"role": "user", "content": "my secret question"}]
        whole = await client.chat.completions.create(
            model="main", messages=messages, temperature=0.5, user="ann", extra_headers={"x-session-id": "s"}
        )
        cut = await client.chat.completions.create(model="main", messages=messages, max_tokens=2, n=2)
        async for chunk in await client.chat.completions.create(model="main", messages=messages, stream=True):
            streamed = chunk.id
        plain = await client.completions.create(model="main", prompt="once")
        ids = [whole.id, cut.id, streamed, plain.id]
        finishes = [str(one.choices[0].finish_reason) for one in (whole, cut, plain)]
    told = {attributes(span)["gen_ai.response.id"]: span for span in collector.spans}
    assert len(told) == len(collector.spans) == 5 and set(ids) <= set(told)
    whole, cut, _, plain = (attributes(told[one]) for one in ids)
    assert told[ids[0]].name == "chat main" and told[ids[3]].name == "text_completion main"
    assert whole["gen_ai.usage.output_tokens"] == 7 and cut["gen_ai.usage.output_tokens"] == 2
    assert whole["gen_ai.usage.input_tokens"] == 1 + len("<user>my secret question<assistant>")
    assert [one["gen_ai.response.finish_reasons"] for one in (whole, cut, plain)] == [[one] for one in finishes]
    assert whole["gen_ai.request.temperature"] == 0.5 and whole["headrace.policy.version"] == 0
    assert told[ids[0]].end_time_unix_nano > told[ids[0]].start_time_unix_nano > 1_700_000_000 * 10**9
    others = [span for span in collector.spans if span.trace_id == told[ids[1]].trace_id]
    assert len(others) == 2 and len({span.span_id for span in others}) == 2, "answers to one request share a trace"
    for secret in (b"secret question", b"Hello", b"ann", b"once"):
        assert secret not in collector.bodies


@pytest.mark.parametrize("away", [True, False])
async def test_no_answer_waits_for_a_collector_and_what_is_not_delivered_is_counted(
    collector: TraceReceiver, tmp_path: Path, away: bool
) -> None:
    collector.status = 400
    endpoint = "http://127.0.0.1:9/v1/traces" if away else collector.url

    async with serving(tmp_path, traces=TracesConfig(endpoint=endpoint, queue=2)) as served:
        client = await served.opened()
        for _ in range(8):
            await client.completions.create(model="main", prompt="x")
        metrics = served.metrics
    counters = metrics.counters()
    dropped = {name: value for name, value in counters.items() if name.startswith("spans")}
    assert sum(dropped.values()) == 8 and set(dropped) <= {
        "spans_dropped{reason=queue is full}", "spans_dropped{reason=not delivered}",
    }  # fmt: skip
    assert "spans_dropped" in STILL


def test_without_the_setting_nothing_of_opentelemetry_is_loaded_and_no_thread_runs(tmp_path: Path) -> None:
    script = """
import sys, threading
from actors.gateway.recording.traces import open_spans
import actors.gateway.serve
from infra.observe.metrics import Metrics
assert open_spans(None, Metrics("serve")) is None
print([name for name in sys.modules if name.startswith("opentelemetry")], threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 1"
