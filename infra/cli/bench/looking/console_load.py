"""What it costs a run that people look at it: optimizer steps a second with a console and ten people, and without.

One run of the demo lasts throughout, past its warm-up, with so small a learning rate that it stays what it is: a policy
that learns comes to an end of what there is to learn, and of its steps. Pieces of the run come in pairs, one alone and one
looked at, in turns which comes first: so that what drifts over the run, and what else the machine does, falls on both.

    wait: warm-up over ─> [settle, piece alone] [console starts and catches up, settle, people look, piece] ─> …

In a piece alone no console runs; what one has missed since it ran last is read before its piece begins, so that a piece has
the reading of its own time in it. A piece's rate is taken between the first and the last step journaled in it.
`console_cpu_share_…` are cores that the console's processes take, before people look and while they do: reading the log
is in both. What a page takes by itself is measured by `headrace bench console`, over a log that rests.
"""

import asyncio
import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.bench.looking.looking import PageViews

if TYPE_CHECKING:
    from infra.cli.settings import Settings

LINK = "bench"
BEGIN_S = 1200.0  # for the demo to leave its warm-up
FIRST_STEPS = 10  # of reinforcement, before the first piece
ANSWER_S = 120.0  # for a console to answer, and again for it to catch up
CAUGHT_UP = 1000  # records: of about a second
LOOK_S = 2.0
ENDLESS = ("trainer.learning_rate=1e-6", 'master.stop.suite=""')


class LoadPlan(msgspec.Struct, frozen=True):
    """What is measured. pairs: of pieces. piece_s: of each. settle_s: before each, uncounted. people: who look at once.

    Example: LoadPlan(pairs=6, piece_s=60.0)
    """

    pairs: int = 6
    piece_s: float = 60.0
    settle_s: float = 20.0
    people: int = 10


class RunInterval(msgspec.Struct, frozen=True):
    """A stretch of the run. is_watched: whether people looked. begin_ms, end_ms: by this machine's clock."""

    is_watched: bool
    begin_ms: int
    end_ms: int


class Watching(msgspec.Struct):
    """What consoles spent and people saw.

    calm_s, busy_s: seconds without people, with people. calm_cpu_s, busy_cpu_s: what the console spent in them. behind:
    the most records that were not in the index when a piece ended. seen: pages, and how long they took.
    """

    calm_s: float = 0.0
    calm_cpu_s: float = 0.0
    busy_s: float = 0.0
    busy_cpu_s: float = 0.0
    behind: int = 0
    seen: PageViews = msgspec.field(default_factory=PageViews)


def run(plan: LoadPlan, say: Callable[[str], None] = print) -> dict[str, float]:
    """Steps a second with and without people, and the console's processor time."""
    from infra.cli.settings import load_settings

    with tempfile.TemporaryDirectory() as name, demo(Path(name)) as (began, child):
        settings = load_settings(began)
        say("the demo begins; its warm-up takes minutes")
        asyncio.run(_until_it_learns(settings))
        pieces: list[RunInterval] = []
        watching = Watching()
        for pair in range(plan.pairs):
            for is_watched in (False, True) if pair % 2 == 0 else (True, False):
                pieces.append(_watched(plan, began, watching) if is_watched else _alone(plan))
                if child.poll() is not None:
                    raise RuntimeError(f"the demo ended in pair {pair + 1} of {plan.pairs}, expected it to go on")
            say(f"pair {pair + 1} of {plan.pairs}")
        steps = asyncio.run(_steps(settings))
    return figures_of(pieces, steps, watching, plan.people)


