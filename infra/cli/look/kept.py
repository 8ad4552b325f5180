"""Data that an app keeps, with sizes and bounds, for `headrace status --kept`.

The command reads no records and lists no objects: brokers return the first and last offset of a topic, roles report sizes, and
files and rows of the console's index are counted on this machine. Folders of the store have a bound here and no size, which
only the bucket knows.
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

# Topics that grow for the life of an app, with the measured growth (infra/docs/measured/records.md). `schemas.topics` says why
# they have no retention.
FOREVER: Mapping[str, str] = {
    topics.EXPERTS.name: "no limit: every loaded demonstration",
    topics.EVALS.name: "no limit: every answer of an eval, 4 kB for 512 tokens",
    topics.POLICIES.name: "no limit: about two records per version, 1 GB a year with a version every 30 s",
}


class Kept(msgspec.Struct, frozen=True):
    """Data of an app. bound: in words, with the setting's name. num: present size in `unit`, None if unknown here."""

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
    """Bound of a topic, in words."""
    if topic.retention == "forever":
        return FOREVER[topic.name]
    if topic is topics.BATCHES:
        return f"{replay} (keep.replay), extended to the checkpoint before"
    return {
        "keep": f"{replay} (keep.replay)",
        "day": "a day",
        "compact": "the newest record of each task",
        "trimmed": "records after the oldest checkpoint",
    }[topic.retention]


def _in_store(settings: Settings, roles: Sequence[Mapping[str, Any]]) -> Iterable[Kept]:
    replay, newest = f"{settings.keep.replay} (keep.replay)", settings.trainer.keep_checkpoints
    yield Kept("store policies/", f"{replay}, and the versions that their deltas need")
    yield Kept("store checkpoints/", f"newest {newest} (trainer.keep_checkpoints), {SLOTS + 2} spread over {replay}")
    stored = [int(role["stored_bytes"]) + int(role["gauges"].get("master_snapshot_bytes", 0)) for role in roles]
    yield Kept("store snapshots/, each", f"the newest {KEPT} of each partition and of the master", sum(stored), "bytes")
    yield Kept("store blobs/", f"frames {replay}; images of tasks and demonstrations without a limit")
    yield Kept("store keys/, gateway/", "no limit: one key per user, which forget empties; API keys")


def _at_roles(settings: Settings, roles: Sequence[Mapping[str, Any]]) -> Iterable[Kept]:
    gateway = settings.gateway
    for role in roles:
        gauges, where = role["gauges"], role["instance"]
        if gateway is not None and "spool_bytes" in gauges:
            bound = f"{gateway.spool_mb} MB (gateway.spool_mb)"
            yield Kept(f"spool of {where}", bound, int(gauges["spool_bytes"]), "bytes")
        if "run_stored_bytes" in gauges:
            bound = f"{settings.keep.store_gb:g} GB (keep.store_gb), but at least the newest"
            yield Kept("store policies/, checkpoints/", bound, int(gauges["run_stored_bytes"]), "bytes")
        if "uses_remembered" in gauges:
            bound = f"{settings.keep.replay} (keep.replay)"
            yield Kept(f"uses at {where}", bound, int(gauges["uses_remembered"]), "groups")


def _in_files(settings: Settings) -> Iterable[Kept]:
    """The index of the log and its tables; tables of an unreadable index have a bound and no size."""
    path: Path = settings.folder / "state" / FILE
    if not path.exists():
        return
    yield Kept(f"file state/{FILE}", "rows for the records in the topics", path.stat().st_size, "bytes")
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
