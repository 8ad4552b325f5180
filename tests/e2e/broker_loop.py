"""Kills one of three brokers after the other under a light load, and says whether the promises held.

    python -m tests.e2e.broker_loop --kills 100 --seed 1 [--dir FOLDER]

Any of the three, at a random moment, also while another catches up: SIGKILL, started again at once. After every 20th
kill the three are restarted in turn, as an upgrade does it. Leaders move with each, and back in calm. A table says what came of
it; the exit code is 1 where a promise was broken. The same seed draws the same shots; when they hit depends on the machine.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import msgspec
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table

from tests.actors.rig import until
from tests.e2e.broker_load import loaded
from tests.e2e.crash_loop import percentile
from tests.e2e.three_brokers import NODES, Leaders, ThreeBrokers, Watcher

ROLLING_EVERY = 20
LOOK_S = 0.5
GROUPS_PER_S = 4.0  # of each of the two writers


class BrokerLoopResult(msgspec.Struct):
    """What was done, and what the cluster did. back_s: of each kill or restart, until the broker answered again."""

    kills: dict[int, int] = msgspec.field(default_factory=lambda: defaultdict(int))
    restarts: dict[int, int] = msgspec.field(default_factory=lambda: defaultdict(int))
    back_s: list[float] = []
    moves: int = 0


async def watch_leaders(bootstrap: str, found: BrokerLoopResult) -> None:
    """Count partitions whose leader is another than at the last look."""
    before: Leaders = {}
    async with Watcher(bootstrap) as watcher:
        while True:
            with suppress(KafkaError, TimeoutError):
                now = await asyncio.wait_for(watcher.leaders(), 10.0)
                known = {at: leader for at, leader in now.items() if leader >= 0}
                found.moves += sum(before.get(at, leader) != leader for at, leader in known.items())
                before |= known
            await asyncio.sleep(LOOK_S)


async def shoot(
    cluster: ThreeBrokers, found: BrokerLoopResult, kills: int, seed: int, pause_s: tuple[float, float]
) -> None:
    """Every broker as often as another, in random order; a rolling restart after every 20th kill, and at the end."""
    chosen = random.Random(seed)
    targets = [node for _ in range(kills // len(NODES) + 1) for node in chosen.sample(NODES, len(NODES))][:kills]
    for number, node in enumerate(targets, 1):
        await asyncio.sleep(chosen.uniform(*pause_s))
        since_s = time.monotonic()
        await asyncio.to_thread(cluster.kill, node)
        await asyncio.to_thread(cluster.start, node)
        found.kills[node] += 1
        found.back_s.append(time.monotonic() - since_s)
        say(f"kill {number} of {kills}: broker {node} back after {found.back_s[-1]:.1f} s")
        if number % ROLLING_EVERY == 0 or number == kills:
            for other in NODES:
                since_s = time.monotonic()
                await asyncio.to_thread(cluster.restart, other)
                found.restarts[other] += 1
                found.back_s.append(time.monotonic() - since_s)
            say("restarted all three in turn")


async def attacked(
    cluster: ThreeBrokers, app: str, folder: Path, *, kills: int, seed: int, pause_s: tuple[float, float] = (0.2, 2.0)
) -> tuple[BrokerLoopResult, dict[str, object]]:
    """Load, shots, drain; what was done, and what the ledgers say."""
    found, started_s = BrokerLoopResult(), time.monotonic()
    async with loaded(cluster.bootstrap, app, folder, GROUPS_PER_S) as load:
        watching = asyncio.create_task(watch_leaders(cluster.bootstrap, found))
        await until(lambda: len(load.seen) > 10, seconds=60.0)  # both writers and the reader work
        await shoot(cluster, found, kills, seed, pause_s)
        load.finish()
        say("draining")
        await load.drained()
        judged = await load.judged()
        watching.cancel()
    return found, {**judged, "minutes": round((time.monotonic() - started_s) / 60, 1)}


def table(found: BrokerLoopResult, judged: dict[str, object]) -> Table:
    """What a person reads."""
    shown = Table("what", "figure", title="three brokers, replication 3, two in sync")
    for node in NODES:
        shown.add_row(f"broker {node}", f"killed {found.kills[node]}, restarted {found.restarts[node]}")
    times = ", ".join(
        f"{name} {percentile(found.back_s, share)}" for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    )
    shown.add_row("back after, s", times)
    shown.add_row("leaders moved", f"{found.moves} times")
    for name, value in judged.items():
        shown.add_row(name.replace("_", " "), str(value))
    return shown


def held(judged: dict[str, object]) -> bool:
    """Whether the promises held."""
    return judged["audit_clean"] is True and not any(
        judged[name] for name in ("lost", "trained_twice", "not_read", "pending", "shed")
    )


def say(line: str) -> None:
    """To stderr: the table is on stdout."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how often a broker is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keep the run's folder here (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="broker-loop-") as temporary:
        folder = (options.dir or Path(temporary) / "run").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=folder / "loop.log", level=logging.INFO)
        with ThreeBrokers(folder / "kafka") as cluster:
            found, judged = asyncio.run(attacked(cluster, "loop", folder, kills=options.kills, seed=options.seed))
    Console().print(table(found, judged))
    return 0 if held(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