def figures_of(
    pieces: Sequence[RunInterval], steps_ms: Sequence[int], watching: Watching, people: int
) -> dict[str, float]:
    """The figures. pieces: pair after pair. steps_ms: when each step was journaled."""
    rates = [(one.is_watched, rate_of(steps_ms, one)) for one in pieces]
    alone = [rate for is_watched, rate in rates if not is_watched]
    watched = [rate for is_watched, rate in rates if is_watched]
    changes = [math.log(one / other) for one, other in zip(watched, alone, strict=True)]
    slower = -statistics.fmean(changes)
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.inf
    took_ms = sorted(watching.seen.took_ms)
    calm, busy = (
        cpu_s / spent_s
        for cpu_s, spent_s in ((watching.calm_cpu_s, watching.calm_s), (watching.busy_cpu_s, watching.busy_s))
    )
    return {
        "pairs": float(len(changes)), "people": float(people),
        "steps_per_s_alone": statistics.fmean(alone), "steps_per_s_looked_at": statistics.fmean(watched),
        "slower_share": -math.expm1(-slower), "slower_share_error": error, "slower_in_errors": slower / error if error else 0.0,
        "pages_seen": float(len(took_ms)), "pages_failed": float(sum(watching.seen.failed.values())),
        **{f"pages_failed_{status}": float(count) for status, count in sorted(watching.seen.failed.items())},
        "pages_per_s": len(took_ms) / watching.busy_s,
        "page_ms_p50": took_ms[len(took_ms) // 2], "page_ms_p95": took_ms[len(took_ms) * 95 // 100],
        "console_cpu_share_calm": calm, "console_cpu_share_looked_at": busy, "records_behind": float(watching.behind),
    }  # fmt: skip


def rate_of(steps_ms: Sequence[int], piece: RunInterval) -> float:
    """Steps a second between the first and the last step of a piece. Raises ValueError for fewer than three.

    >>> rate_of([0, 1000, 3000, 5000, 9000], RunInterval(False, 500, 6000))
    0.5
    """
    mine = [at for at in steps_ms if piece.begin_ms <= at < piece.end_ms]
    if len(mine) < 3:
        raise ValueError(f"got {len(mine)} steps in a piece, expected 3 or more: --seconds takes longer pieces")
    return 1000 * (len(mine) - 1) / (mine[-1] - mine[0])


def _alone(plan: LoadPlan) -> RunInterval:
    time.sleep(plan.settle_s)
    began_ms = _now_ms()
    time.sleep(plan.piece_s)
    return RunInterval(False, began_ms, _now_ms())


def _watched(plan: LoadPlan, config: Path, watching: Watching) -> RunInterval:
    """A piece that people look at, through a console of its own."""
    from infra.cli.settings import load_settings

    with console(config) as (url, pid):
        until_s = time.monotonic() + ANSWER_S
        while asyncio.run(_behind(load_settings(config))) > CAUGHT_UP and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        time.sleep(plan.settle_s / 2)
        cpu_s, began_s = cpu_of(pid), time.monotonic()
        time.sleep(plan.settle_s / 2)
        watching.calm_cpu_s += cpu_of(pid) - cpu_s
        watching.calm_s += time.monotonic() - began_s
        command = [
            sys.executable,
            "-m",
            "infra.cli.bench.looking.looking",
            url,
            LINK,
            str(plan.people),
            str(plan.piece_s),
        ]
        began_ms, cpu_s, began_s = _now_ms(), cpu_of(pid), time.monotonic()
        done = subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True
        )
        ended_ms = _now_ms()
        watching.busy_cpu_s += cpu_of(pid) - cpu_s
        watching.busy_s += time.monotonic() - began_s
        seen = msgspec.json.decode(done.stdout, type=PageViews)
        watching.seen.took_ms += seen.took_ms
        for status, count in seen.failed.items():
            watching.seen.failed[status] = watching.seen.failed.get(status, 0) + count
        watching.behind = max(watching.behind, asyncio.run(_behind(load_settings(config))))
    return RunInterval(True, began_ms, ended_ms)


@contextmanager
def demo(folder: Path) -> "Iterator[tuple[Path, subprocess.Popen[bytes]]]":
    """A demo that runs for the length of the block: its settings file and its process, once its trainer is started."""
    config = folder / "run" / "headrace.toml"
    with _process(folder / "demo.log", "infra.cli.bench.looking.console_load", str(folder / "run")) as child:
        until_s = time.monotonic() + BEGIN_S
        while not (folder / "run" / "logs" / "train.log").exists():
            if child.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError("the demo did not begin")
            time.sleep(0.2)
        yield config, child


