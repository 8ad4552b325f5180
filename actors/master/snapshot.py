"""A master's state beside the place in the log that it was read up to, in the object store.

    masters/<app>/<lease>-<number>      sum, head, and what `actors.master.kept` packs, in zstd

Guarantee: a master that begins with a snapshot and reads the log from its place on decides as one that read all of it in the
order in which this one did. The log has no order between topics: whether an eval whose task was issued again is missed, where
an explorer was past the version when it met the second attempt, depends on whether the first one's answer was read before. So
none is used that is not whole, that other settings or another log made, or whose place the log has not any more: a line says
which, and the log is read from its beginning. Two masters at once do no harm: each writes under its own lease, what was taken
while a later one may have issued is thrown away, and none removes what a later one wrote.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping

import msgspec
import zstandard

from actors.config import MasterConfig
from actors.master.kept import packed, put_back
from actors.master.plan import Plan
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.observe.release import release
from infra.roles.identity import beginning_of
from infra.store.store import Store
from schemas.errors import BrokerUnavailable, NotInStore, StoreError
from schemas.topics import EVALS, POLICIES, PROGRESS, TASKS

FORMAT = 1
NUM_KEPT = 2
READ = (TASKS, POLICIES, EVALS, PROGRESS)  # what the log must still hold from the place on
MAX_BYTES = 1 << 30

_log = logging.getLogger(__name__)

Places = Mapping[str, Mapping[int, int]]  # by topic and partition, the first offset that is not counted
Bounds = Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]]  # of each topic where it begins and ends


class SnapshotHead(msgspec.Struct, frozen=True):
    """What a snapshot is of. shaping: of the settings that the state rests on. log: how the log begins. clock_ms: its
    time. format: of the file. release: that wrote it. places: offsets read up to, by topic and partition.

    Example: SnapshotHead(format=1, shaping="9f…", log="3a…", release="0.1.0", places={"tasks": {0: 812}})
    """

    format: int
    shaping: str
    log: str
    release: str
    clock_ms: int
    places: dict[str, dict[int, int]]


class _Numbered(msgspec.Struct):
    format: int


class Unfit(Exception):
    """A snapshot that is not used, and why."""


class Snapshots:
    """Those of one app. `every_s`: between two of them, by `clock` (seconds)."""

    def __init__(
        self, log: Log, store: Store, metrics: Metrics, *, app: str, every_s: float, clock: Callable[[], float]
    ) -> None:
        self._log = log
        self._store = store
        self._metrics = metrics
        self._folder = f"masters/{app}/"
        self._every_s = every_s
        self._clock = clock
        self._due_s = clock()
        self._number = 0
        self._begun = ""
        self._written: list[str] = []
        self._waiting: asyncio.Queue[tuple[str, SnapshotHead, bytes]] = asyncio.Queue(maxsize=1)

    async def restored(self, make: Callable[[], Plan], policy: str) -> tuple[Plan, Places]:
        """A plan as the newest snapshot that fits has it, and where to read on; a new one, and nowhere, without one."""
        begun = await beginning_of(self._log)
        self._begun = "" if begun is None else begun.digest
        bounds = {topic.name: await self._log.bounds(topic) for topic in READ}
        try:
            keys = await asyncio.to_thread(lambda: sorted(self._store.keys(self._folder), reverse=True))
            for key in keys:
                plan = make()
                try:
                    head = opened(await asyncio.to_thread(self._store.get, key), plan, policy, self._begun)
                    require_reach(head.places, bounds)
                except (Unfit, NotInStore) as error:
                    self._metrics.counter("master_snapshots", result="unfit").inc()
                    _log.warning("snapshot_not_used key=%s reason=%s", key, error)
                    continue
                _log.info("snapshot_read key=%s clock_ms=%d", key, head.clock_ms)
                return plan, filled(head.places, bounds)
        except StoreError as error:
            _log.warning("snapshots_not_read error=%s: the log is read from its beginning", error)
        for topic in (TASKS, PROGRESS):
            if late := {part: begin for part, begin in bounds[topic.name][0].items() if begin}:
                _log.warning("log_begins_late topic=%s at=%s: what lay before is not counted", topic.name, late)
        return make(), {}

    def take(self, plan: Plan, policy: str, places: Places) -> None:
        """Hand the present state over to be written, if it is time. All that the plan counts must be in the log."""
        if self._clock() < self._due_s or self._waiting.full():
            return
        self._due_s = self._clock() + self._every_s
        self._number += 1
        head = SnapshotHead(
            format=FORMAT,
            shaping=shaping(plan.config, policy),
            log=self._begun,
            release=release(),
            clock_ms=plan.clock_ms,
            places={topic: dict(at) for topic, at in places.items()},
        )
        key = f"{self._folder}{plan.token:012d}-{self._number:06d}"
        self._waiting.put_nowait((key, head, msgspec.json.encode(head) + b"\n" + packed(plan)))

    async def write(self) -> None:
        """Write what is handed over, for ever; what fails is tried again with the next one."""
        while True:
            key, head, data = await self._waiting.get()
            try:
                # Asked behind the state: where nothing newer lies in `policies`, no later master had issued anything by then.
                if head.places[POLICIES.name] != (await self._log.bounds(POLICIES))[1]:
                    self._due_s = self._clock()
                    continue
                size = await asyncio.to_thread(self._put, key, data)
                self._metrics.counter("master_snapshots", result="written").inc()
                self._metrics.gauge("master_snapshot_bytes").set(size)
            except (BrokerUnavailable, StoreError) as error:
                self._metrics.counter("master_snapshots", result="failed").inc()
                _log.warning("snapshot_not_written key=%s error=%s", key, error)

    def _put(self, key: str, data: bytes) -> int:
        sealed = summed(data)
        self._store.put(key, sealed)
        self._written = [*self._written, key][-NUM_KEPT:]
        before = [one for one in self._store.keys(self._folder) if one < self._written[0]]
        # Of earlier masters' the newest stays until this one has written two of its own.
        for one in before if len(self._written) == NUM_KEPT else before[:-1]:
            self._store.delete(one)
        return len(sealed)


def shaping(config: MasterConfig, policy: str) -> str:
    """A digest of the settings that the state rests on: with others the same log is counted otherwise."""
    found = msgspec.json.encode([policy, config.first_version, config.evals, config.gate, config.stop])
    return hashlib.blake2b(found, digest_size=16).hexdigest()


def summed(data: bytes) -> bytes:
    """Head and state as they are stored."""
    head, _, state = data.partition(b"\n")
    rest = head + b"\n" + zstandard.compress(state, 3)
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def opened(stored: bytes, plan: Plan, policy: str, begun: str) -> SnapshotHead:
    """Put the state of a snapshot into a new plan. begun: how the log begins. Raises Unfit; the plan is of no use then."""
    digest, _, rest = stored.partition(b"\n")
    if digest != hashlib.sha256(rest).hexdigest().encode():
        raise Unfit(f"damaged: {len(stored)} bytes whose SHA-256 is not the one they begin with")
    head_, _, state = rest.partition(b"\n")
    try:
        if (number := msgspec.json.decode(head_, type=_Numbered).format) != FORMAT:
            raise Unfit(f"of format {number}, this release reads {FORMAT}: another release wrote it")
        head = msgspec.json.decode(head_, type=SnapshotHead)
        if head.log != begun:
            raise Unfit(f"of the log {head.log[:8]}, this is {begun[:8]}")
        if head.shaping != shaping(plan.config, policy):
            raise Unfit("master.evals, gate, stop, first_version or policy.name have changed since")
        put_back(plan, zstandard.ZstdDecompressor().decompress(state, max_output_size=MAX_BYTES))
    except (ValueError, zstandard.ZstdError) as error:
        raise Unfit(f"not read: {error}") from error
    plan.put_back()
    return head


def filled(places: Places, bounds: Bounds) -> Places:
    """The places with those of partitions that there were not yet: their beginning."""
    return {**places, **{name: dict.fromkeys(begins, 0) | dict(places[name]) for name, (begins, _) in bounds.items()}}


def require_reach(places: Places, bounds: Bounds) -> None:
    """Raise Unfit where the log does not hold all that lies behind the places."""
    for topic, (begins, ends) in bounds.items():
        for part, begin in begins.items():
            at = places.get(topic, {}).get(part, 0)
            if not begin <= at <= ends[part]:
                raise Unfit(f"read up to {topic}/{part}@{at}, and the log holds {begin} to {ends[part]}")
