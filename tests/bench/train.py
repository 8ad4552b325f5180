"""Seconds until reinforcement solves 0.9 of the demo's additions: headrace compared with TRL's GRPOTrainer.

Both start from the weights of the demo's warm-up with the same groups, answers, rate, schedule, clipping and AdamW, and run in
turn. The clock starts when an engine can sample the weights and ends when 0.9 of the development set is correct; both evaluate
it equally often.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.tasksets.arithmetic import TRAIN, arithmetic_demonstrations, write_arithmetic
from infra.cli.demo.char_model import build_char_model
from infra.cli.demo.demo import run_demo
from infra.cli.demo.settings import DemoOptions, demo_toml
from infra.cli.settings import Settings, load_settings
from infra.local.process import start_watched
from infra.log.log import Log
from infra.model.model import load_tokenizer
from infra.policies.tensors import pieces_of
from schemas import EvalResult, PolicyEvent, topics
from schemas.topics import Topic
from tests.bench._additions import Deck, demonstrations, problem_of
from tests.bench.measuring import PEERS_PYTHON, cpu_s, lacks, last_words
from tests.bench.report import ROOT, Row, compared
from tests.bench.start import awaited_log, beside, ended_gently
from trainer.learners.torch import TorchLearner

TENSORS = "model.safetensors"
# One step of a warm-up that changes nothing: the model was warmed up before.
WARM = ("trainer.warmup.min_steps=0", "trainer.warmup.max_steps=1", "trainer.warmup.learning_rate=1e-12")
NEAR = 0.02  # shares of the weights that both begin with: engines break ties otherwise
BEGIN_S = 600.0


class Arrival(NamedTuple):
    """How far a side came. begun, accuracy: Shares right at the beginning and at the end."""

    begun: float
    accuracy: float
    wall_s: float
    cpu_s: float


def run(seeds: int = 3, minutes: float = 10.0, engine: str = "vllm", at: float = 0.9) -> Iterator[Row]:
    """seeds: seeds of tasks, weights and draws. minutes: limit per side. engine: vllm or torch. at: share that ends a run."""
    missing = lacks("trl")
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="hr-") as name:
            folder = Path(name)
            config = folder / "headrace.toml"
            config.write_text(demo_toml(DemoOptions(directory=folder, task="add", seed=seed, engine=engine)))
            settings, model = load_settings(config, []), folder / "warm"
            warm_up(settings, build_char_model(folder / "model", seed), model)
            shutil.copytree(model, folder / "headrace" / "model")
            ours = asyncio.run(headrace(folder / "headrace", settings, engine, seed, minutes, at))
            if ours.accuracy < at or missing:
                why = missing or f"not within {minutes:g} minutes: {ours.accuracy:.1%}"
                yield Row(f"seed {seed}", ours.wall_s, "s", why=why)
                yield Row(f"seed {seed}, TRL", why=why)
                continue
            peer = trl(asked_of(settings, model, folder, at), folder, 2.2 * max(ours.wall_s / 60, minutes))
            if abs(peer.begun - ours.begun) > NEAR:
                raise RuntimeError(f"train: the sides begin with other shares right: {ours.begun}, {peer.begun}")
            note = "" if peer.accuracy >= at else "TRL had not arrived yet"
            yield compared(f"seed {seed}, TRL", "s", ours.wall_s, peer.wall_s, 2.0, note)
            yield compared(f"seed {seed}, TRL, CPU", "s", ours.cpu_s, peer.cpu_s, None, note)


def warm_up(settings: Settings, model: Path, out: Path) -> None:
    """Write a copy of a model folder after the demo's supervised warm-up."""
    warmup, seed = settings.trainer.warmup, settings.master.seed
    assert warmup is not None
    tokenizer, rows = load_tokenizer(model), list(arithmetic_demonstrations(seed=seed))
    deck = Deck([problem_of(each, tokenizer) for each in rows if each.split == TRAIN], seed)
    looked = demonstrations([problem_of(each, tokenizer) for each in rows if each.split != TRAIN])
    learner = TorchLearner(str(model), settings.trainer, device="cpu")
    learner.begin_phase("warmup")
    for step in range(1, warmup.max_steps + 1):
        learner.step(demonstrations(deck.deal(warmup.batch)), learning_rate=warmup.learning_rate, seed=step)
        is_look = step >= warmup.min_steps and step % warmup.every == 0
        if is_look and learner.greedy_accuracy(looked) >= warmup.stop_at:
            break
    shutil.copytree(model, out, ignore=shutil.ignore_patterns(TENSORS))
    with (out / TENSORS).open("wb") as file:
        file.writelines(pieces_of(learner.tensors(), {"format": "pt"}))


