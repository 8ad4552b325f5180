"""Shared parts of the gateway tests: a tokenizer of bytes, a log that can go away, a gateway, and clients of each API."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from actors.engines.engine import Engine
from actors.engines.scripted import ScriptedEngine
from actors.gateway.access.keys import Scope, Train, create_key
from actors.gateway.config import GatewayConfig, GatewayLimits, Webhook
from actors.gateway.serve import run_gateway
from infra.log.bus import Headers, RecordPosition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.writing import Writing
from infra.observe.metrics import Metrics
from infra.settings.config import Floor
from infra.store.seal import app_secret
from infra.store.store import Store
from schemas import Block, Experience, Received
from schemas.errors import BrokerUnavailable
from schemas.ids import answer_id, experience_id, keyed_session, request_group
from schemas.topics import EXPERIENCES, FEEDBACK
from tests.actors.rig import until
from tests.names import secret_store
from tests.role import role_of

EOS = 256
VOCABULARY = 260
LIMITS = GatewayLimits()
ASK: list[Any] = [{"role": "user", "content": "Hi"}]


class ByteTokenizer:
    """One token per byte of UTF-8, and an end token; a template that marks roles."""

    eos_ids = (EOS,)
    takes_tools = True
    takes_images = False
    writing = Writing()
    template: Mapping[str, Any] = {}
    wrapped = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def spell(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def encode_request(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        tokens = self.encode(json.dumps([*tools])) if tools else []
        for message in conversation:
            called = "".join(
                f"<tool_call>\n{json.dumps(c['function'])}\n</tool_call>" for c in message.get("tool_calls", ())
            )
            tokens += [*self.encode(f"<{message['role']}>{message['content']}{called}"), EOS]
        return [*tokens, *self.encode("<assistant>")]


class AwayBus(MemoryBus):
    """A broker that can be away: then nothing is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False

    async def start(self) -> None:
        self._check()

    async def send(
        self, topic: str, value: bytes, *, key: bytes, headers: Headers = (), partition: int | None = None
    ) -> RecordPosition:
        self._check()
        return await super().send(topic, value, key=key, headers=headers, partition=partition)

    def _check(self) -> None:
        if self.away:
            raise BrokerUnavailable("the broker is away")


def says(*texts: str) -> Any:
    """A script that answers with these texts in turn, the last one for ever, each ended."""
    left = list(texts)

    def script(prompt: tuple[int, ...]) -> list[int]:
        return [*(left.pop(0) if len(left) > 1 else left[0]).encode(), EOS]

    return script


def engine(script: Any = None, **options: Any) -> ScriptedEngine:
    return ScriptedEngine(num_vocabulary=VOCABULARY, max_model_len=4096, script=script, **options)


