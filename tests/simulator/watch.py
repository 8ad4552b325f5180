"""The eyes of the simulation: every stored record, every confirmation, every step and load, checked as it happens.

The checks here need the moment (the order of events); the checks that need the whole log are in `settlement.py`.
"""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from infra.log.bus import Partition, Record
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import look_at
from infra.policies.tensors import Tensor
from infra.store.memory import MemoryStore
from infra.store.seal import Keys
from schemas import (
    Batch,
    Block,
    Closure,
    Directive,
    DropMarker,
    EvalResult,
    Experience,
    Fence,
    PolicyEvent,
    Progress,
    Task,
    decode,
)
from schemas.errors import BadFrame, HeadraceError
from schemas.topics import POLICIES, topic_name
from tests.simulator.faults import STRUCK
from tests.simulator.scenario import APP, MAX_USES, Scenario
from tests.simulator.virtual_loop import Process
from trainer.batch.assemble import step_seed

LAST_EVENTS = 60
Identity = tuple[str, object]
Kind = Literal["asks", "hears", "loads"]


class Happened(msgspec.Struct, frozen=True):
    """Something in the life of a gateway. asks: for the end of `policies`, hears: all before an offset, loads: a version."""

    kind: Kind
    value: int
    at_s: float


class Violation(msgspec.Struct, frozen=True):
    """A broken promise, with the evidence."""

    promise: str
    what: str
    at_s: float


