"""What comes from outside: tasks, demonstrations, customers with what they say later, and bytes that are no record.

The sender is an honest gateway: it repeats what was not confirmed, now and then it repeats what was. What it knows is
the independent side of the ledger.
"""

import asyncio
import json
from random import Random

import msgspec
import numpy as np

from infra.log.blobs import deposit
from infra.log.log import Log
from infra.store.store import Store
from schemas import Block, Experience, Message, Span, Task, make_experience
from schemas.ids import answer_id, experience_id
from schemas.topics import EXPERIENCES, EXPERTS, FEEDBACK, TASKSET_RAW
from tests.simulator.hostile import BOMB, JUNK
from tests.simulator.scenario import EVENTS, LIVE_S, SUITE, WINDOW_S, Scenario


class CustomerEvent(msgspec.Struct, frozen=True, order=True):
    """One event a customer sends. at_s: after the run began."""

    at_s: float
    ref: str
    id: str
    value: float
    rater: str


class CustomerTraffic:
    """The customers of one seed. store: where a stranger puts what a record of theirs claims."""

    def __init__(self, scenario: Scenario, log: Log, store: Store) -> None:
        self.store = store
        self.scenario = scenario
        self.log = log
        self.random = Random(f"traffic/{scenario.seed}")
        self.live: list[str] = []
        self.done = False
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
        said = sorted(one for at_s, number in answers for one in self._opinions(at_s, number))
        junk = [(self.random.random() * LIVE_S, data) for data in self.random.sample(JUNK, 2)]
        junk.append((self.random.random() * LIVE_S, deposit(self.store, BOMB, day=0)))
        plan: list[tuple[float, int, object]] = [(at_s, 0, answer(number)) for at_s, number in answers]
        plan += [(one.at_s, 1, one) for one in said]
        plan += [(at_s, 2, data) for at_s, data in junk]
        for at_s, _, what in sorted(plan, key=lambda one: one[:2]):
            await asyncio.sleep(max(0.0, begin_s + at_s - asyncio.get_running_loop().time()))
            await self._send(what)
        self.done = True

    async def _send(self, what: object) -> None:
        times = 2 if self.random.random() < 0.15 else 1
        for _ in range(times):
            if isinstance(what, Experience):
                self.live.append(what.id)
                await self.log.publish(EXPERIENCES, Block((what,)))
            elif isinstance(what, CustomerEvent):
                event = {"ref": what.ref, "id": what.id, "value": what.value, "rater": what.rater}
                await self.log.bus.send(EVENTS, json.dumps(event).encode(), key=what.ref.encode())
            else:
                assert isinstance(what, bytes)
                for topic in (self.log.name(EXPERIENCES), self.log.name(FEEDBACK), EVENTS):
                    await self.log.bus.send(topic, what, key=b"junk")

    def _opinions(self, at_s: float, number: int) -> list[CustomerEvent]:
        """What one customer says, early, in time, late, again and in other words; and of answers nobody gave."""
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
    """What the gateway recorded of one session."""
    return make_experience(
        tokens=[1 + number % 7, 2, 3 + number % 5, 1 + number % 3],
        logprobs=np.full(2, -0.5, np.float32),
        messages=(Message(role="user", content="q"), Message(role="assistant", content=f"a{number}")),
        id=live_id(number),
        group=f"live-{number}.0",
        episode=0,
        group_size=1,
        lane="live",
        origin="gateway",
        spans=(Span(2, 4, 0),),
    )


def demonstration(number: int) -> Experience:
    """A worked answer."""
    return make_experience(
        tokens=[1 + number, 2, 5, 0],
        logprobs=np.zeros(2, np.float32),
        messages=(Message(role="user", content="q"), Message(role="assistant", content=f"d{number}")),
        id=experience_id(f"expert-{number}.0", 0, 0),
        group=f"expert-{number}.0",
        episode=0,
        group_size=1,
        lane="expert",
        spans=(Span(2, 4, -1, ratio=False),),
    )
