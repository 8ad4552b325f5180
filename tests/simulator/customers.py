"""Customers of the gateways: conversations over HTTP, what they say of answers, and what they were promised.

A customer is honest: what was refused or broke off is sent again, to whichever gateway listens. What a customer was told
is the independent side of the ledger: an answer that came is recorded unless its gateway was killed, feedback that was
accepted is in the log, and nobody waits for training.
"""

import asyncio
import json
from random import Random

from actors.gateway.access.keys import create_key
from infra.store.seal import SECRET
from infra.store.store import Store
from schemas.names import keyed_session
from streams.config import FEEDBACK_PATH
from tests.simulator.scenario import ANSWER_TOKENS, LIVE_S, TOKEN_S, WINDOW_S, Scenario
from tests.simulator.virtual_loop import Process
from tests.simulator.watch import RunWatch
from tests.simulator.wire import ClientReply, Wire

TENANT = "acme"
APP_SECRET = b"the same in every run, so that all names are"
CHAT = "/v1/chat/completions"
SERVE_S = 0.1  # beside the sampling: hops to threads and back
PAUSE_S = 0.2


class Customers:
    """The customers of one seed. answered: answers that came, with who gave them. times: when they were asked for, and when
    they came. texts: what they said.

    accepted: ids of feedback that a gateway has taken. private: sessions that must not be recorded.
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
        """Everybody, until the last has what they came for."""
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
