"""Snapshots in the object store of a master's state, with its position in the log.

    KEPT    attribute -> type: state that only the log can restore
    PARTS   attributes that hold such parts themselves

A class names the attributes of its snapshots in KEPT and PARTS. A start rebuilds everything else: caches, settings, and state
of a start.

Guarantee: a master that starts from a snapshot and reads the log from its position decides like a master that read the whole
log in the same order. The log has no order between topics: an eval with a reissued task is missed or not, depending on which of
two answers was read first. So a master uses no snapshot that is incomplete, that other settings or another log made, or whose
position the log has deleted; it logs the reason and reads the log from its beginning. Two masters at once do no harm: the
position of a snapshot starts with its master's lease, snapshots taken while a later master may have issued groups are
discarded, and no master removes a later master's snapshot.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from actors.config import MasterConfig
from actors.master.plan import Plan
from infra.log.log import Log
from infra.observe.metrics import Metrics
from infra.roles.identity import log_beginning
from infra.store.snapshots import SnapshotDamaged, SnapshotManifest, candidates, prune, read, save
from infra.store.store import Store
from schemas.errors import BrokerUnavailable, StoreError
from schemas.topics import EVALS, POLICIES, PROGRESS, TASKS

LAYOUT = 7  # of the state
NUMBERS = 1_000_000  # snapshots of one lease, at most
STATE = "plan"  # name of the only part
READ = (TASKS, POLICIES, EVALS, PROGRESS)  # topics that must still hold everything from the place on

_log = logging.getLogger(__name__)

Places = Mapping[str, Mapping[int, int]]  # by topic and partition, the first offset that is not counted
Bounds = Mapping[str, tuple[Mapping[int, int], Mapping[int, int]]]  # by topic, its first offsets and its ends


class SnapshotFacts(msgspec.Struct, frozen=True):
    """Facts by which a start decides whether to use a snapshot. shaping: digest of the settings that the state rests on. log:
    digest of the log's beginning. places: offsets read up to, by topic and partition.
    """

    shaping: str
    log: str
    places: dict[str, dict[int, int]]


class Unfit(Exception):
    """A snapshot that cannot be used; the message says why."""


class Snapshots:
    """Snapshots of one app's masters. every_s: seconds from one to the next, by `clock`."""

    def __init__(
        self, log: Log, store: Store, metrics: Metrics, *, app: str, every_s: float, clock: Callable[[], float]
    ) -> None:
        self._log = log
        self._store = store
        self._metrics = metrics
        self._series = series(app)
        self._every_s = every_s
        self._clock = clock
        self._due_s = clock()
        self._number = 0
        self._begun = ""
        self._waiting: asyncio.Queue[tuple[int, SnapshotFacts, bytes]] = asyncio.Queue(maxsize=1)

    async def restored(self, make: Callable[[], Plan], policy: str) -> tuple[Plan, Places]:
        """A plan with the state of the newest snapshot that fits, and where to read on; without one a new plan, and nowhere."""
        begun = await log_beginning(self._log)
        self._begun = "" if begun is None else begun.digest
        bounds = {topic.name: await self._log.bounds(topic) for topic in READ}
        try:
            found = await asyncio.to_thread(self._newest, make, policy, bounds)
        except StoreError as error:
            _log.warning("snapshots_not_read error=%s: the log is read from its beginning", error)
            found = None
        if found is not None:
            return found
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
        facts = SnapshotFacts(
            shaping(plan.config, policy), self._begun, {topic: dict(at) for topic, at in places.items()}
        )
        self._waiting.put_nowait((plan.token * NUMBERS + self._number, facts, packed(plan)))

    async def write(self) -> None:
        """Write the submitted snapshots until cancelled. After a failure it continues with the next snapshot."""
        while True:
            position, facts, state = await self._waiting.get()
            try:
                # Read after the state: if `policies` has no newer record, no later master had issued a group by then.
                if facts.places[POLICIES.name] != (await self._log.bounds(POLICIES))[1]:
                    self._due_s = self._clock()
                    continue
                size = await asyncio.to_thread(self._put, position, facts, state)
                self._metrics.counter("master_snapshots", result="written").inc()
                self._metrics.gauge("master_snapshot_bytes").set(size)
            except (BrokerUnavailable, StoreError, SnapshotDamaged) as error:
                self._metrics.counter("master_snapshots", result="failed").inc()
                _log.warning("snapshot_not_written position=%d error=%s", position, error)

    def _put(self, position: int, facts: SnapshotFacts, state: bytes) -> int:
        written = save(self._store, self._series, position, [(STATE, state)], msgspec.to_builtins(facts))
        prune(self._store, self._series)
        return written.stored_bytes

    def _newest(self, make: Callable[[], Plan], policy: str, bounds: Bounds) -> tuple[Plan, Places] | None:
        for snapshot in candidates(self._store, self._series, lambda reason, line: self._refuse(line)):
            plan = make()
            try:
                places = restore(self._store, snapshot, plan, policy, self._begun)
                require_reach(places, bounds)
            except Unfit as error:
                self._refuse(f"snapshot {snapshot.key}: {error}")
                continue
            _log.info("snapshot_read key=%s", snapshot.key)
            return plan, filled(places, bounds)
        return None

    def _refuse(self, line: str) -> None:
        self._metrics.counter("master_snapshots", result="unfit").inc()
        _log.warning("snapshot_not_used %s", line)


