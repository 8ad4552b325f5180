"""Keeps the engine on the newest policy: reads version events, fetches weights while the engine generates, swaps them.

    policies ─> PolicyFeed ─> fetch (thread) ─> gate releases the held version ─> engine.load ─> next
                                  │ refused: fetch a full copy once; then report it, and wait for a newer version

Guarantees: a version that fails verification, or that the engine does not reproduce, never serves; the held version serves
meanwhile. The follower skips no version that its gate wants. A reload waits at most `hold_s` until the gate releases the held
version. A start reads `policies` from the newest summary, and loads the version that reading all of it would select.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np

from actors.engines.engine import Engine, LoadReport
from infra.log.log import LogMessage, follow
from infra.observe.failpoint import reach
from infra.policies.beginning import newest_summary
from infra.policies.fetch import PolicyFetcher
from infra.policies.fold import PolicyFeed, Stable, Summary
from infra.policies.policy import Policy
from infra.policies.version_files import VersionFiles
from infra.roles.process import unless
from infra.roles.role import Role
from schemas import Directive, PolicyEvent
from schemas.errors import PolicyRefused, StoreError
from schemas.fields import Channel
from schemas.records import MAX_REFUSED
from schemas.topics import POLICIES

_log = logging.getLogger(__name__)

_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_MAX_SAMPLES = 4096
SLOW_S = 60.0


class ReloadGate:
    """Permission for an engine to change its version. This one always gives it; work that needs a version overrides it."""

    async def known(self) -> None:
        """Return once the gate knows which work waits; the follower loads nothing before."""

    def wanted(self) -> frozenset[int]:
        """Versions that the follower must not skip."""
        return frozenset()

    async def released(self, version: int, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until nothing needs `version`; True if so."""
        return True

    def reload(self) -> AbstractContextManager[None]:
        """Context in which no work that needs a version begins."""
        return nullcontext()


class _Lacking(Exception):
    """The version to load follows only from events before a summary."""


class ReloadTimes:
    """The last reloads: how long sampling paused, and how long a version took from its event to serving, ms."""

    def __init__(self) -> None:
        self.pause_ms: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.publish_to_serving_ms: deque[float] = deque(maxlen=_MAX_SAMPLES)

    def gauges(self) -> dict[str, float]:
        """Median and 95th percentile of both, absent before the first."""
        named = (("reload_pause_ms", self.pause_ms), ("publish_to_serving_ms", self.publish_to_serving_ms))
        filled = [(name, samples) for name, samples in named if samples]
        return {
            f"{name}_p{share}": float(np.percentile(samples, share, method="inverted_cdf"))
            for name, samples in filled
            for share in (50, 95)
        }


