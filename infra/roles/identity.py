"""Check that a log and a store belong together.

The first record of `policies`, which no retention removes, identifies a log: its bytes and the broker's time. The first trainer
of an app writes both to the store, under `identity/`. Guarantee: a role that calls `require_fit` before it begins never works
with a store of another log, with a log that lost its data, or with a store that lost its own; it ends with one line that names
the fault and the remedy.
"""

import asyncio
import datetime
import hashlib
import logging
from contextlib import aclosing
from typing import Literal

import msgspec

from infra.log.bus import digest_of
from infra.log.log import Log
from infra.policies.beginning import folded
from infra.settings.config import Floor
from infra.store.store import Store
from schemas.errors import ConfigError, NotInStore
from schemas.topics import POLICIES

READS = 3
HELPS = (
    "put the missing one back, or name a log and a store of one run in [kafka] and [store]; or run `headrace recover`"
)

logger = logging.getLogger(__name__)

Verdict = Literal["new", "unclaimed", "fits", "log lost", "other log", "store lost"]


class Begun(msgspec.Struct, frozen=True):
    """Identity of a log: digest of its first record (BLAKE2b-128 in hex) and that record's time."""

    digest: str
    time_ms: int

    def __str__(self) -> str:
        began = datetime.datetime.fromtimestamp(self.time_ms / 1000, datetime.UTC)
        return f"{self.digest[:8]} (begun {began:%Y-%m-%d %H:%M} UTC)"


class Fit(msgspec.Struct, frozen=True):
    """Result of the check. here: identity of the log, None if it is empty. fault: fault and remedy in one line, "" for none.

    verdict: "new" if both are empty, "unclaimed" if the store names no log and no fault was found.
    """

    verdict: Verdict
    here: Begun | None = None
    fault: str = ""


async def fit_of(log: Log, store: Store, floor: Floor) -> Fit:
    """Compare log and store. Raises BrokerUnavailable, StoreError."""
    here = await log_beginning(log)
    named = await asyncio.to_thread(_named, store, floor.app)
    if here is None:
        first = await asyncio.to_thread(lambda: next(iter(store.keys(f"checkpoints/{floor.run or floor.app}/")), ""))
        if named is None and not first:
            return Fit("new")
        other = f"the log {named}" if named is not None else "another log"
        return Fit(
            "log lost", None, f'{store!r} belongs to {other}, and the log of app "{floor.app}" is empty: {HELPS}'
        )
    if named is not None and here != named:
        fault = f'{store!r} belongs to the log {named}, and the log of app "{floor.app}" is {here}: {HELPS}'
        return Fit("other log", here, fault)
    if named is not None:
        return Fit("fits", here)
    events = (await folded(log)).of(floor.policy.name).events
    newest = events[max(events)].manifest if events else ""
    if newest and not await asyncio.to_thread(_has, store, newest):
        return Fit(
            "store lost", here, f'the log of app "{floor.app}" names {newest}, which is not in {store!r}: {HELPS}'
        )
    return Fit("unclaimed", here)


async def require_fit(log: Log, store: Store, floor: Floor) -> None:
    """Raise ConfigError if log and store do not belong together."""
    fit = await fit_of(log, store, floor)
    if fit.fault:
        raise ConfigError(fit.fault)


async def claim(log: Log, store: Store, floor: Floor, *, overwrite: bool = False) -> None:
    """Write the log's identity to the store if it has none. overwrite: replace an identity that is there."""
    here = await log_beginning(log)
    if here is not None and (overwrite or await asyncio.to_thread(_named, store, floor.app) is None):
        await asyncio.to_thread(store.put, _key(floor.app), msgspec.json.encode((here, _sum(here))))


async def log_beginning(log: Log) -> Begun | None:
    """Identity of the log, None if `policies` is empty or missing."""
    if not await log.holds(POLICIES):
        return None
    async with aclosing(log.chunks(POLICIES, max_records=1)) as chunks:
        async for first, *_ in chunks:
            return Begun(digest_of(first), first.timestamp_ms)
    return None


def _named(store: Store, app: str) -> Begun | None:
    """Identity in the store; None if there is none, or if READS reads gave no intact one."""
    for _ in range(READS):
        try:
            named, digest = msgspec.json.decode(store.get(_key(app)), type=tuple[Begun, str])
        except NotInStore:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if digest == _sum(named):  # a store may return damaged bytes
            return named
    logger.warning("identity_broken store=%r key=%s: it will be written again", store, _key(app))
    return None


def _sum(log: Begun) -> str:
    return hashlib.blake2b(msgspec.json.encode(log), digest_size=16).hexdigest()


def _has(store: Store, key: str) -> bool:
    try:
        return store.size(key) >= 0
    except NotInStore:
        return False


def _key(app: str) -> str:
    return f"identity/{app}.json"
