"""Publishing policies: weights to the store, then the event; a version number never has two contents.

Order: shards, manifest, event. After a restart the executed steps are compared with the published versions: equal content is
not published again, different content gets the next free number and the old version is marked orphaned. Limit: if bits differ
(a GPU, several ranks), each version since the checkpoint gets a new number after a restart, the first of them alone is marked
orphaned, and the staleness bound then drops the rollouts that wait.

Guarantee: after SUMMARIZE_EVERY records of `policies` the next version is followed by a summary in the store, so that a start
reads at most the records behind the newest summary (see `infra.policies.beginning`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from infra.log.bus import Partition
from infra.log.log import Log
from infra.policies.beginning import folded, read_on, write_summary
from infra.policies.fold import PoliciesFold
from infra.policies.manifest import HashedTensors, decode_manifest, first_difference
from infra.policies.policy import Adapter, Probe
from infra.policies.publish import NewVersion, publish
from infra.store.snapshots import SnapshotDamaged
from infra.store.store import Store
from schemas import PolicyEvent, topics
from schemas.errors import NotInStore, StoreError
from trainer.journal.journal import Lease
from trainer.loop.prune import prune as prune_weights
from trainer.loop.prune import remove_unfinished

logger = logging.getLogger(__name__)

SUMMARIZE_EVERY = 256  # records of `policies`
PROBE_TOKENS = 64  # of a sequence that a loaded policy is checked with
KNOWN_VERSIONS = 256  # newest versions with their events in memory


class WeightPublisher:
    """One trainer's way to the `policies` topic. events: of published versions, by version, from the first on that may be
    published again; after a publication, only the newest KNOWN_VERSIONS, and every lower number counts as used. past: the fold
    of the topic so far; its follower continues it. adapter: settings that all versions share, None for whole models.
    """

    def __init__(
        self,
        log: Log,
        store: Store,
        lease: Lease,
        policy: str,
        events: Mapping[int, PolicyEvent],
        past: PoliciesFold,
        adapter: Adapter | None = None,
    ) -> None:
        self.past = past
        self._log = log
        self._store = store
        self._lease = lease
        self._policy = policy
        self._events = dict(events)
        self._adapter = adapter
        self._previous: HashedTensors | None = None
        self._published_ms: int | None = None
        self._summarized = past.begun_at
        self._kept: PoliciesFold | None = None
        self._tidied = False
        self.full_bytes = 0
        """Bytes of all tensors of the last published version."""

    def has(self, version: int) -> bool:
        return version in self._events and self._events[version].event == "published"

    async def publish(
        self,
        version: int,
        weights: HashedTensors,
        probe: Probe | None,
        *,
        parent: int,
        step: int,
        stats: Mapping[str, float],
    ) -> int:
        """Make `weights` version `version`, or the next free one; returns the number it got."""
        old = self._events.get(version)
        if old is not None and old.event == "published":
            if await asyncio.to_thread(same_content, self._store, old, weights, self._adapter):
                self._previous = None
                return version
            await self._orphan(version)
        if version <= (newest := max(self._events, default=-1)):
            version = newest + 1
        new = NewVersion(
            policy=self._policy,
            token=self._lease.token,
            version=version,
            parent=parent,
            step=step,
            adapter=self._adapter,
        )
        event = await asyncio.to_thread(publish, self._store, new, weights, previous=self._previous, probe=probe)
        event = msgspec.structs.replace(event, owner=self._lease.owner, stats={**event.stats, **stats})
        position = await self._log.publish(topics.POLICIES, event)
        await self._summarize()
        self._previous = weights.base()
        self.full_bytes = int(event.stats["full_bytes"])
        self._events[version] = event
        while len(self._events) > KNOWN_VERSIONS:
            del self._events[min(self._events)]
        self._published_ms = position.timestamp_ms
        return version

    async def _summarize(self) -> None:
        if self.past.next_offset - self._summarized < SUMMARIZE_EVERY:
            return
        self._summarized = self.past.next_offset
        try:
            await asyncio.to_thread(write_summary, self._store, self._log.app, self.past.summary())
        except (StoreError, SnapshotDamaged) as error:
            logger.warning("policies_not_summarized error=%s: starts read more of it", error)

    async def _orphan(self, version: int) -> None:
        orphan = PolicyEvent(
            event="orphaned", policy=self._policy, version=version, token=self._lease.token, reason="executed again"
        )
        await self._log.publish(topics.POLICIES, orphan)
        logger.warning("policy orphaned version=%d: its steps gave other weights, or they cannot be read", version)

    async def replaced(self, keep_ms: int) -> int:
        """The newest version keep_ms before the last publication, -1 for none; it had replaced all older versions."""
        if self._published_ms is None:
            return -1
        name = self._log.name(topics.POLICIES)
        since_ms = max(0, self._published_ms - keep_ms)  # a broker takes a negative time for something else
        stop = (await self._log.bus.offsets_at(name, since_ms))[Partition(name, 0)]
        if self._kept is None:
            self._kept = await folded(self._log, stop=stop)
        else:
            await read_on(self._log, self._kept, stop=stop)
        found = self._kept.of(self._policy).published
        return max((version for version, event in found.items() if event.event == "published"), default=-1)

    def prune(self, oldest: int, *, tensors_only: bool = False) -> int:
        """Remove older versions from the store, but keep the chains of `oldest` and of the channels' versions; returns the
        number of removed objects. Blocking. The first call also removes unfinished versions of old leases. oldest: -1 for none.
        tensors_only: see `trainer.loop.prune.prune`.
        """
        unfinished = 0
        if not self._tidied:
            unfinished = remove_unfinished(self._store, self._policy, before=self._lease.token)
            self._tidied = True
            if unfinished:
                logger.info("unfinished versions removed objects=%d", unfinished)
        if oldest < 0:
            return unfinished
        stable = self.past.of(self._policy).stable
        needed = {stable.version, stable.promoted, stable.trial, stable.before}
        return unfinished + prune_weights(
            self._store, self._policy, oldest=oldest, needed=needed, tensors_only=tensors_only
        )


def same_content(store: Store, event: PolicyEvent, weights: HashedTensors, adapter: Adapter | None = None) -> bool:
    """True if the published version can be read and holds exactly these weights, by its manifest, of the same adapter."""
    try:
        manifest = decode_manifest(store.get(event.manifest))
    except (NotInStore, ValueError):
        return False
    return manifest.adapter == adapter and first_difference(weights.entries, manifest.tensors, values=True) is None


def probe_sequences(
    sequences: Sequence[Sequence[int]], *, most: int = 4, longest: int = PROBE_TOKENS
) -> tuple[tuple[int, ...], ...]:
    """A few token sequences that check a loaded policy, short enough to score cheaply."""
    kept = [tuple(tokens[:longest]) for tokens in sequences if len(tokens) >= 2]
    return tuple(dict.fromkeys(kept))[:most]