class RunningGateway:
    """A running gateway."""

    def __init__(self, bus: MemoryBus, store: Store, metrics: Metrics, folder: Path, config: GatewayConfig) -> None:
        self.bus, self.store, self.metrics, self.folder, self.config = bus, store, metrics, folder, config
        self.log = Log(bus, "test", store=store)
        self.port = 0
        self.engine: Engine
        self.stop = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def key(
        self, tenant: str = "acme", scopes: tuple[Scope, ...] = ("serve", "feedback"), train: Train = "yes", **more: Any
    ) -> str:
        return create_key(self.store, tenant=tenant, scopes=scopes, train=train, **{"rpm": 0, "tpm": 0, **more})[1]

    def answer(self, tenant: str = "acme", session: str = "s", train: Train = "yes") -> str:
        """The id of an answer as this app gives them."""
        name = keyed_session(app_secret(self.store), tenant, session, train)
        return answer_id(experience_id(request_group(name, 7, 3), 0, 0))

    async def new_key(self, tenant: str = "acme", **more: Any) -> str:
        """A key that the gateway knows."""
        key = self.key(tenant, **more)
        await self.keys_read()
        return key

    async def opened(self, tenant: str = "acme", **more: Any) -> AsyncOpenAI:
        """A client with a key that the gateway knows."""
        return self.client(await self.new_key(tenant, **more))

    async def keys_read(self) -> None:
        """Until the gateway knows the keys made and revoked so far; a reading under way may have begun before them."""
        target = self.count("keys_read") + 2
        await until(lambda: self.count("keys_read") >= target, seconds=60.0)

    def client(self, key: str, **options: Any) -> AsyncOpenAI:
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(api_key=key, base_url=f"{self.url}/v1", max_retries=0, http_client=http, **options)

    def http(self, key: str = "") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # It speaks without TLS: certificates that are not read cost no time.
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, trust_env=False, verify=False)

    async def experiences(self) -> list[Experience]:
        blocks = [message.value async for message in self.log.scan(EXPERIENCES)]
        return [one for block in blocks if isinstance(block, Block) for one in block.experiences]

    async def received(self, count: int = 0) -> list[Received]:
        """The records in the log, once it has this many: the outbox writes them after the answer 202."""
        async with asyncio.timeout(60):
            while True:
                found = [m.value async for m in self.log.scan(FEEDBACK) if isinstance(m.value, Received)]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.01)

    async def recorded(self, count: int) -> list[Experience]:
        """The experiences in the order of their requests, once there are so many: partitions come in any order."""
        found: list[Experience] = []
        async with asyncio.timeout(60):
            async for message in self.log.tail(EXPERIENCES, "beginning"):
                found += message.value.experiences if isinstance(message.value, Block) else ()
                if len(found) >= count:
                    break
        return sorted(found, key=lambda one: (int(one.group.rpartition("-")[2]), one.episode))

    def count(self, name: str) -> float:
        return sum(value for key, value in self.metrics.counters().items() if key.partition("{")[0] == name)


@asynccontextmanager
async def serving(
    folder: Path,
    made: Engine | None = None,
    *,
    bus: MemoryBus | None = None,
    store: Store | None = None,
    tokenizer: Any = None,
    webhooks: Sequence[Webhook] = (),
    limits: GatewayLimits = LIMITS,
    topics: bool = True,
    reads_feedback: bool = True,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway for the length of a block; one that dies in it fails the test. Keys must be made before, or reloaded."""
    fields = {"listen": "127.0.0.1:0", "train_on": "consented", "limits": limits, "send_s": 1.0, "keys_reload_s": 0.01}
    config = GatewayConfig(**{**fields, **settings})
    served = RunningGateway(bus or MemoryBus(), store or secret_store(), Metrics("serve"), folder, config)
    if topics:
        await served.log.create_topics(partitions=2, keep_ms=3_600_000)
    served.engine = made or engine(says("Hello."))
    up = asyncio.Event()

    def listening(port: int) -> None:
        served.port = port
        up.set()

    running = asyncio.create_task(
        run_gateway(
            role_of(
                "serve",
                Floor(app="test", folder=folder),
                served.log,
                served.store,
                metrics=served.metrics,
                stop=served.stop,
            ),
            config,
            served.engine,
            tokenizer or ByteTokenizer(),
            webhooks=webhooks,
            reads_feedback=reads_feedback,
            listening=listening,
        )
    )
    waiting = asyncio.create_task(up.wait())
    try:
        async with asyncio.timeout(60):
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield served
    finally:
        waiting.cancel()
        served.stop.set()
        await running


class Told(NamedTuple):
    """An answer as a client of any API reads it. turn: the part that the client sends back in its next request."""

    id: str
    thought: str
    said: str
    calls: list[tuple[str, str, Any]]  # id, name, arguments
    finish: str
    used: tuple[int, int]
    turn: list[Any]


PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: dict[str, Any] = {"name": "weather", "description": "How warm it is.", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CUT = {"length": "length", "max_tokens": "length", "incomplete": "length"}


async def ask_chat(
    served: RunningGateway, key: str, said: list[Any], *, stream: bool = False, tools: bool = False, **more: Any
) -> Told:
    """By openai's client: Chat Completions."""
    if tools:
        more["tools"] = [{"type": "function", "function": TOOL}]
    create = served.client(key).chat.completions.create
    if not stream:
        answer: Any = await create(model="m", messages=said, **more)
        (choice,) = answer.choices
        message, finish, usage = choice.message.model_dump(exclude_none=True), choice.finish_reason, answer.usage
    else:
        pieces: Any = await create(
            model="m", messages=said, stream=True, stream_options={"include_usage": True}, **more
        )
        message, finish, usage = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}, "", None
        async for piece in pieces:
            answer, usage = piece, piece.usage or usage
            for choice in piece.choices:
                delta, finish = choice.delta.model_dump(), choice.finish_reason or finish
                assert "\ufffd" not in (delta["content"] or "")
                message["content"] += delta["content"] or ""
                message["reasoning"] += delta.get("reasoning") or ""
                message["tool_calls"] += delta["tool_calls"] or []
    calls = [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())
    ]
    return Told(
        answer.id, message.get("reasoning", ""), message.get("content", ""), calls, CUT.get(finish, finish),
        (usage.prompt_tokens, usage.completion_tokens),
        [{name: value for name, value in message.items() if value}],
    )  # fmt: skip


