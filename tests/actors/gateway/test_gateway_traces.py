"""Spans of answers, read by a receiver of OTLP: what they say, what they never say, and that no answer waits for them."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from openai import APIStatusError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from actors.config import REFUSALS
from actors.engines.engine import EngineStopped
from actors.gateway.config import TracesConfig
from actors.gateway.recording.tallies import MAX_CLIENTS, Tallies
from infra.log.memory import MemoryBus
from infra.observe.alarms import STILL
from schemas import Answered, Client, Progress
from schemas.ids import TAG_LETTERS
from schemas.topics import REPORTS
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


TENANT = "its keyed name"


def of_a_tenant(answered: tuple[Answered, ...]) -> tuple[Answered, ...]:
    """A report in which each client is named as ids name a tenant."""
    assert all(len(client.client) == TAG_LETTERS for told in answered for client in told.clients)
    return tuple(
        replace(told, clients=tuple(replace(client, client=TENANT) for client in told.clients)) for told in answered
    )


def test_a_refusal_is_one_at_the_beginning_of_an_answer() -> None:
    tallies = Tallies(REFUSALS)
    for number, text in enumerate(("I'm sorry, no.", "i cannot help with that", "Sure.", "x" * 200 + " I'm sorry")):
        tallies.answered(3, -1, [text], "a", f"s{number}")
    clients = (Client(client="a", sessions=4, refused=2),)
    assert tallies.report() == (Answered(version=3, answers=4, refused=2, clients=clients),)
    without = Tallies(())
    without.answered(3, -1, ["I'm sorry"], "", "")
    assert without.report() == (Answered(version=3, answers=1, clients=(Client(client="", sessions=1),)),)


def test_of_one_session_one_answer_counts_for_its_client_and_clients_are_bounded() -> None:
    tallies = Tallies(REFUSALS)
    for _ in range(45):
        tallies.answered(3, -1, ["I'm sorry, no."], "a", "s")
    assert tallies.report()[0].refused == 45 and tallies.report()[0].clients == (
        Client(client="a", sessions=1, refused=1),
    )
    for number in range(100):
        tallies.answered(3, -1, ["Sure."], f"c{number}", "s")
    clients = tallies.report()[0].clients
    assert len(clients) == MAX_CLIENTS + 1 and clients[-1] == Client(client="", sessions=100 - MAX_CLIENTS + 1)


async def test_answers_that_fail_or_refuse_are_told_of_everybody_also_without_consent(tmp_path: Path) -> None:
    said = iter(["Hello.", "I'm sorry, I can't.", None, "Bye."])

    def script(prompt: tuple[int, ...]) -> list[int]:
        text = next(said)
        if text is None:
            raise RuntimeError("the kernel broke")
        return [*text.encode(), 256]

    async with serving(tmp_path, engine(script), train_on="nothing", report_s=0.05) as served:
        key = served.key(train="no")
        client = served.client(key)
        await served.keys_read()
        for fails in (False, False, True, False):
            asking = client.completions.create(model="main", prompt="Hi")
            if fails:
                with pytest.raises(APIStatusError) as error:
                    await asking
                assert error.value.status_code == 500
            else:
                await asking
        with pytest.raises(APIStatusError):
            await client.completions.create(model="main", prompt="Hi" * 3000)  # too long: not the engine's fault
        clients = (Client(client=TENANT, sessions=4, failed=1, refused=1),)
        wanted = (Answered(version=0, answers=4, failed=1, refused=1, clients=clients),)
        async with asyncio.timeout(60):
            async for message in served.log.read_all(REPORTS, until_end=False):
                if isinstance(message.value, Progress) and of_a_tenant(message.value.answered) == wanted:
                    break


async def test_what_failed_with_an_engine_that_died_is_told_before_the_gateway_ends(tmp_path: Path) -> None:
    def script(prompt: tuple[int, ...]) -> list[int]:
        raise EngineStopped("it is gone")

    bus = MemoryBus()
    with pytest.raises(EngineStopped):
        async with serving(tmp_path, engine(script), bus=bus, report_s=60.0) as served:
            async with served.http(await served.new_key()) as http:
                answer = await http.post("/v1/completions", json={"model": "main", "prompt": "Hi"})
            assert answer.status_code == 503
    reports = [m.value async for m in served.log.read_all(REPORTS) if isinstance(m.value, Progress)]
    clients = (Client(client=TENANT, sessions=1, failed=1),)
    assert of_a_tenant(reports[-1].answered) == (Answered(version=0, answers=1, failed=1, clients=clients),)
