"""Seconds until reinforcement has a chat model follow 0.9 of the demo's instructions: headrace compared with TRL's GRPOTrainer.

TRL begins with the weights that headrace published after the demo's warm-up, and has the same prompts, score, groups, answers,
rate, schedule, clipping and AdamW. The clock starts when an engine can sample these weights and ends when the share of the
development prompts with every instruction followed reaches 0.9; both sides evaluate it equally often.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from infra.cli.connect import app_store
from infra.cli.demo.demo import write_settings
from infra.cli.demo.settings import DemoOptions
from infra.cli.govern.export_model import export
from infra.cli.settings import Settings, load_settings
from infra.local.process import start_watched
from infra.log.log import Log
from schemas import EvalResult, PolicyEvent, topics
from schemas.topics import Topic
from tests.bench.measuring import PEERS_PYTHON, cpu_s, lacks, last_words
from tests.bench.report import ROOT, Row, compared
from tests.bench.start import awaited_log, beside, ended_gently

BEGIN_S = 600.0
ALONE = ["trainer.lanes.usual.weight=1", "trainer.lanes.expert.weight=0"]  # GRPOTrainer takes no demonstrations


class Arrival(NamedTuple):
    """Progress of a side. accuracy: Share of the development prompts at the end."""

    accuracy: float
    wall_s: float
    cpu_s: float


def run(
    seed: int = 0, seeds: int = 3, minutes: float = 20.0, at: float = 0.9, peer_minutes: float = 60.0
) -> Iterator[Row]:
    """seed: first of the `seeds` seeds. minutes, peer_minutes: limits of the sides. at: share that ends a run."""
    missing = lacks("trl")
    for each in range(seed, seed + seeds):
        with tempfile.TemporaryDirectory(prefix="hr-") as name:
            folder = Path(name)
            ours = asyncio.run(headrace(folder, each, minutes, at))
            why = "" if ours.accuracy >= at else f"not within {minutes:g} minutes: {ours.accuracy:.1%}"
            if why or missing:
                yield Row(f"seed {each}", ours.wall_s, "s", why=why)
                yield Row(f"seed {each}, TRL", why=missing or "headrace did not arrive")
                continue
            settings = load_settings(folder / "run" / "headrace.toml", [])
            peer = trl(asked_of(settings, folder, at), folder, peer_minutes)
            note = "" if peer.accuracy >= at else f"TRL had not arrived yet: {peer.accuracy:.1%}"
            yield compared(f"seed {each}, TRL", "s", ours.wall_s, peer.wall_s, 4.0, note)
            yield compared(f"seed {each}, TRL, CPU", "s", ours.cpu_s, peer.cpu_s, None, note)


async def headrace(folder: Path, seed: int, minutes: float, at: float) -> Arrival:
    """The demo by its score alone, timed from the version after its warm-up on, whose weights are written to `begin`."""
    place, log = folder / "run", folder / "demo.log"
    settings = load_settings(write_settings(DemoOptions(directory=place, seed=seed, minutes=minutes, sets=ALONE)), [])
    options = ("--dir", str(place), "--seed", str(seed), "--minutes", str(minutes), *(f"--set={x}" for x in ALONE))
    argv = [sys.executable, "-m", "infra.cli.main", "demo", "--json", *options]
    child = start_watched(argv, log=log, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'infra' / 'sdk'}"})
    begin, accuracy, spent = (0.0, 0.0), 0.0, (0.0, 0.0)
    begins, arrives = asyncio.Event(), asyncio.Event()

    async def read(found: Log, topic: Topic) -> None:
        nonlocal begin, accuracy, spent
        async for message in found.tail(topic, "beginning"):
            record, now = message.value, (time.perf_counter(), cpu_s(child.pid))
            if isinstance(record, PolicyEvent) and record.event == "published" and record.version == 1:
                begin = now
                await asyncio.to_thread(export, app_store(settings), record, settings, folder / "begin")
                begins.set()
            if isinstance(record, EvalResult) and record.suite == settings.master.stop.suite and record.version > 1:
                await begins.wait()
                accuracy, spent = record.accuracy, (now[0] - begin[0], now[1] - begin[1])
                if accuracy >= at:
                    arrives.set()

    async def follow() -> None:
        async with asyncio.timeout(BEGIN_S) as waiting, awaited_log(place / "headrace.toml") as found:
            reading = [asyncio.create_task(read(found, topic)) for topic in (topics.POLICIES, topics.EVALS)]
            await begins.wait()
            waiting.reschedule(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrives.wait(), 60 * minutes)
            for each in reading:
                each.cancel()

    try:
        await beside(asyncio.create_task(follow()), child, log)
    finally:
        await asyncio.to_thread(ended_gently, child, 120.0)
    return Arrival(accuracy, *spent)


def asked_of(settings: Settings, folder: Path, at: float) -> dict[str, Any]:
    """The peer's settings, all from the demo's own."""
    master, suite = settings.master, settings.master.stop.suite
    return {
        "path": [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))],
        "model": str(folder / "begin"), "tasks": str(folder / "run" / "tasks" / "tasks.jsonl"),
        "folder": str(folder / "trl"), "seed": master.seed,
        "trainer": msgspec.to_builtins(settings.trainer), "groups": settings.pacing.groups_per_step,
        "num_episodes": master.num_episodes, "max_tokens": master.max_tokens, "temperature": master.temperature,
        "split": master.split, "suite": suite, "every": next(e.every for e in master.evals if e.suite == suite), "at": at,
    }  # fmt: skip


def trl(asked: dict[str, Any], folder: Path, minutes: float) -> Arrival:
    """The peer, to its end or its limit."""
    file, log = folder / "asked.json", folder / "trl.log"
    file.write_text(json.dumps(asked))
    command = [str(PEERS_PYTHON), str(Path(__file__).with_name("_trl.py")), str(file)]
    begun, found = False, {"accuracy": 0.0, "wall_s": 0.0, "cpu_s": 0.0}
    with log.open("wb") as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
    limit = threading.Timer(BEGIN_S + 60 * minutes, child.kill)
    limit.start()
    assert child.stdout is not None
    for line in child.stdout:
        with contextlib.suppress(ValueError):  # libraries write other lines
            report = json.loads(line)
            begun = begun or "begin" in report
            if "step" in report:
                found = report
                if found["accuracy"] >= asked["at"] or found["wall_s"] > 60 * minutes:
                    break
    limit.cancel()
    child.kill()
    child.wait()
    if not begun:
        raise RuntimeError(f"train: TRL did not begin: {last_words(log)}")
    return Arrival(found["accuracy"], found["wall_s"], found["cpu_s"])