class RunWatch:
    def __init__(self, scenario: Scenario, store: MemoryStore, clock: Callable[[], float]) -> None:
        self.scenario = scenario
        self.store = store
        self.clock = clock
        self._keys = Keys(store, clock)
        self.violations: list[Violation] = []
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self.verbose: Callable[[str], None] | None = None
        self.hash = hashlib.sha256()
        self.seen: Counter[str] = Counter()  # counts of events, so that silence is not taken for safety
        self.began_s: dict[Process, float] = {}
        self.acknowledged: set[str] = set()  # experiences whose senders were told that they are stored
        self.acknowledged_stubs: set[str] = set()
        self.content: dict[int, str] = {}  # version → hash of its weights
        self.altered: Counter[Process] = Counter()  # reads of policies that gave other bytes
        self.courses: defaultdict[Process, list[Happened]] = defaultdict(list)  # of reading policies and serving them
        self.snapshots: dict[str, bytes] = {}  # objects of masters' snapshots by key, removed ones too
        self.master_state = ""
        self._first: dict[Identity, tuple[float, Process, Any]] = {}
        self._failed: set[tuple[Process, Identity]] = set()
        self._groups: set[str] = set()
        self._sampled: dict[str, tuple[bytes, bytes]] = {}
        self._seeds: set[int] = set()
        self._token = -1
        self._leases: dict[Process, int] = {}
        self._master = -1
        self._fence = -1
        self._warm_steps = 0
        self._orphaned: set[int] = set()

    def complain(self, promise: str, what: str) -> None:
        """A promise is broken."""
        self.violations.append(Violation(promise, what, self.clock()))
        self.note(f"VIOLATION {promise}: {what}")

    def happened(self, process: Process, what: str) -> None:
        """Something befell a process."""
        self.seen[what] += 1
        self.note(f"{process.name} {what}")

    def note(self, text: str) -> None:
        """Something worth a line of the trace, and part of its hash."""
        line = f"{self.clock():10.4f} {text}"
        self.hash.update(line.encode())
        self.last.append(line)
        if self.verbose is not None:
            self.verbose(line)

    def read(self, value: bytes) -> Any:
        try:
            return decode(value, self._keys.find)
        except (BadFrame, HeadraceError):
            return value

    # ---- at the broker

    def stored(self, process: Process, record: Record) -> None:
        value = self.read(record.value)
        if STRUCK:
            self.complain("I7 nothing foreign runs", f"{len(STRUCK)} times by {process.name} or before it")
            STRUCK.clear()
        self.seen[kind_of(value)] += 1
        topic = record.topic.partition(".")[2]
        self.note(f"{process.name} -> {topic}/{record.partition}@{record.offset} {described(value)}")
        if isinstance(value, PolicyEvent):
            self._policy(process, value, record.offset)
        elif isinstance(value, Directive) and value.order == "lease":
            self._master = record.offset
        elif isinstance(value, Batch):
            self._batch(process, value)
        elif isinstance(value, Fence):
            self._fence = max(self._fence, value.token)
        elif isinstance(value, Closure):
            self._once("I6 one closure", identity(value), process, value)
        elif isinstance(value, Task) and topic == "tasks":
            self._once("I2 an attempt is issued once", identity(value), process, None)
            if value.issued is not None:
                self.seen["issued again"] += value.issued.group in self._groups
                self._groups.add(value.issued.group)
        elif isinstance(value, EvalResult):
            self._once("I6 one result", identity(value), process, value)
        elif isinstance(value, Block) and topic == "experiences":
            self._experiences(value)
        elif isinstance(value, Progress):
            if value.role == "master":
                self.master_state = value.state
            if value.refused and not self.altered[process]:
                self.complain("I3 verified", f"{value.instance} refused versions: {value.refused}")

    def confirmed(self, process: Process, record: Record) -> None:
        topic = record.topic.partition(".")[2]
        if topic not in ("experiences", "experts", "verified"):
            return
        value = self.read(record.value)
        if isinstance(value, Block) and topic != "verified":
            self.acknowledged.update(member.id for member in value.experiences)
        elif isinstance(value, DropMarker) and value.stage == "explore":
            self.acknowledged_stubs.add(value.id)

    def failed(self, process: Process, topic: str, key: bytes, value: bytes, stored: bool) -> None:
        self.note(f"{process.name} was told that {topic} failed{' (it is stored)' if stored else ''}")
        if (name := identity(self.read(value))) is not None:
            self._failed.add((process, name))

    def asked_end(self, process: Process, partition: Partition, end: int) -> None:
        self._course(process, partition, "asks", end)

    def heard(self, process: Process, partition: Partition, end: int) -> None:
        self._course(process, partition, "hears", end)

    def _course(self, process: Process, partition: Partition, kind: Kind, end: int) -> None:
        if partition.topic == topic_name(APP, POLICIES):
            self.courses[process].append(Happened(kind, end, self.clock()))

    # ---- in the processes

    def stepping(self, process: Process, seed: int) -> None:
        """The learner is about to take the step of this seed."""
        self.note(f"{process.name} steps with seed {seed}")
        if not process.is_dead and seed not in self._seeds:
            self.complain("I4 journal before step", f"{process.name}: no batch with seed {seed} is in the journal")

    def loaded(self, process: Process, version: int, tensors: Mapping[str, Tensor]) -> None:
        """An engine serves these weights as `version`."""
        self.note(f"{process.name} serves version {version}")
        self.courses[process].append(Happened("loads", version, self.clock()))
        expected = self.content.get(version)
        if content_of(tensors) != expected:
            self.complain("I3 verified", f"{process.name} serves version {version} with weights that are not its own")

    # ---- checks

    def _once(self, promise: str, name: Identity | None, process: Process, value: object) -> None:
        """No process repeats a record that was there when it began, nor a record that it was told is stored."""
        assert name is not None
        if name not in self._first:
            self._first[name] = (self.clock(), process, value)
            return
        at_s, first, before = self._first[name]
        if value != before:
            self.complain(promise, f"{name}: said first {before}, by {process.name} {value}")
        if (process, name) in self._failed:
            return
        if process is first:
            self.complain(promise, f"{name}: {process.name} sent it again, and was not told that it failed")
        elif self.began_s[process] > at_s + 0.1:
            self.complain(promise, f"{name}: {process.name} began after it was in the log, and sent it again")

    def _experiences(self, block: Block) -> None:
        for member in block.experiences:
            sampled = (member.tokens.tobytes(), member.logprobs.tobytes())
            if self._sampled.setdefault(member.id, sampled) != sampled:
                self.complain("I2 an id has one content", f"{member.id} was sampled twice")

    def _batch(self, process: Process, batch: Batch) -> None:
        pacing = self.scenario.floor.pacing
        self._seeds.add(batch.seed)
        if batch.seed != step_seed(self.scenario.seed, batch.step):
            self.complain("I4 seeds", f"step {batch.step} has seed {batch.seed}")
        if batch.token < self._fence:
            return
        if batch.phase == "warmup":
            self._warm_steps = max(self._warm_steps, batch.step + 1)
        for item in batch.items:
            age = batch.version - item.min_version
            if item.lane == "usual" and age > pacing.max_staleness:
                self.complain("staleness bound", f"step {batch.step} trains {item.id}, {age} versions old")
            if item.use >= MAX_USES[item.lane]:
                self.complain("I2 max_uses", f"step {batch.step} trains {item.id} with use {item.use}")

    def _policy(self, process: Process, event: PolicyEvent, offset: int) -> None:
        if event.event == "lease":
            self._token = self._leases[process] = offset
        elif event.event == "orphaned":
            self._orphaned.add(event.version)
            self.complain("I4 same bits", f"version {event.version} was orphaned: its steps gave other weights")
        elif event.event == "published":
            self._published(process, event)
        elif event.owner == "gate" and event.token >= self._master:  # verdicts of an overtaken gate are decided again
            self._once("I6 one verdict", identity(event), process, None)

    def _published(self, process: Process, event: PolicyEvent) -> None:
        try:
            policy = PolicyFetcher(self.store, event.policy).fetch(event)
        except HeadraceError as error:
            self.complain("I3 complete", f"version {event.version} of token {event.token}: {error}")
            return
        if event.token != self._leases.get(process):
            self.complain("fencing", f"{process.name} published version {event.version} under token {event.token}")
        if event.token < self._token:
            return
        if not all(look_at(tensor).finite for tensor in policy.tensors.values()):
            self.complain("I3 healthy", f"version {event.version} holds values that are not finite")
        content = content_of(policy.tensors)
        if self.content.setdefault(event.version, content) != content:
            self.complain("I3 one content", f"version {event.version} of token {event.token} has other weights")
        done = event.step + 1 - self._warm_steps
        every = self.scenario.steps_per_version * self.scenario.checkpoint_every
        if event.step >= 0 and done % every == 0:
            folder = f"checkpoints/{self.scenario.floor.app}/{event.step + 1:012d}-"
            if not any(
                key.startswith(folder) and key.endswith("manifest.json") for key in self.store.keys("checkpoints/")
            ):
                self.complain(
                    "I4 checkpoint before publication", f"version {event.version}: no {folder}…/manifest.json"
                )


