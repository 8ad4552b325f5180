"""What the gateway tests share: a tokenizer of bytes, a log that can go away, and a gateway on a real port."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

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
from schemas.ids import answer_id, experience_id, request_group
from schemas.names import keyed_session
from schemas.topics import EXPERIENCES, FEEDBACK
from tests.actors.rig import until
from tests.names import secret_store
from tests.role import role_of

EOS = 256
VOCABULARY = 260
LIMITS = GatewayLimits()


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
        blocks = [message.value async for message in self.log.read_all(EXPERIENCES)]
        return [one for block in blocks if isinstance(block, Block) for one in block.experiences]

    async def received(self, count: int = 0) -> list[Received]:
        """What lies in the log, once there is so much: the outbox brings it after the answer 202."""
        async with asyncio.timeout(60):
            while True:
                found = [m.value async for m in self.log.read_all(FEEDBACK) if isinstance(m.value, Received)]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.01)

    async def recorded(self, count: int) -> list[Experience]:
        """The experiences in the order of their requests, once there are so many: partitions come in any order."""
        found: list[Experience] = []
        async with asyncio.timeout(60):
            async for message in self.log.read_all(EXPERIENCES, until_end=False):
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