def series(app: str) -> str:
    """Name of the snapshots of an app's masters in the store."""
    return f"{app}/master"


def shaping(config: MasterConfig, policy: str) -> str:
    """A digest of the settings that the state rests on: with others the same log is counted otherwise."""
    reached = config.stop.suite, config.stop.at
    found = msgspec.json.encode([LAYOUT, policy, config.first_version, config.evals, config.gate, reached])
    return hashlib.blake2b(found, digest_size=16).hexdigest()


def restore(store: Store, snapshot: SnapshotManifest, plan: Plan, policy: str, log: str) -> Places:
    """Put the state of a snapshot into a new plan and return its places. log: digest of the log's beginning.

    Raises Unfit, and leaves the plan unusable.
    """
    try:
        facts = msgspec.convert(snapshot.about, SnapshotFacts, str_keys=True)
        if facts.log != log:
            raise Unfit(f"of the log {facts.log[:8]}, this is {log[:8]}")
        if facts.shaping != shaping(plan.config, policy):
            raise Unfit(
                "the release, policy.name, or master.evals, gate, first_version, stop.suite or stop.at have changed since"
            )
        put_back(plan, read(store, snapshot.parts[STATE]))
    except (ValueError, KeyError, SnapshotDamaged) as error:
        raise Unfit(f"not read: {error}") from error
    plan.put_back()
    return facts.places


def filled(places: Places, bounds: Bounds) -> Places:
    """The places, with offset 0 for partitions that were not there yet."""
    return {**places, **{name: dict.fromkeys(begins, 0) | dict(places[name]) for name, (begins, _) in bounds.items()}}


def require_reach(places: Places, bounds: Bounds) -> None:
    """Raise Unfit if the log lacks records behind these positions."""
    for topic, (begins, ends) in bounds.items():
        for part, begin in begins.items():
            at = places.get(topic, {}).get(part, 0)
            if not begin <= at <= ends[part]:
                raise Unfit(f"read up to {topic}/{part}@{at}, and the log holds {begin} to {ends[part]}")


def packed(part: Any) -> bytes:
    """The state of an object and of its parts, in msgpack."""
    return msgspec.msgpack.encode(_state(part))


def put_back(part: Any, data: bytes | msgspec.Raw) -> None:
    """Give a new object the state that was `packed` of another. Raises ValueError; the object is of no use then."""
    found = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
    try:
        for name, kind in part.KEPT.items():
            value = msgspec.msgpack.decode(found[name], type=kind)
            is_ordered = isinstance(getattr(part, name), OrderedDict)
            setattr(part, name, OrderedDict(value) if is_ordered else value)
        for name in _parts(part):
            put_back(getattr(part, name), found[name])
    except KeyError as error:
        raise ValueError(f"{type(part).__name__}: {error} is not there") from error


def _state(part: Any) -> dict[str, Any]:
    own = {name: getattr(part, name) for name in part.KEPT}
    return own | {name: _state(getattr(part, name)) for name in _parts(part)}


def _parts(part: Any) -> list[str]:
    return [name for name in getattr(part, "PARTS", ()) if getattr(part, name) is not None]
