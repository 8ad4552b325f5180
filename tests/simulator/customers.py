"""Customers of the gateways, the HTTP wire to them, and traffic from outside: tasks, demonstrations, events, foreign bytes.

A customer sends a refused or broken request again, to any gateway that listens. Replies are the independent side of the ledger:
an answer is recorded unless its gateway was killed, and accepted feedback is in the log. The wire feeds the real server's
protocol with bytes, in the simulated process's time: one connection per request, reset when the process dies."""

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np

from actors.gateway.access.keys import create_key
from infra.log.blobs import deposit
from infra.log.log import Log
from infra.store.seal import SECRET
from infra.store.store import Store
from schemas import Block, Experience, Message, Span, Task, make_experience
from schemas.ids import answer_id, experience_id, keyed_session
from schemas.topics import EXPERIENCES, EXPERTS, FEEDBACK, TASKSET_RAW
from streams.config import FEEDBACK_PATH
from tests.simulator.faults import BOMB, JUNK
from tests.simulator.scenario import ANSWER_TOKENS, EVENTS, LIVE_S, SUITE, TOKEN_S, WINDOW_S, Scenario
from tests.simulator.virtual_loop import Process, VirtualLoop
from tests.simulator.watch import RunWatch


class ClientReply:
    def __init__(self, data: bytes, seconds: float) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1])
        self.seconds = seconds