class PolicyFollower:
    """Moves the engine of a role along the versions of its policy.

    gate: when it may reload, at once by default. hold_s: how long a reload waits at the gate. channel: see PolicyFeed. loaded:
    called with the event of every version that serves. directed: called with every directive. slow_s: a fetch is counted and
    logged each time it has taken this long.
    """

    def __init__(
        self,
        role: Role,
        engine: Engine,
        *,
        gate: ReloadGate | None = None,
        hold_s: float = 0.0,
        channel: Channel = "candidate",
        loaded: Callable[[PolicyEvent], None] = lambda event: None,
        directed: Callable[[Directive], None] = lambda directive: None,
        slow_s: float = SLOW_S,
    ) -> None:
        self._role = role
        self._engine = engine
        self._gate = gate or ReloadGate()
        self._hold_s = hold_s
        self._policy = role.floor.policy.name
        self._channel: Channel = channel
        self._loaded = loaded
        self._directed = directed
        self._slow_s = slow_s
        self._feed = PolicyFeed(self._policy, channel=channel)
        # Where the engine has a place from which its workers read versions.
        self._files: VersionFiles | None = getattr(engine, "version_files", None)
        if self._files is not None:
            self._files.metrics = role.metrics
        self._fetcher = self._new_fetcher()
        self._published_ms: dict[int, int] = {}
        self._since_ms = time.time() * 1000
        self._refused: dict[int, str] = {}
        self._doubted: set[int] = set()  # refused once
        self._num_failures = 0  # of the store, in a row
        self._changed = asyncio.Event()
        self._lacks = asyncio.Event()
        self.caught_up = asyncio.Event()
        self.settled = asyncio.Event()  # once a version serves, or none was there to load
        self.times = ReloadTimes()

    @property
    def stable(self) -> Stable:
        """Versions that the channels serve, as far as `policies` was read."""
        return self._feed.stable

    @property
    def refused(self) -> dict[int, str]:
        """Newest versions that were given up, each with its reason."""
        return {version: self._refused[version] for version in sorted(self._refused)[-MAX_REFUSED:]}

    async def read(self) -> None:
        """Follow `policies` from its newest summary, or its beginning; `load` waits until this has caught up.

        Read again from the beginning once the gate wants a version that only events before the summary announce.
        """
        self._lacks.clear()
        summary = await newest_summary(self._role.log)
        try:
            await unless(self._lacks.wait(), self._follow(summary), _Lacking)
        except _Lacking:
            _log.info("policies_read_whole: a version is wanted that was published before the summary")
            self._lacks.clear()
            await self._follow(None)

    async def _follow(self, summary: Summary | None) -> None:
        self.caught_up.clear()
        since = None if summary is None else summary.of(self._policy)
        feed = PolicyFeed(self._policy, channel=self._channel, since=since)
        await follow(
            self._role.log,
            POLICIES,
            partial(self._apply, feed),
            metrics=self._role.metrics,
            caught_up=self.caught_up,
            changed=lambda at: self._take_over(feed),
            starts="beginning" if summary is None else {0: summary.below},
        )

    async def load(self) -> None:
        """Bring the engine forward, one version after the other."""
        await self._gate.known()
        while True:
            await self.caught_up.wait()
            self._changed.clear()
            event = self._next()
            if event is None:
                if not self._lacks.is_set():
                    self.settled.set()
                await self._changed.wait()
                continue
            await self.bring(event)

    async def bring(self, event: PolicyEvent) -> None:
        """Fetch the version of an event and swap to it, or say why not."""
        policy = await self._fetch(event)
        if policy is not None:
            held = self._engine.version
            if not await self._gate.released(held, self._hold_s):
                _log.warning("eval_hold_expired version=%d", held)
            await self._swap(policy, event)

    def _apply(self, feed: PolicyFeed, message: LogMessage) -> None:
        if isinstance(message.value, Directive):
            feed.fence(message.value, message.offset)
            self._directed(message.value)
        elif isinstance(message.value, PolicyEvent) and feed.apply(message.value, message.offset):
            self._published_ms[message.value.version] = message.timestamp_ms

    def _take_over(self, feed: PolicyFeed) -> None:
        if not self.caught_up.is_set():
            return
        self._feed = feed
        self._changed.set()
        if feed.events:
            self._role.metrics.gauge("policy_version_published").set(feed.newest)
        self._role.metrics.gauge("policy_version_stable").set(feed.stable.version)

    def _next(self) -> PolicyEvent | None:
        held, wanted = self._engine.version, self._gate.wanted()
        self._feed.forget_below(held)
        if self._feed.lacks(held, pinned=wanted, refused=self._refused):
            self._lacks.set()
            return None
        return self._feed.next(held, pinned=wanted, refused=self._refused)

    async def _fetch(self, event: PolicyEvent) -> Policy | None:
        """The verified policy; None if it was refused, or if the store failed and a retry is due. A refused version is fetched
        once more as a full copy.
        """
        fetcher = self._new_fetcher() if event.version in self._doubted else self._fetcher
        try:
            policy = await self._fetched(fetcher, event)
        except PolicyRefused as error:
            self._refuse(event, error)
            return None
        except StoreError as error:
            self._role.metrics.counter("policy_fetch_failed").inc()
            _log.warning("policy_fetch_failed version=%d error=%s", event.version, error)
            await asyncio.sleep(_RETRY_S[min(self._num_failures, len(_RETRY_S) - 1)])
            self._num_failures += 1
            return None
        self._fetcher, self._num_failures = fetcher, 0
        return policy

    def _new_fetcher(self) -> PolicyFetcher:
        return PolicyFetcher(self._role.store, self._policy, self._files)

    async def _fetched(self, fetcher: PolicyFetcher, event: PolicyEvent) -> Policy:
        """The verified policy; a fetch that still runs is counted and logged every `slow_s`."""
        fetching = asyncio.ensure_future(asyncio.to_thread(fetcher.fetch, event))
        began = time.monotonic()
        try:
            while not (await asyncio.wait([fetching], timeout=self._slow_s))[0]:
                self._role.metrics.counter("policy_fetch_slow").inc()
                _log.warning("policy_fetch_slow version=%d for_s=%.0f", event.version, time.monotonic() - began)
        finally:
            fetching.cancel()
        return fetching.result()

    async def _swap(self, policy: Policy, event: PolicyEvent) -> None:
        try:
            with self._gate.reload():
                reach("explore.before_swap")
                report = await self._engine.load(policy)
        except PolicyRefused as error:
            self._refuse(event, error)
            return
        reach("explore.after_swap")
        self._loaded(event)
        self.settled.set()
        _log.info("serving version=%d token=%d", event.version, event.token)
        self._record(policy.version, report)

    def _record(self, version: int, report: LoadReport) -> None:
        metrics = self._role.metrics
        metrics.counter("reloads").inc()
        metrics.gauge("policy_version").set(version)
        self.times.pause_ms.append(report.pause_ms)
        published_ms = self._published_ms.pop(version, 0)
        if published_ms >= self._since_ms:  # older ones waited for this process to begin
            self.times.publish_to_serving_ms.append(max(0.0, time.time() * 1000 - published_ms))
        for old in [known for known in self._published_ms if known < version]:
            del self._published_ms[old]
        _log.info("reloaded version=%d pause_ms=%.1f probe=%.2g", version, report.pause_ms, report.probe_abs_max)

    def _refuse(self, event: PolicyEvent, error: PolicyRefused) -> None:
        """Count a refusal. The first leads to another fetch; the second gives the version up, which the role's reports say."""
        self._role.metrics.counter("policies_refused").inc()
        _log.warning("policy_refused version=%d error=%s", event.version, error)
        if event.version in self._doubted:
            self._refused[event.version] = str(error)
        self._doubted.add(event.version)
