"""Data that an app keeps, with sizes and bounds, for `headrace status --kept`.

Nothing is listed or read for it: topics are asked for their first and last offset, roles report their sizes, and files, of
which the rows of the console's index are counted, are of the machine where it is asked. How large folders of the store are, the
bucket says; here is what bounds them.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from infra.cli.settings import Settings
from infra.ledger.index import FILE, bounds, read_only, sizes
from infra.log.log import Log
from infra.store.snapshots import KEPT
from schemas import topics
from trainer.config import SLOTS

# What grows for as long as the app lives, and by what (how that was had: infra/docs/measured/records.md). Why nothing of it
# may be removed: see `schemas.topics`.
FOREVER: Mapping[str, str] = {
    topics.EXPERTS.name: "for ever: what is loaded",
    topics.EVALS.name: "for ever: the answers to each suite of each version that it was asked of, 4 kB one of 512 tokens",
    topics.POLICIES.name: "for ever: about two records a version, 1 GB a year at one each 30 s",
}


class Kept(msgspec.Struct, frozen=True):
    """Data with its bound and the setting of that, and its size now, None where that is not known here."""

    what: str
    bound: str
    num: int | None = None
    unit: str = "records"


async def list_kept(log: Log, settings: Settings, roles: Sequence[Mapping[str, Any]]) -> list[Kept]:
    """Everything an app keeps. roles: as `status` has them. Raises BrokerUnavailable."""
    held = await asyncio.gather(*(log.bounds(topic) for topic in topics.ALL))
    of_topics = [
        Kept(f"topic {topic.name}", topic_bound(topic, settings.keep.replay), sum(ends.values()) - sum(begins.values()))
        for topic, (begins, ends) in zip(topics.ALL, held, strict=True)
    ]
    return [*of_topics, *_in_store(settings, roles), *_at_roles(settings, roles), *_in_files(settings)]


def topic_bound(topic: topics.Topic, replay: str) -> str:
    """Bound of a topic. Records of a compacted one are at most as many as there were."""
    if topic.retention == "forever":
        return FOREVER[topic.name]
    if topic is topics.BATCHES:
        return f"{replay} (keep.replay), and back to the checkpoint before it"
    return {
        "keep": f"{replay} (keep.replay)",
        "day": "a day",
        "compact": "the newest of each task",
        "trimmed": "the oldest checkpoint that is kept",
    }[topic.retention]


def _in_store(settings: Settings, roles: Sequence[Mapping[str, Any]]) -> Iterable[Kept]:
    replay, newest = f"{settings.keep.replay} (keep.replay)", settings.trainer.keep_checkpoints
    yield Kept("store policies/", f"{replay}, and what those build on")
    yield Kept("store checkpoints/", f"the newest {newest} (trainer.keep_checkpoints), and {SLOTS + 2} of {replay}")
    stored = [int(role["stored_bytes"]) + int(role["gauges"].get("master_snapshot_bytes", 0)) for role in roles]
    yield Kept("store snapshots/, each", f"the newest {KEPT} of each partition and of the master", sum(stored), "bytes")
    yield Kept("store blobs/", f"frames {replay}, images for ever: what tasks and demonstrations show")
    yield Kept("store keys/, gateway/", "for ever: a key a user, emptied by forget; API keys")


def _at_roles(settings: Settings, roles: Sequence[Mapping[str, Any]]) -> Iterable[Kept]:
    gateway = settings.gateway
    for role in roles:
        gauges, where = role["gauges"], role["instance"]
        if gateway is not None and "spool_bytes" in gauges:
            bound = f"{gateway.spool_mb} MB (gateway.spool_mb)"
            yield Kept(f"spool of {where}", bound, int(gauges["spool_bytes"]), "bytes")
        if "run_stored_bytes" in gauges:
            bound = f"{settings.keep.store_gb:g} GB (keep.store_gb), or the newest"
            yield Kept("store policies/, checkpoints/", bound, int(gauges["run_stored_bytes"]), "bytes")
        if "uses_remembered" in gauges:
            bound = f"{settings.keep.replay} (keep.replay)"
            yield Kept(f"uses at {where}", bound, int(gauges["uses_remembered"]), "groups")


def _in_files(settings: Settings) -> Iterable[Kept]:
    """The index of the log, and its tables; where it cannot be read, what bounds them."""
    path: Path = settings.folder / "state" / FILE
    if not path.exists():
        return
    yield Kept(f"file state/{FILE}", "rows of what the topics keep", path.stat().st_size, "bytes")
    rows: dict[str, int] = {}
    with contextlib.suppress(sqlite3.Error), contextlib.closing(read_only(path)) as database:
        rows = sizes(database)
    for table, bound in bounds(settings.keep.replay).items():
        yield Kept(f"index {table}", bound, rows.get(table), "rows")


def kept_lines(kept: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each bound.

    >>> kept_lines([{"what": "topic tasks", "num": 1200, "unit": "records", "bound": "30d (keep.replay)"}])
    ['30d (keep.replay): topic tasks 1,200 records']
    """
    found: dict[str, list[str]] = {}
    for entry in kept:
        found.setdefault(entry["bound"], []).append(entry["what"] + _size(entry))
    return [f"{bound}: {', '.join(what)}" for bound, what in found.items()]


def _size(entry: Mapping[str, Any]) -> str:
    if entry["num"] is None:
        return ""
    return f" {entry['num'] / 1e6:,.1f} MB" if entry["unit"] == "bytes" else f" {entry['num']:,} {entry['unit']}"