async def ask_messages(
    served: RunningGateway, key: str, said: list[Any], *, stream: bool = False, tools: bool = False, **more: Any
) -> Told:
    """By anthropic's client: Messages."""
    from anthropic import AsyncAnthropic  # seconds of imports, which every worker would pay to collect the tests

    if tools:
        more["tools"] = [{"name": TOOL["name"], "input_schema": PARAMETERS}]
    fields = {"max_tokens": 200, **more}
    async with AsyncAnthropic(api_key=key, base_url=served.url, max_retries=0) as client:
        if stream:
            async with client.messages.stream(model="m", messages=said, **fields) as events:
                message: Any = await events.get_final_message()
        else:
            message = await client.messages.create(model="m", messages=said, **fields)
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return Told(
        message.id,
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        message.stop_sequence or CUT.get(message.stop_reason, message.stop_reason),
        (message.usage.input_tokens, message.usage.output_tokens),
        [{"role": "assistant", "content": blocks}],
    )


async def ask_responses(
    served: RunningGateway, key: str, said: list[Any], *, stream: bool = False, tools: bool = False, **more: Any
) -> Told:
    """By openai's client: Responses."""
    if tools:
        more["tools"] = [{"type": "function", **TOOL, "strict": False}]
    client = served.client(key)
    if stream:
        async with client.responses.stream(model="m", input=said, **more) as events:
            seen = [event async for event in events]
            assert [e.sequence_number for e in seen if hasattr(e, "sequence_number")] == list(range(len(seen)))
            response: Any = seen[-1].response  # type: ignore[union-attr]
    else:
        response = await client.responses.create(model="m", input=said, **more)
    items = [item.model_dump(exclude_none=True) for item in response.output]
    return Told(
        response.id,
        "".join(item["content"][0]["text"] for item in items if item["type"] == "reasoning"),
        "".join(item["content"][0]["text"] for item in items if item["type"] == "message"),
        [(i["call_id"], i["name"], json.loads(i["arguments"])) for i in items if i["type"] == "function_call"],
        CUT.get(response.status, response.status),
        (response.usage.input_tokens, response.usage.output_tokens),
        items,
    )


def result_turn(ask: Any, told: Told, text: str) -> Any:
    """The result of the answer's call, as the API takes it."""
    call = told.calls[0][0]
    if ask is ask_chat:
        return {"role": "tool", "tool_call_id": call, "content": text}
    if ask is ask_responses:
        return {"type": "function_call_output", "call_id": call, "output": text}
    result = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": text}]}
    return {"role": "user", "content": [result]}


APIS = (ask_chat, ask_messages, ask_responses)