class Wire:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self._open: dict[Process, list[Connection]] = {}

    def listeners(self) -> list[Process]:
        """Processes that take connections, stalled ones too."""
        return [item for item, server in self.loop.servers.items() if server.is_open and not item.is_dead]

    async def ask(self, process: Process, path: str, body: bytes, headers: dict[str, str]) -> ClientReply:
        """POST to a process. Raises ConnectionError where it dies, or does not listen any more."""
        fields = {"host": "gateway", "connection": "close", "content-length": str(len(body)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        server = self.loop.servers[process]
        if process.is_dead or not server.is_open:
            raise ConnectionRefusedError(process.name)
        connection = Connection(self.loop, process, server.factory)
        self._open.setdefault(process, []).append(connection)
        begin_s = self.loop.time()
        try:
            connection.begin(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
            return ClientReply(await connection.answer, self.loop.time() - begin_s)
        finally:
            self._open[process].remove(connection)

    def reset(self, process: Process) -> None:
        """The process is dead."""
        for connection in self._open.get(process, ()):
            if not connection.answer.done():
                connection.answer.set_exception(ConnectionResetError(process.name))


class Connection(asyncio.Transport):
    """The server's end of one connection. answer: all it wrote, once it has closed."""

    def __init__(self, loop: VirtualLoop, process: Process, factory: Callable[[], Any]) -> None:
        super().__init__()
        self.answer: asyncio.Future[bytes] = loop.create_future()
        self._loop = loop
        self._process = process
        self._factory = factory
        self._protocol: Any = None
        self._written = bytearray()
        self._is_closing = False

    def begin(self, request: bytes) -> None:
        """Connect and send, in the server's own process."""
        self._loop.call_soon(self._arrive, request, context=self._process.context)

    def _arrive(self, request: bytes) -> None:
        self._protocol = self._factory()
        self._protocol.connection_made(self)
        self._protocol.data_received(request)

    def write(self, data: Any) -> None:
        self._written += data

    def get_write_buffer_size(self) -> int:
        """Nothing: the peer reads at once."""
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._loop.call_soon(self._protocol.connection_lost, None, context=self._process.context)
        if not self.answer.done():
            self.answer.set_result(bytes(self._written))

    def abort(self) -> None:
        self.close()

    def pause_reading(self) -> None:
        """The request is in already."""

    def resume_reading(self) -> None:
        """The request is in already."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol


class CustomerEvent(msgspec.Struct, frozen=True, order=True):
    """One event a customer sends. at_s: after the run began."""

    at_s: float
    ref: str
    id: str
    value: float
    rater: str


class CustomerTraffic:
    """The customers of one seed. store: where a stranger puts the data that a record of theirs claims."""

    def __init__(self, scenario: Scenario, log: Log, store: Store) -> None:
        self.store = store
        self.scenario = scenario
        self.log = log
        self.random = Random(f"traffic/{scenario.seed}")
        self._count = 0

    async def load(self) -> None:
        """Tasks and demonstrations."""
        scenario = self.scenario
        for number in range(scenario.num_tasks):
            question = Message(role="user", content=f"{number}?{'x' * (number % 3)}")
            await self.log.publish(TASKSET_RAW, Task(id=f"task-{number}", messages=(question,), answer="a"))
        for number in range(scenario.num_suite):
            question = Message(role="user", content=f"{SUITE} {number}")
            await self.log.publish(TASKSET_RAW, Task(id=f"{SUITE}-{number}", messages=(question,), split=SUITE))
        for number in range(scenario.num_experts):
            await self.log.publish(EXPERTS, Block((demonstration(number),)))

    async def run(self) -> None:
        """Customers come, talk and go."""
        begin_s = asyncio.get_running_loop().time()
        answers = [(self.random.random() * LIVE_S, number) for number in range(self.scenario.num_live)]
        said = sorted(event for at_s, number in answers for event in self._opinions(at_s, number))
        junk = [(self.random.random() * LIVE_S, data) for data in self.random.sample(JUNK, 2)]
        junk.append((self.random.random() * LIVE_S, deposit(self.store, BOMB, day=0)))
        plan: list[tuple[float, int, object]] = [(at_s, 0, answer(number)) for at_s, number in answers]
        plan += [(word.at_s, 1, word) for word in said]
        plan += [(at_s, 2, data) for at_s, data in junk]
        for at_s, _, what in sorted(plan, key=lambda entry: entry[:2]):
            await asyncio.sleep(max(0.0, begin_s + at_s - asyncio.get_running_loop().time()))
            await self._send(what)

    async def _send(self, what: object) -> None:
        times = 2 if self.random.random() < 0.15 else 1
        for _ in range(times):
            if isinstance(what, Experience):
                await self.log.publish(EXPERIENCES, Block((what,)))
            elif isinstance(what, CustomerEvent):
                event = {"ref": what.ref, "id": what.id, "value": what.value, "rater": what.rater}
                await self.log.bus.send(EVENTS, json.dumps(event).encode(), key=what.ref.encode())
            else:
                assert isinstance(what, bytes)
                for topic in (self.log.name(EXPERIENCES), self.log.name(FEEDBACK), EVENTS):
                    await self.log.bus.send(topic, what, key=b"junk")

    def _opinions(self, at_s: float, number: int) -> list[CustomerEvent]:
        ref = answer_id(live_id(number))
        kinds = self.random.sample(("early", "soon", "revised", "late", "unknown", "second"), self.random.randint(0, 3))
        delays = {
            "early": -1.5 * self.random.random(),
            "soon": 0.2 + self.random.random() * WINDOW_S,
            "revised": WINDOW_S * (0.5 + self.random.random()),
            "late": WINDOW_S * (1.2 + self.random.random()),
            "unknown": self.random.random(),
            "second": 2 * WINDOW_S * self.random.random(),
        }
        return [
            CustomerEvent(
                at_s=max(0.0, at_s + delays[kind]),
                ref=answer_id(live_id(1000 + number)) if kind == "unknown" else ref,
                id=f"{number}-{kind}",
                value=self._value(),
                rater="second" if kind == "second" else "customer",
            )
            for kind in sorted(kinds)
        ]

    def _value(self) -> float:
        """A value nobody else said, so that it tells where it came from."""
        self._count += 1
        return self._count / 1024


def live_id(number: int) -> str:
    """Id of a customer's answer."""
    return experience_id(f"live-{number}.0", 0, 0)


def answer(number: int) -> Experience:
    return make_experience(
        tokens=[1 + number % 7, 2, 3 + number % 5, 1 + number % 3], logprobs=np.full(2, -0.5, np.float32),
        messages=(Message(role="user", content="q"), Message(role="assistant", content=f"a{number}")),
        id=live_id(number), group=f"live-{number}.0", episode=0, group_size=1, lane="live", origin="gateway",
        spans=(Span(2, 4, 0),),
    )  # fmt: skip


def demonstration(number: int) -> Experience:
    """A worked answer."""
    return make_experience(
        tokens=[1 + number, 2, 5, 0], logprobs=np.zeros(2, np.float32),
        messages=(Message(role="user", content="q"), Message(role="assistant", content=f"d{number}")),
        id=experience_id(f"expert-{number}.0", 0, 0), group=f"expert-{number}.0", episode=0, group_size=1,
        lane="expert", spans=(Span(2, 4, -1, ratio=False),),
    )  # fmt: skip


TENANT = "acme"
APP_SECRET = b"the same in every run, so that all names are"
CHAT = "/v1/chat/completions"
SERVE_S = 0.1  # beside the sampling: hops to threads and back
PAUSE_S = 0.2


class Customers:
    """The customers of one seed. answered: answers, with the gateway of each. times: of their requests, and of their arrival.
    texts: of the answers. accepted: ids of feedback that a gateway has taken. private: sessions that must not be recorded.
    stood_still: until when each process was stopped last.
    """

    def __init__(self, scenario: Scenario, store: Store, wire: Wire, watch: RunWatch) -> None:
        self.scenario = scenario
        self.wire = wire
        self.watch = watch
        self.random = Random(f"customers/{scenario.seed}")
        self.answered: dict[str, Process] = {}
        self.times: dict[str, tuple[float, float]] = {}
        self.texts: dict[str, str] = {}
        self.accepted: set[str] = set()
        self.private: set[str] = set()
        self.stood_still: dict[Process, float] = {}
        store.put(SECRET, APP_SECRET)
        self._keys = {
            train: create_key(store, tenant=TENANT, scopes=("serve", "feedback"), train=train, rpm=0, tpm=0)[1]
            for train in ("yes", "no")
        }
        self._said = 0

    async def run(self) -> None:
        """Run all customers until the last visit ends."""
        async with asyncio.TaskGroup() as everybody:
            for number in range(self.scenario.num_customers):
                everybody.create_task(self._visit(number, self.random.random() * LIVE_S))

    async def _visit(self, number: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        is_private = self.random.random() < 0.2
        key = self._keys["no" if is_private else "yes"]
        session = f"session-{number}"
        if is_private:
            self.private.add(keyed_session(APP_SECRET, TENANT, session, "no"))
        messages: list[dict[str, str]] = []
        for turn in range(self.random.choice((1, 1, 2))):
            messages.append({"role": "user", "content": f"{number} {turn}"})
            body = {"model": "any", "messages": messages, "max_tokens": ANSWER_TOKENS}
            reply, process = await self._asked(CHAT, body, key, {"x-session-id": session})
            told = json.loads(reply.body)
            text = told["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": text})
            if not is_private:
                now_s = self.wire.loop.time()
                self.times[told["id"].removeprefix("hr-")] = (now_s - reply.seconds, now_s)
                self.answered[told["id"].removeprefix("hr-")] = process
                self.texts[told["id"].removeprefix("hr-")] = text
            await self._judge(told["id"], key, is_private)

    async def _judge(self, answer: str, key: str, is_private: bool) -> None:
        """Say nothing, something, or something else later."""
        for number in range(self.random.choice((0, 1, 1, 2))):
            await asyncio.sleep(self.random.random() * WINDOW_S * (0.5 + 1.5 * number))
            self._said += 1
            said = {"answer_id": answer, "id": f"said-{self._said}", "value": self._said / 1024, "rater": "customer"}
            taken, _ = await self._asked(FEEDBACK_PATH, said, key, {})
            if not is_private:
                self.accepted.add(json.loads(taken.body)["id"])

    async def _asked(self, path: str, body: object, key: str, headers: dict[str, str]) -> tuple[ClientReply, Process]:
        """Ask until it is taken; I5 holds each time."""
        data = json.dumps(body).encode()
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
        while True:
            if not (listeners := self.wire.listeners()):
                await asyncio.sleep(PAUSE_S)
                continue
            process = self.random.choice(listeners)
            asked_s = self.wire.loop.time()
            try:
                reply = await self.wire.ask(process, path, data, headers)
            except ConnectionError:
                await asyncio.sleep(PAUSE_S)
                continue
            self._check(process, path, reply, asked_s)
            if reply.status in (200, 202):
                return reply, process
            await asyncio.sleep(PAUSE_S)

    def _check(self, process: Process, path: str, reply: ClientReply, asked_s: float) -> None:
        self.watch.note(f"{process.name} answers {path} with {reply.status} after {reply.seconds:.4f} s")
        self.watch.seen[f"{path} {reply.status}"] += 1
        allowed = (200, 401) if path == CHAT else (202, 401, 503)  # 401: the keys were not read yet
        if reply.status not in allowed:
            self.watch.complain(
                "I5 serving", f"{process.name} answers {path} with {reply.status}: {reply.body[:200]!r}"
            )
        limit_s = ANSWER_TOKENS * TOKEN_S + SERVE_S
        if path == CHAT and reply.seconds > limit_s and self.stood_still.get(process, 0.0) <= asked_s:
            took = f"{reply.seconds:.3f} s, expected at most {limit_s:.3f}"
            self.watch.complain("I5 serving waits for nothing", f"{process.name} answered after {took}")
