"""One simulated run: the roles as processes that die, stall and come back, until the faults end and everything drains.

load ─> roles and customers, under faults for FAULTS_S ─> calm ─> finish ─> nothing pending ─> settlement
"""

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from infra.ledger.account import ORDER, Account, Ledger
from infra.log.bus import Partition
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from schemas import Feedback, topics
from schemas.errors import BrokerUnavailable, FencedOut, StoreError, causes
from streams.stages.stage import process_exit
from tests.simulator import roles
from tests.simulator.customers import Customers, CustomerTraffic, Wire
from tests.simulator.faults import Faults, Mixture
from tests.simulator.network import ClientBus, ClientStore, SimulatedCluster
from tests.simulator.roles import GatewayLife, group_of_topic, orphans, run_operator
from tests.simulator.scenario import APP, EVENTS, FAULTS_S, PARTITIONS, Scenario
from tests.simulator.virtual_loop import PROCESS, Killed, Process, VirtualLoop
from tests.simulator.watch import RunWatch, members_of

SESSION_S = 2.0  # after which the group deals a silent member's partitions to others
GIVE_UP_S = 240.0  # of virtual time, for everything to drain
ENDINGS = (BrokerUnavailable, FencedOut, StoreError)  # errors that a role may end for: it is started again

Main = Callable[["World", Process], Coroutine[None, None, None]]


class Slot:
    """One role that should run. current: its newest life."""

    def __init__(self, name: str, main: Main) -> None:
        self.name = name
        self.main = main
        self.current: Process | None = None
        self.num_lives = 0