def members_of(value: object) -> tuple[Experience, ...]:
    """Experiences of a block, none of anything else."""
    return value.experiences if isinstance(value, Block) else ()


def identity(value: object) -> Identity | None:
    if isinstance(value, Closure):
        return "closure", (value.group, value.attempt, value.revision)
    if isinstance(value, Task) and value.issued is not None:
        return "attempt", (value.issued.group, value.issued.attempt)
    if isinstance(value, EvalResult):
        return "result", (value.suite, value.version)
    if isinstance(value, PolicyEvent) and value.owner == "gate":
        return "verdict", value.version
    return None


def kind_of(value: object) -> str:
    if isinstance(value, Closure):
        if "missing at deadline" in value.drops:
            return "missing at deadline"
        return "late" if value.revision else value.outcome
    if isinstance(value, PolicyEvent):
        return value.event
    if isinstance(value, Task) and value.issued is not None:
        return "issued"
    return type(value).__name__


def content_of(tensors: Mapping[str, Tensor]) -> str:
    """One hash of all weights."""
    return " ".join(f"{name}:{look_at(tensor).xxh3}" for name, tensor in sorted(tensors.items()))


def described(value: object) -> str:
    """A record in a line, without fields that depend on the machine."""
    if isinstance(value, Block):
        return "block " + " ".join(f"{member.id}r{member.revision}" for member in value.experiences)
    return f"progress {value.role} {value.state}" if isinstance(value, Progress) else str(value)[:220]