@contextmanager
def console(config: Path) -> Iterator[tuple[str, int]]:
    """A console over a run for the length of a block: its address and its process, once it answers."""
    from infra.cli.console.serve import LINK_VARIABLE
    from infra.local.address import choose_address

    port = choose_address().port
    arguments = ("console", "-c", str(config), "--listen", f"127.0.0.1:{port}")
    log = config.parent / "logs" / "console.log"
    with _process(log, "infra.cli.main", *arguments, env={LINK_VARIABLE: LINK}) as child:
        until_s = time.monotonic() + ANSWER_S
        while not _answers(port):
            if child.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError("the console did not answer")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", child.pid


@contextmanager
def _process(
    log: Path, module: str, *arguments: str, env: dict[str, str] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """A module's process, ended as Ctrl-C ends it; the end of its log is printed where something failed."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | (env or {}),
            start_new_session=True,  # as `up` starts it: a console takes idle time only where its session is its own
        )
    try:
        yield child
    except BaseException:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=120)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def cpu_of(pid: int) -> float:
    """Processor seconds that a process has spent, in all its threads, and the processes that it started."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    children = " ".join(one.read_text(encoding="ascii") for one in Path(f"/proc/{pid}/task").glob("*/children"))
    spent_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent_s + sum(cpu_of(int(child)) for child in children.split())


def _answers(port: int) -> bool:
    client = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        client.request("GET", f"/enter?link={LINK}")
        return client.getresponse().status == 303
    except (OSError, HTTPException):
        return False
    finally:
        client.close()


async def _until_it_learns(settings: "Settings") -> None:
    """Until so many steps of reinforcement were journaled. Raises TimeoutError."""
    async with asyncio.timeout(BEGIN_S):
        while len(await _steps(settings)) < FIRST_STEPS:  # noqa: ASYNC110 (the log tells no one)
            await asyncio.sleep(LOOK_S)


async def _steps(settings: "Settings") -> list[int]:
    """When each step of reinforcement was journaled, in ms; none while there is no log yet."""
    from infra.cli.connect import connected
    from schemas import Batch, topics
    from schemas.errors import BrokerUnavailable, ConfigError

    with contextlib.suppress(BrokerUnavailable, ConfigError):
        async with connected(settings) as log:
            found = [one async for one in log.read_all(topics.BATCHES)]
            return [one.timestamp_ms for one in found if isinstance(one.value, Batch) and one.value.phase == "train"]
    return []


async def _behind(settings: "Settings") -> int:
    """Records of the log that the console's index does not hold yet."""
    from infra.cli.connect import connected
    from infra.cli.console.fold import FOLDED
    from infra.cli.console.keeping import FILE
    from infra.cli.look.console_bounds import read_only

    database = read_only(settings.folder / "state" / FILE)
    try:
        reads = {(topic, part): at for topic, part, at in database.execute("SELECT topic, part, next FROM reads")}
    finally:
        database.close()
    async with connected(settings) as log:
        ends = {(topic.name, part): end for topic in FOLDED for part, end in (await log.bounds(topic))[1].items()}
    return sum(end - reads.get(where, 0) for where, end in ends.items())


def _now_ms() -> int:
    return int(1000 * time.time())


async def go_on(folder: Path) -> int:
    """A demo without an end: it hardly learns, so no accuracy stops it, and no time that a bench takes."""
    from infra.cli.demo.demo import run_demo
    from infra.cli.demo.settings import DemoOptions

    return await run_demo(DemoOptions(directory=folder, engine="torch", minutes=600.0, sets=ENDLESS, quiet=True))


if __name__ == "__main__":
    sys.exit(asyncio.run(go_on(Path(sys.argv[1]))))