class World:
    def __init__(self, scenario: Scenario, mixture: Mixture, folder: Path) -> None:
        seed = scenario.seed
        self.scenario = scenario
        self.folder = folder
        self.random = Random(f"world/{seed}")
        self.loop = VirtualLoop(Random(f"loop/{seed}"))
        self.loop.set_exception_handler(lambda _, context: self._went_wrong(context))
        self.store = MemoryStore()
        self.watch = RunWatch(scenario, self.store, self.loop.time)
        self.mixture = mixture
        self.faults = Faults(Random(f"faults/{seed}"), self.mixture, self.loop.time)
        self.faults.kill = self.kill
        self.cluster = SimulatedCluster(self.loop, self.faults, self.watch)
        self.finish = asyncio.Event()
        self.outside = Process("outside")
        self.watch.began_s[self.outside] = self.loop.time()
        self.faults.safe.add(self.outside)
        self.log = self.log_of(self.outside)
        self.traffic = CustomerTraffic(scenario, self.log, self.store)
        self.is_calm = False
        self.stalled: list[Process] = []
        self.stops: dict[Process, asyncio.Event] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.account: Account | None = None
        self.workers: dict[int, Process] = {}
        self.metrics: dict[Process, Metrics] = {}
        self.slots = [Slot("master", roles.master), Slot("train", roles.trainer)]
        self.slots += [Slot(f"explore-{n}", roles.explorer) for n in range(scenario.num_explorers)]
        self.slots += [Slot(f"process-{n}", roles.worker) for n in range(scenario.num_workers)]
        self.slots += [Slot("serve", roles.gateway)] if scenario.num_customers else []
        self.slots += [Slot("canary", roles.gateway)] if scenario.num_customers and scenario.num_trials else []
        self.wire = Wire(self.loop)
        self.customers = Customers(scenario, self.store, self.wire, self.watch)
        self.gateways: dict[Process, GatewayLife] = {}
        self.ended_well: set[Process] = set()
        self.served: dict[str, int] = {}  # by the gateways that were there at the end

    def run(self) -> None:
        """To the end, or to the first violation."""
        try:
            self.loop.run_until_complete(self._script())
        finally:
            for process in (*self.watch.began_s, self.outside):
                process.is_dead = True
            copy_context().run(self._abandon)

    def _went_wrong(self, context: dict[str, Any]) -> None:
        handle = context.get("handle")
        if handle is not None and handle._context.get(PROCESS) is None:
            self.watch.complain("the simulation itself is sound", repr(context.get("exception")))

    def _abandon(self) -> None:
        process_exit.set(_dead)
        self.loop.abandon()

    # ---- the script

    async def _script(self) -> None:
        await self.log.create_topics(partitions=PARTITIONS, keep_ms=-1)
        await self.cluster.create_topic(EVENTS, 1, {})
        outside = self.loop.create_task(self._outside(), context=self.outside.context)
        for slot in self.slots:
            self._start(slot)
        self._plan_events()
        await self._sleep(FAULTS_S)
        self._calm()
        if not await self._until(lambda: outside.done() and not self._unwritten() and self._live_is_trained()):
            self.watch.complain(
                "I1 nothing waits for ever",
                f"of customers: {self._unwritten()}, {self._accounted().pending_ids} and {self._behind()}",
            )
        self.finish.set()
        if not await self._until(self._is_drained):
            account = self._accounted()
            self.watch.complain("I1 after a drain nothing is pending", f"{account.pending_ids} and {self._behind()}")
        await self._sleep(1.0)  # for gateways to read the last moves of the channels
        living = [(process, life) for process, life in self.gateways.items() if not process.is_dead]
        self.served = {process.name: life.engine.version for process, life in living}

    async def _outside(self) -> None:
        await self.traffic.load()
        async with asyncio.TaskGroup() as everybody:
            everybody.create_task(self.traffic.run())
            everybody.create_task(run_operator(self.scenario, self.log))
            everybody.create_task(self.customers.run())

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but end at a violation."""
        end_s = self.loop.time() + seconds
        while self.loop.time() < end_s and not self.watch.violations:  # noqa: ASYNC110
            await asyncio.sleep(min(0.5, end_s - self.loop.time()))

    async def _until(self, condition: Callable[[], bool]) -> bool:
        end_s = self.loop.time() + GIVE_UP_S
        while not self.watch.violations:
            if condition():
                return True
            if self.loop.time() > end_s:
                return False
            await asyncio.sleep(1.5)
        return True

    def _live_is_trained(self) -> bool:
        if [where for where in self._behind() if where.startswith(EVENTS)]:
            return False
        committed = self.cluster.group(group_of_topic(self.log, topics.VERIFIED)).committed
        for record in self.records(topics.VERIFIED):
            at = Partition(record.topic, record.partition)
            if committed.get(at, 0) <= record.offset and isinstance(self.watch.read(record.value), Feedback):
                return False
        return all(name.startswith("task-") for name in self._accounted().pending_ids)

    def _is_drained(self) -> bool:
        return self.watch.master_state == "done" and not self._behind() and not self._accounted().pending

    def _behind(self) -> list[str]:
        """Topics that some group has not read to its end."""
        readers = [(self.log.name(topic), group_of_topic(self.log, topic)) for topic in self._staged()]
        readers.append((EVENTS, self.log.group("feedback.csat")))
        readers.append((self.log.name(topics.FEEDBACK), self.log.group("feedback")))
        found = []
        for name, group in readers:
            committed = self.cluster.group(group).committed
            for at, end in _ends(self.cluster, name).items():
                if committed.get(at, 0) < end:
                    found.append(f"{name}/{at.index} at {committed.get(at, 0)} of {end}")
        return found

    def _staged(self) -> tuple[topics.Topic, ...]:
        return topics.TASKSET_RAW, topics.EXPERIENCES, topics.EXPERTS, topics.VERIFIED

    def _accounted(self) -> Account:
        ledger = Ledger(self.scenario.floor.app)
        for topic in ORDER:
            for record in self.records(topic):
                ledger.fold(topic.name, self.log.decode(record))
        self.account = ledger.account()
        return self.account

    def _unwritten(self) -> list[str]:
        owed = [name for name, process in self.customers.answered.items() if self._is_owed(process)]
        read, records = self.watch.read, self.records
        stored = {member.id for record in records(topics.EXPERIENCES) for member in members_of(read(record.value))}
        heard = {getattr(read(record.value), "id", "") for record in records(topics.FEEDBACK)}
        return [name for name in owed if name not in stored] + sorted(self.customers.accepted - heard)

    def _is_owed(self, process: Process) -> bool:
        return not process.is_dead or process in self.ended_well

    def records(self, topic: topics.Topic) -> list:  # type: ignore[type-arg]
        """Everything in a topic, in partition order."""
        return self.cluster.everything(self.log.name(topic))

    # ---- faults in time

    def _plan_events(self) -> None:
        mixture, random = self.mixture, self.random
        events: list[Callable[[Slot], None]] = [self._stall] * mixture.stalls + [self._cut] * mixture.cuts
        events += [self._crash] * mixture.crashes + [self._terminate] * (mixture.crashes // 2)
        for event in events:
            at_s = random.random() * (FAULTS_S - 1.0)
            focused = [slot for slot in self.slots if mixture.focus and slot.name.startswith(mixture.focus)]
            slot = random.choice(focused if focused and random.random() < 0.8 else self.slots)
            self._later(at_s, functools.partial(event, slot))

    def _crash(self, slot: Slot) -> None:
        if slot.current is not None and not self.is_calm:
            self.kill(slot.current)

    def _terminate(self, slot: Slot) -> None:
        if slot.current is not None and not self.is_calm and slot.current in self.stops:
            self.watch.happened(slot.current, "is asked to stop")
            slot.current.context.run(self.stops[slot.current].set)

    def _cut(self, slot: Slot) -> None:
        if slot.current is not None and not self.is_calm:
            self.watch.happened(slot.current, "loses the network")
            self.faults.cut(slot.current, 1.0 + self.random.random() * 6.0)

    def _stall(self, slot: Slot) -> None:
        """Stop a process, start another in its place, let the first go on."""
        process = slot.current
        if process is None or process.is_dead or self.is_calm:
            return
        self.watch.happened(process, "stalls")
        process.is_stalled = True
        self.customers.stood_still[process] = math.inf
        self.stalled.append(process)
        self._later(SESSION_S, self.cluster.expel, process)
        if self.random.random() < 0.8:
            self._later(0.2 + self.random.random() * 2, self._replace, slot, process)
        self._later(1.0 + self.random.random() * 8, self._resume, process)

    def _replace(self, slot: Slot, process: Process | None) -> None:
        if slot.current is process:
            self._start(slot)

    def _resume(self, process: Process) -> None:
        if process.is_stalled and not process.is_dead:
            is_overtaken = self._slot_of(process).current is not process
            self.watch.happened(process, "goes on overtaken" if is_overtaken else "goes on")
            self.loop.resume(process)
            self.customers.stood_still[process] = self.loop.time()

    def _calm(self) -> None:
        self.watch.note("calm")
        self.is_calm = True
        self.faults.calm()
        for process in self.stalled:
            self._resume(process)
        for slot in self.slots:
            for _ in orphans(self.gateways, slot.name):
                self._start(slot)

    def _later(self, delay_s: float, callback: Callable[..., None], *args: object) -> None:
        """Call it later, even if processes are dead by then."""
        self.loop.call_later(delay_s, callback, *args, context=self.cluster.context)

    # ---- processes

    def log_of(self, process: Process) -> Log:
        """A process's own connection."""
        store = ClientStore(self.store, process, self.faults, self.watch)
        return Log(ClientBus(self.cluster, process), APP, store=store, clock=self.loop.time)

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process.is_dead:
            return
        process.is_dead = True
        process.held = []
        self.watch.happened(process, "dies")
        self.wire.reset(process)
        if process in self.gateways:
            self.gateways[process].let_go()
        self._later(SESSION_S, self.cluster.expel, process)
        slot = self._slot_of(process)
        if slot.current is process:
            slot.current = None
            delay_s = 0.3 if self.is_calm else 0.1 + self.random.random() * 2.5
            self._later(delay_s, self._replace, slot, None)

    def _slot_of(self, process: Process) -> Slot:
        return next(slot for slot in self.slots if slot.name == process.name.partition("#")[0])

    def _start(self, slot: Slot) -> None:
        slot.num_lives += 1
        process = Process(f"{slot.name}#{slot.num_lives}")
        slot.current = process
        self.watch.began_s[process] = self.loop.time()
        self.watch.note(f"{process.name} begins")

        def end(message: str, code: int) -> NoReturn:
            self.watch.note(f"{process.name} ends itself: {message}")
            if code == 70:  # a bug
                self.watch.complain("roles end only for what they cannot mend", f"{process.name}: {message}")
            self.kill(process)
            raise Killed

        process.context.run(process_exit.set, end)
        task = self.loop.create_task(slot.main(self, process), context=process.context)
        task.add_done_callback(lambda done: self._ended(process, done), context=self.cluster.context)
        self.tasks.append(task)

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        found = causes(error) if error is not None else []
        self.watch.note(f"{process.name} ended: {[type(one).__name__ for one in found]}")
        for found_item in found:
            self.watch.seen[type(found_item).__name__] += 1
            if not isinstance(found_item, (*ENDINGS, Killed)) and not process.is_dead:
                self.watch.complain("roles end only for what they cannot mend", f"{process.name}: {found_item!r}")
        if error is None and not process.is_dead:
            self.ended_well.add(process)
        self.kill(process)

    def stop_of(self, process: Process) -> asyncio.Event:
        """Asks a process to stop."""
        return self.stops.setdefault(process, asyncio.Event())

    def metrics_of(self, process: Process) -> Metrics:
        return self.metrics.setdefault(process, Metrics(process.name))

    def draw_seed(self) -> int:
        """A seed for the draws of a process."""
        return self.random.randrange(1 << 30)


def _ends(cluster: SimulatedCluster, name: str) -> dict:  # type: ignore[type-arg]
    return {Partition(name, index): log.end for index, log in enumerate(cluster._logs(name))}


def _dead(message: str, code: int) -> NoReturn:
    raise Killed
