"""The whole system for as long as one likes, under traffic and kills: what grows, and by how much.

    python -m tests.soak --minutes 120 [--settle 10] [--seed 1] [--dir FOLDER]

Every role as a process around a real broker, with users at the gateways. Of explorers, stream workers and gateways there are
two: the second is killed at random moments, the first is measured. Trainer and master, of which there is one, are killed
until the system has settled, and measured from then on. A table says what each held at the end and how much it grew by the
hour, with its 95 % interval (least squares; samples that follow each other are alike, so it is a narrow one); a plot lies
in the folder. The exit code is 1 where something that was stored was lost. Answers that a killed gateway still had in
memory are counted apart: they were given, and are not recorded.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from infra.local.broker import EmbeddedKafka
from tests.e2e.light_system import REPOSITORY, Fleet, Users, opened, prepare

APP = "soak"
SINGLE = ("train", "master")
DOUBLE = ("process", "explore", "serve")
SAMPLE_S = 5.0
PAUSE_S = (15.0, 45.0)  # between kills
PER_S = 4.0
PAGE_MB = 4096 / 2**20


class Sample(msgspec.Struct, frozen=True):
    """One look. at_s: since the start."""

    at_s: float
    values: dict[str, float]


def of_process(pid: int) -> dict[str, float]:
    """Resident memory in MB, descriptors, threads; empty for one that has gone."""
    place = Path("/proc") / str(pid)
    try:
        resident = int((place / "statm").read_text().split()[1])
        return {
            "MB": resident * PAGE_MB,
            "descriptors": len(list((place / "fd").iterdir())),
            "threads": len(list((place / "task").iterdir())),
        }
    except (FileNotFoundError, ProcessLookupError):
        return {}


def size_mb(folder: Path) -> float:
    """Blocks taken on disk: a topic's index files are written ahead of what is in them."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return found / 2**20


def on_disk(folder: Path) -> dict[str, float]:
    """MB of each topic, of what versions weigh, and of the rest of the store."""
    topics: dict[str, float] = defaultdict(float)
    for place in (folder / "kafka" / "data").glob(f"{APP}.*"):
        topics[f"topic {place.name.removeprefix(f'{APP}.').rpartition('-')[0]} MB"] += size_mb(place)
    parts = {f"store {place.name} MB": size_mb(place) for place in (folder / "store").iterdir() if place.is_dir()}
    return {**topics, **parts}


def growth(samples: list[Sample], name: str, after_s: float) -> tuple[float, float] | None:
    """By the hour, with the half of its 95 % interval; None for fewer than three samples."""
    found = [(one.at_s / 3600, one.values[name]) for one in samples if one.at_s >= after_s and name in one.values]
    if len(found) < 3:
        return None
    hours, values = np.array(found).T
    hours = hours - hours.mean()
    slope = float(hours @ values / (hours @ hours))
    rest = values - values.mean() - slope * hours
    error = float(np.sqrt(rest @ rest / (len(found) - 2) / (hours @ hours)))
    return slope, 1.96 * error


async def sample(folder: Path, measured: dict[str, int], samples: list[Sample], started_s: float) -> None:
    """Look, until cancelled."""
    while True:
        values = {f"{name} {what}": one for name, pid in measured.items() for what, one in of_process(pid).items()}
        samples.append(Sample(time.monotonic() - started_s, values | await asyncio.to_thread(on_disk, folder)))
        await asyncio.sleep(SAMPLE_S)


async def soak(folder: Path, *, minutes: float, settle: float, seed: int) -> tuple[list[Sample], dict[str, object]]:
    """Run it; the samples, and what the ledgers say."""
    chosen, samples = random.Random(seed), list[Sample]()
    with EmbeddedKafka(folder / "kafka") as broker, Fleet(folder) as fleet:
        key = prepare(folder, broker.bootstrap, app=APP)
        made = fleet.call(REPOSITORY, "check", "--create")
        assert made.returncode == 0, made.stdout + made.stderr
        async with opened(folder, broker.bootstrap, APP, fleet, Users(key=key)) as system:
            names = (*SINGLE, *DOUBLE)
            firsts = dict(
                zip(names, await asyncio.gather(*(system.start(REPOSITORY, one) for one in names)), strict=True)
            )
            seconds = {one: await system.start(REPOSITORY, one) for one in DOUBLE}
            loaded = fleet.call(REPOSITORY, "load", "tasks", str(folder / "tasks.jsonl"))
            assert loaded.returncode == 0, loaded.stderr
            started_s = time.monotonic()
            assert broker.pid is not None
            measured = {"kafka": broker.pid} | {name: one.pid for name, one in firsts.items()}
            users = asyncio.create_task(system.users.come(PER_S))
            looking = asyncio.create_task(sample(folder, measured, samples, started_s))
            kills = 0
            while time.monotonic() - started_s < minutes * 60:
                await asyncio.sleep(
                    min(chosen.uniform(*PAUSE_S), max(0.0, started_s + minutes * 60 - time.monotonic()))
                )
                settled = time.monotonic() - started_s > settle * 60
                role = chosen.choice(DOUBLE if settled else names)
                group = firsts if role in SINGLE else seconds
                await system.kill(group[role])
                group[role] = await system.start(REPOSITORY, role)
                measured |= {role: group[role].pid} if role in SINGLE else {}
                kills += 1
                say(f"{role} killed and back; {len(system.users.held)} answers")
            system.users.gone = True
            await users
            looking.cancel()
            await system.stop_all()
            return samples, {"minutes": minutes, "kills": kills, **await system.judged()}


def table(samples: list[Sample], judged: dict[str, object], settle_s: float) -> Table:
    """What a person reads."""
    shown = Table("what", "at the end", "growth an hour", "±", title="soak")
    for name in sorted({name for one in samples for name in one.values}):
        last = next(one.values[name] for one in reversed(samples) if name in one.values)
        slope = growth(samples, name, settle_s)
        figures = (f"{slope[0]:+.2f}", f"{slope[1]:.2f}") if slope else ("too short", "")
        shown.add_row(name, f"{last:.1f}", *figures)
    for name, value in judged.items():
        shown.add_row(name.replace("_", " "), str(value), "", "")
    return shown


def plot(samples: list[Sample], path: Path) -> None:
    """Memory of each role, and what lies on disk, over minutes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for name in sorted({name for one in samples for name in one.values if name.endswith(" MB")}):
        side = right if name.startswith(("topic ", "store ")) else left
        found = [(one.at_s / 60, one.values[name]) for one in samples if name in one.values]
        side.plot([at for at, _ in found], [value for _, value in found], label=name.removesuffix(" MB"))
    for side, title in ((left, "resident memory, MB"), (right, "on disk, MB")):
        side.set(xlabel="minutes", title=title, ylim=(0, None))
        side.grid(alpha=0.3)
        side.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def say(line: str) -> None:
    """To stderr: the table is on stdout."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Exit code 1 where something was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=10.0, help="minutes that are left out of the growth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keep the run's folder here (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = (options.dir or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        samples, judged = asyncio.run(soak(folder, minutes=options.minutes, settle=options.settle, seed=options.seed))
        if options.dir:
            plot(samples, folder / "soak.png")
            (folder / "samples.json").write_bytes(msgspec.json.encode(samples))
    Console().print(table(samples, judged, options.settle * 60))
    return 1 if judged["lost"] or judged["trained_twice"] or not judged["audit_clean"] else 0


if __name__ == "__main__":
    sys.exit(main())
