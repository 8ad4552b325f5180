"""The whole system for as long as one likes, under traffic and kills: what grows, and by how much.

    nice python -m tests.soak --minutes 120 --dir FOLDER [--settle 10] [--seed 1]

Every role as a process around a real broker, with users at the gateways. Of explorers, stream workers and gateways there are
two: the second is killed at random moments, the first stays. Trainer and master, of which there is one, are killed in the
first ten minutes (`--settle`) only. Tables say what each process held and how much it grew by the hour (`tests.growth`: lines
begin ten minutes after its start), and what lies on disk by topic and by version. `FOLDER/soak.json` has every look,
`FOLDER/soak.png` is the picture; both are written anew every minute. The exit code is 1 where something that was stored was
lost or trained twice, or a request failed that no kill cut off. Answers that a killed gateway still had in memory are counted
apart: they were given, and are not recorded.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec
from rich.console import Console

from infra.local.broker import EmbeddedKafka
from tests.e2e.light_system import REPOSITORY, Fleet, LightSystem, Running, opened, prepare
from tests.growth import DISK, Look, ProcessLife, of_process, plot, size_mb, tables

APP = "soak"
SINGLE = ("train", "master")
DOUBLE = ("process", "explore", "serve")
LOOK_S = 5.0
WRITE_S = 60.0
PAUSE_S = (15.0, 45.0)  # between kills
PER_S = 4.0
TABLE_WIDTH = 140


def on_disk(folder: Path) -> dict[str, float]:
    """MB of each topic, of the parts of the store, and of what roles keep beside them; versions, and KB of one."""
    found: dict[str, float] = defaultdict(float)
    for place in sorted((folder / "kafka" / "data").glob(f"{APP}.*")):
        found[f"topic {place.name.removeprefix(f'{APP}.').rpartition('-')[0]} MB"] += size_mb(place)
    for place in sorted((folder / "store").iterdir()):
        found[f"store {place.name} MB"] = size_mb(place)
    for name in ("state", "spool", "logs"):
        found[f"{name} MB"] = size_mb(folder / name) if (folder / name).exists() else 0.0
    versions = sum(1 for _ in (folder / "store" / "policies").glob("*/*/manifests/*.json"))
    per_version = found.get("store policies MB", 0.0) * 1024 / max(1, versions)
    return {**found, "versions": float(versions), "KB per version": per_version}


class Soak:
    """A run: who runs, and every look at them."""

    def __init__(self, folder: Path, system: LightSystem, broker_pid: int) -> None:
        self.folder, self.system = folder, system
        self.started_s = time.monotonic()
        self.lives = [ProcessLife("kafka", 0.0), ProcessLife(DISK, 0.0)]
        self.kills = 0
        self._pids: dict[str, int] = {"kafka": broker_pid}
        self._running: dict[str, Running] = {}

    @property
    def now_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started_s

    async def start(self, name: str) -> None:
        """A process of a role: "explore 2" is the second one of explore."""
        began_s = self.now_s
        one = await self.system.start(REPOSITORY, name.partition(" ")[0])
        self._running[name], self._pids[name] = one, one.pid
        self.lives.append(ProcessLife(name, began_s))

    async def look(self) -> None:
        """Until cancelled; every minute what is known so far is written."""
        written_s = 0.0
        while True:
            at_s = self.now_s
            now = {life.name: life for life in self.lives}
            for name, pid in tuple(self._pids.items()):
                if values := of_process(pid):
                    now[name].looks.append(Look(at_s, values))
            now[DISK].looks.append(Look(at_s, await asyncio.to_thread(on_disk, self.folder)))
            if at_s >= written_s + WRITE_S:
                written_s = at_s
                await asyncio.to_thread(self.write)
            await asyncio.sleep(LOOK_S)

    def write(self) -> None:
        """What is known so far."""
        (self.folder / "soak.json").write_bytes(msgspec.json.encode(self.lives))
        plot(self.lives, self.folder / "soak.png")

    async def kill(self, minutes: float, settle: float, seed: int) -> None:
        """One after the other, at random moments; the next once the last works again."""
        chosen = random.Random(seed)
        seconds = tuple(f"{role} 2" for role in DOUBLE)
        while self.now_s < minutes * 60:
            await asyncio.sleep(min(chosen.uniform(*PAUSE_S), max(0.0, minutes * 60 - self.now_s)))
            name = chosen.choice(seconds if self.now_s > settle * 60 else (*SINGLE, *seconds))
            del self._pids[name]
            await self.system.kill(self._running[name])
            await self.start(name)
            self.kills += 1
            say(f"{self.now_s / 60:.1f} min: {name} killed and back; {len(self.system.users.held)} answers")


async def soak(
    folder: Path, *, minutes: float, settle: float, seed: int, dtype: str
) -> tuple[list[ProcessLife], dict[str, object]]:
    """Run it; who lived, and what the ledgers say."""
    with EmbeddedKafka(folder / "kafka") as broker:
        key = prepare(folder, broker.bootstrap, app=APP, dtype=dtype)
        assert broker.pid is not None
        with Fleet(folder) as fleet:
            made = fleet.call(REPOSITORY, "check", "--create")
            assert made.returncode == 0, made.stdout + made.stderr
            async with opened(broker.bootstrap, APP, fleet, key) as system:
                run = Soak(folder, system, broker.pid)
                await asyncio.gather(*(run.start(name) for name in (*SINGLE, *DOUBLE)))
                await asyncio.gather(*(run.start(f"{role} 2") for role in DOUBLE))
                loaded = fleet.call(REPOSITORY, "load", "tasks", str(folder / "tasks.jsonl"))
                assert loaded.returncode == 0, loaded.stderr
                async with asyncio.TaskGroup() as group:
                    group.create_task(system.users.come(PER_S))
                    looking = group.create_task(run.look())
                    await run.kill(minutes, settle, seed)
                    system.users.leave()
                    looking.cancel()
                ended = await system.stop_all()
                run.write()
                judged = {"minutes": minutes, "kills": run.kills, "ended otherwise": ended, **await system.judged()}
                return run.lives, judged


def held(judged: dict[str, object]) -> bool:
    """Whether the promises held."""
    broken = ("failed", "lost", "trained_twice", "answers_stored_twice", "ended otherwise")
    return judged["audit_clean"] is True and not any(judged[name] for name in broken)


def say(line: str) -> None:
    """To stderr: the tables are on stdout."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--settle", type=float, default=10.0, help="minutes after a start that are left out of its growth"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="of the weights; in float32 nearly all change, so each version is stored whole; bfloat16: deltas",
    )
    parser.add_argument("--dir", type=Path, help="keep the run's folder here (default: a temporary one)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: nothing stays behind
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = (options.dir or Path(temporary) / "run").resolve()
        found = asyncio.run(
            soak(folder, minutes=options.minutes, settle=options.settle, seed=options.seed, dtype=options.dtype)
        )
    for table in tables(found[0], options.settle * 60):
        Console(width=TABLE_WIDTH).print(table)
    for name, value in found[1].items():
        print(f"{name.replace('_', ' ')}: {value}")
    return 0 if held(found[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
