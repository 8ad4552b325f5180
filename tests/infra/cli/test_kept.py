"""Whatever an app keeps has a bound that `status` shows, and a size where that costs nothing to ask."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec

from infra.cli.look.kept import FOREVER, Kept, bound_of, kept_lines, kept_of
from infra.cli.look.status import read_status
from infra.cli.settings import load_settings
from infra.ledger.index import FILE, LogIndex
from infra.log.bus import Partition
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import DeadLetter, Fence, PolicyEvent, Progress, topics
from tests.infra.cli.test_status_command import shown

SETTINGS = 'app = "t"\n[keep]\nreplay = "9d"\n[trainer]\nkeep_checkpoints = 5\n[gateway]\nspool_mb = 64\n'
GAUGES = {
    "spool_bytes": 2e6, "uses_remembered": 42.0, "host_cache_bytes": 3e9, "host_cache_max_bytes": 20e9,
    "snapshot_bytes{partition=0}": 5e6,
}  # fmt: skip


def look(folder: Path) -> tuple[dict[str, Kept], str]:
    async def main() -> tuple[dict[str, Kept], str]:
        (folder / "headrace.toml").write_text(SETTINGS)
        settings, log = load_settings(folder / "headrace.toml", []), Log(MemoryBus(), "t")
        await log.create_topics(partitions=2, keep_ms=-1)
        for number in range(5):
            letter = DeadLetter(stage="verify", reason="odd", topic="t", partition=0, offset=number)
            await log.publish(topics.DEAD_LETTERS, letter, partition=number % 2)
            await log.publish(topics.BATCHES, Fence(run="t", token=number))
        await log.bus.delete_records(Partition(log.name(topics.DEAD_LETTERS), 0), 2)
        await log.publish(topics.POLICIES, PolicyEvent(event="published", policy="main", version=1))
        await log.publish(topics.REPORTS, Progress(role="serve", instance="serve/vm/1", gauges=GAUGES))
        state = await read_status(log, now_s=0.0, max_lag=10)
        kept = await kept_of(log, settings, state["roles"])
        return {one.what: one for one in kept}, shown({**state, "kept": msgspec.to_builtins(kept)})

    return asyncio.run(main())


def test_every_topic_has_a_bound_or_says_what_it_grows_by() -> None:
    bounds = {topic.name: bound_of(topic, "9d") for topic in topics.ALL}
    endless = {name for name, bound in bounds.items() if bound.startswith("for ever: ")}
    assert endless == set(FOREVER) == {
        topic.name for topic in topics.ALL if topic.retention == "forever"
    }  # fmt: skip
    assert bounds["buffer"] == "the oldest checkpoint that is kept"
    assert (
        bounds["batches"] == "9d (keep.replay), and back to the checkpoint before it" and bounds["reports"] == "a day"
    )


def test_what_is_kept_is_shown_with_its_size_and_its_bound(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "index.sqlite").write_bytes(bytes(1_500_000))
    kept, screen = look(tmp_path)
    assert kept["topic dead-letters"] == Kept("topic dead-letters", "9d (keep.replay)", 3), "two were removed"
    assert kept["topic batches"].num == 5 and kept["topic batches"].bound.startswith("9d (keep.replay)")
    assert kept["spool of serve/vm/1"] == Kept("spool of serve/vm/1", "64 MB (gateway.spool_mb)", 2_000_000, "bytes")
    assert kept["uses at serve/vm/1"].num == 42
    assert kept["cache at serve/vm/1"].bound == "20 GB (store.cache_gb)"
    assert kept["store snapshots/, each"].num == 5_000_000
    assert "the newest 5 (trainer.keep_checkpoints)" in kept["store checkpoints/"].bound
    assert kept["file state/index.sqlite"].num == 1_500_000
    lines = " ".join(screen.split())
    assert "kept 9d (keep.replay), and back to the checkpoint before it: topic batches 5 records" in lines
    assert "kept 64 MB (gateway.spool_mb): spool of serve/vm/1 2.0 MB" in lines


def test_tables_of_the_index_are_shown_with_their_rows_and_bounds_and_without_rows_where_the_file_is_broken(
    tmp_path: Path,
) -> None:
    index = LogIndex(tmp_path / "state" / FILE, run="t", policy="main")
    with index.database as database:
        database.executemany("INSERT INTO curves VALUES ('loss', ?, 0, 0, 1)", [(n,) for n in range(7)])
    index.close()
    kept, screen = look(tmp_path)
    assert kept["index curves"] == Kept("index curves", "the newest 50,000 versions", 7, "rows")
    assert kept["index answers"] == Kept("index answers", "9d (keep.replay)", 0, "rows")
    assert "kept the newest 50,000 versions: index policies 0 rows, index curves 7 rows" in " ".join(screen.split())
    (tmp_path / "state" / FILE).write_bytes(b"no index at all" * 1000)
    kept, _ = look(tmp_path)
    assert kept["index curves"] == Kept("index curves", "the newest 50,000 versions", None, "rows")


def test_looking_at_what_is_kept_loads_no_torch() -> None:
    said = "import sys, infra.cli.look.status; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stdout == "False\n"


def test_what_is_bounded_alike_is_one_line(tmp_path: Path) -> None:
    kept, _ = look(tmp_path)
    lines = kept_lines([msgspec.to_builtins(one) for one in kept.values()])
    assert len(lines) == len({one.bound for one in kept.values()})