async def headrace(folder: Path, settings: Settings, engine: str, seed: int, minutes: float, at: float) -> Arrival:
    """The demo as it is, from the version after its warm-up on."""
    log = folder / "demo.log"
    argv = [sys.executable, "-m", "tests.bench.train", str(folder), engine, str(seed), str(2 * minutes)]
    child = start_watched(argv, log=log, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'infra' / 'sdk'}"})
    begin, begun, accuracy, spent = (0.0, 0.0), -1.0, 0.0, (0.0, 0.0)
    begins, arrives = asyncio.Event(), asyncio.Event()

    async def read(found: Log, topic: Topic) -> None:
        nonlocal begin, begun, accuracy, spent
        async for message in found.tail(topic, "beginning"):
            record, now = message.value, (time.perf_counter(), cpu_s(child.pid))
            if isinstance(record, PolicyEvent) and record.event == "published" and record.version == 1:
                begin = now
                begins.set()
            if isinstance(record, EvalResult) and record.suite == settings.master.stop.suite and record.version > 0:
                await begins.wait()
                begun = record.accuracy if record.version == 1 else begun
                accuracy, spent = record.accuracy, (now[0] - begin[0], now[1] - begin[1])
                if accuracy >= at:
                    arrives.set()

    async def follow() -> None:
        async with asyncio.timeout(BEGIN_S) as waiting, awaited_log(folder / "headrace.toml") as found:
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
    return Arrival(begun, accuracy, *spent)


def asked_of(settings: Settings, model: Path, folder: Path, at: float) -> dict[str, Any]:
    """What the peer is asked: all of it from the demo's own settings."""
    master, suite = settings.master, settings.master.stop.suite
    tasks, _ = write_arithmetic(folder / "tasks", seed=master.seed)
    return {
        "path": [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))], "model": str(model),
        "tasks": str(tasks), "folder": str(folder / "trl"), "seed": master.seed,
        "trainer": msgspec.to_builtins(settings.trainer), "groups": settings.pacing.groups_per_step,
        "num_episodes": master.num_episodes, "max_tokens": master.max_tokens, "temperature": master.temperature,
        "split": master.split, "suite": suite, "every": next(e.every for e in master.evals if e.suite == suite), "at": at,
    }  # fmt: skip


def trl(asked: dict[str, Any], folder: Path, minutes: float) -> Arrival:
    """The peer, to its end or that of its time."""
    file, log = folder / "asked.json", folder / "trl.log"
    file.write_text(json.dumps(asked))
    command = [str(PEERS_PYTHON), str(Path(__file__).with_name("_trl.py")), str(file)]
    begun, found = -1.0, {"accuracy": 0.0, "wall_s": 0.0, "cpu_s": 0.0}
    with log.open("wb") as errors:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT)
    limit = threading.Timer(BEGIN_S + 60 * minutes, child.kill)
    limit.start()
    assert child.stdout is not None
    for line in child.stdout:
        with contextlib.suppress(ValueError):  # libraries write other lines
            report = json.loads(line)
            if report.get("begin"):
                begun = report["accuracy"]
            elif "step" in report:
                found = report
                if found["accuracy"] >= asked["at"] or found["wall_s"] > 60 * minutes:
                    break
    limit.cancel()
    child.kill()
    child.wait()
    if begun < 0:
        raise RuntimeError(f"train: TRL did not begin: {last_words(log)}")
    return Arrival(begun, found["accuracy"], found["wall_s"], found["cpu_s"])


if __name__ == "__main__":
    folder, engine, seed, minutes = sys.argv[1:]
    options = DemoOptions(
        directory=Path(folder), task="add", engine=engine, seed=int(seed), minutes=float(minutes), sets=WARM
    )
    sys.exit(asyncio.run(run_demo(msgspec.structs.replace(options, as_json=True))))
