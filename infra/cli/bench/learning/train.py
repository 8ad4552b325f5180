"""How long it takes to get 0.9 of the demo's additions right by reinforcement: headrace beside TRL's GRPOTrainer.

    warm-up    once a seed, the demo's own, off the log: all begin from the very weights that it leaves
    headrace   the demo as it is, all roles on this machine: the MIX loss; and with rewards alone, as GRPO has nothing else
    TRL        one process, in the environment of the peers: the same groups, answers, rate and schedule, clipping, AdamW

One after the other, each with the machine for itself. What is right, the tasks and the tokenizer are the same files and
functions. The clock begins when the weights are there to be sampled (headrace: the first version after the warm-up is
published; TRL: its first step begins), and ends when the development set is found to be right in 0.9 of its tasks, which all
look at as often. Before that they have to find the same share right of the weights that they begin with. A side that does not
arrive within `minutes` is said to have not, with the reward that it had; TRL has longer where it takes longer to know whether
headrace is twice as soon. A missing peer is said in one line. Processor time is counted likewise: on a busy machine its ratio
is the one to read.
"""

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from infra.cli.bench.beside import OURS
from infra.cli.bench.common.awaited_log import beside_child
from infra.cli.bench.common.bench_env import bench_python, lacks
from infra.cli.bench.common.children import end_gently, last_words
from infra.cli.bench.learning.train_ours import RunFollower, warmed
from infra.local.process import start_watched

if TYPE_CHECKING:
    from infra.cli.settings import Settings

REWARDS, TRL = "headrace, rewards alone", "TRL"
CONTROLS = {OURS: "none", REWARDS: "rl"}
NEAR = 0.02  # by how much shares of the weights that all begin with may differ: engines break ties otherwise
SOONER = 2.0
KNOWN = 1.1 * SOONER  # times what a side took: where the peer has not arrived by then, the side was soon enough
BEGIN_S = 600.0
END_S = 120.0
Say = Callable[[str], None]
Clock = Literal["wall_s", "cpu_s"]


class TrainPlan(msgspec.Struct, frozen=True):
    """What is run. seeds: of the tasks, the weights and the draws. minutes: of each side at most, after its beginning, but see
    `peer_minutes`. engine: of headrace. at: share of the tasks that ends it. sides: which are run, besides TRL.

    Example: TrainPlan(seeds=(0,), minutes=5.0)
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    minutes: float = 10.0
    engine: str = "vllm"
    at: float = 0.9
    sides: tuple[str, ...] = (OURS, REWARDS)


class TrainRun(msgspec.Struct, frozen=True):
    """One side from one seed's weights. side: its name. seed: see TrainPlan. begun, accuracy: shares right at the beginning
    and when it was looked at last. steps, wall_s, cpu_s: by then, which is when it arrived where it did. reward: of what was
    trained on last, None where none was heard. limit_s: how long it had. arrived: whether enough is right.
    """

    side: str
    seed: int
    begun: float
    accuracy: float
    steps: int
    reward: float | None
    limit_s: float
    wall_s: float
    cpu_s: float
    arrived: bool = True

    @property
    def words(self) -> str:
        """For a person."""
        took = f"{self.wall_s:.0f} s, {self.cpu_s:.0f} s of CPU, {self.steps} steps"
        if self.arrived:
            return took
        at = "" if self.reward is None else f", at reward {self.reward:.2f}"
        return f"not within {self.limit_s / 60:g} minutes: {self.accuracy:.1%} right after {took}{at}"


def run(plan: TrainPlan, say: Say = print) -> list[TrainRun]:
    """All sides of all seeds. Raises RuntimeError where they do not begin alike, or one ends before its time."""
    why = lacks("trl", bench_python())
    if why:
        say(f"train: {TRL} is left out: {why}")
    found: list[TrainRun] = []
    for seed in plan.seeds:
        with tempfile.TemporaryDirectory(prefix="hr-") as name:
            found += of_seed(plan, seed, Path(name), say, with_trl=not why)
    return found


def of_seed(plan: TrainPlan, seed: int, folder: Path, say: Say, *, with_trl: bool) -> list[TrainRun]:
    """All sides of one seed, one after the other."""
    from actors.tasksets.arithmetic import write_arithmetic
    from infra.cli.demo.char_model import build_char_model
    from infra.cli.demo.settings import DemoOptions, demo_toml
    from infra.cli.settings import load_settings

    config = folder / "headrace.toml"
    config.write_text(demo_toml(DemoOptions(directory=folder, seed=seed, engine=plan.engine)))
    settings, model = load_settings(config, []), folder / "warm"
    warmed(settings, build_char_model(folder / "model", seed), model, say)
    runs = []
    for side in plan.sides:
        shutil.copytree(model, folder / side / "model")
        runs.append(asyncio.run(_ours(plan, side, seed, folder / side, settings)))
        say(f"train: seed {seed}: {side}: {runs[-1].words}")
    if with_trl:
        tasks, _ = write_arithmetic(folder / "tasks", seed=seed)
        longer = msgspec.structs.replace(plan, minutes=peer_minutes(plan, runs))
        runs.append(_trl(longer, asked_of(settings, model, tasks, folder, plan.at), seed, folder))
        say(f"train: seed {seed}: {TRL}: {runs[-1].words}")
    return require_alike(runs)


def peer_minutes(plan: TrainPlan, runs: Sequence[TrainRun]) -> float:
    """How long a peer has, after what headrace took of the same seed."""
    return max([plan.minutes, *(KNOWN * one.wall_s / 60 for one in runs if one.arrived)])


def require_alike(runs: list[TrainRun]) -> list[TrainRun]:
    """The runs of one seed. Raises RuntimeError where they did not begin with the same weights."""
    begun = {one.side: one.begun for one in runs}
    if begun and max(begun.values()) - min(begun.values()) > NEAR:
        raise RuntimeError(f"train: the sides begin with other shares right: {begun}")
    return runs


def asked_of(settings: "Settings", model: Path, tasks: Path, folder: Path, at: float) -> dict[str, Any]:
    """What the peer is asked: all of it from the demo's own settings."""
    master, suite = settings.master, settings.master.stop.suite
    return {
        "path": [str(Path(__file__).parents[__name__.count(".")]), *(one for one in sys.path if one.endswith("site-packages"))],
        "model": str(model), "tasks": str(tasks), "folder": str(folder / "trl"), "seed": master.seed,
        "trainer": msgspec.to_builtins(settings.trainer), "groups": settings.pacing.groups_per_step,
        "num_episodes": master.num_episodes, "max_tokens": master.max_tokens, "temperature": master.temperature,
        "split": master.split, "suite": suite, "every": next(one.every for one in master.evals if one.suite == suite), "at": at,
    }  # fmt: skip


def _trl(plan: TrainPlan, asked: dict[str, Any], seed: int, folder: Path) -> TrainRun:
    """The peer, to its end or that of its time."""
    file, log = folder / "asked.json", folder / "trl.log"
    file.write_text(json.dumps(asked))
    command = [str(bench_python()), "-m", "infra.cli.bench.peers.trl_grpo", str(file)]
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd=asked["path"][0]
        )
        limit = threading.Timer(BEGIN_S, child.kill)
        limit.start()
        try:
            return heard(child, limit, plan, seed, log)
        finally:
            limit.cancel()
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def heard(child: "subprocess.Popen[bytes]", limit: threading.Timer, plan: TrainPlan, seed: int, log: Path) -> TrainRun:
    """What a peer said until it arrived or its time was over. Raises RuntimeError where it ended before it began."""
    assert child.stdout is not None
    begun: float | None = None
    last: dict[str, Any] = {"accuracy": 0.0, "step": 0, "reward": None, "wall_s": 0.0, "cpu_s": 0.0}
    timers = [limit]
    for line in child.stdout:
        report = _report_of(line)
        if report.get("begin"):
            begun = last["accuracy"] = report["accuracy"]
            timers[-1].cancel()
            timers.append(threading.Timer(60 * plan.minutes, child.kill))
            timers[-1].start()
        elif "step" in report:
            last = report
            if report["accuracy"] >= plan.at:
                break
    for one in timers:
        one.cancel()
    if begun is None:
        raise RuntimeError(f"train: {TRL} did not begin: {last_words(log)}")
    if last["accuracy"] < plan.at and child.wait() >= 0:
        raise RuntimeError(f"train: {TRL} ended before its time: {last_words(log)}")
    return _run_of(TRL, plan, seed, begun, last)


def _report_of(line: bytes) -> dict[str, Any]:
    """A line of JSON; nothing of others, which libraries write."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}


def _run_of(side: str, plan: TrainPlan, seed: int, begun: float, last: dict[str, Any]) -> TrainRun:
    """last: what was heard when it was looked at last."""
    return TrainRun(
        side, seed, begun, last["accuracy"], last["step"], last["reward"], 60 * plan.minutes,
        wall_s=last["wall_s"], cpu_s=last["cpu_s"], arrived=last["accuracy"] >= plan.at,
    )  # fmt: skip


async def _ours(plan: TrainPlan, side: str, seed: int, folder: Path, settings: "Settings") -> TrainRun:
    """A demo, until it arrives or its time is over."""
    module = f"{__name__.rpartition('.')[0]}.train_ours"
    minutes = str(2 * plan.minutes)
    argv = [sys.executable, "-m", module, str(folder), plan.engine, CONTROLS[side], str(seed), minutes]
    log = folder / "demo.log"
    child = start_watched(argv, log=log)
    try:
        follower = RunFollower(child.pid, settings.master.stop.suite, plan.at)
        following = follower.follow(folder / "headrace.toml", begin_s=BEGIN_S, limit_s=60 * plan.minutes)
        looked = await beside_child(asyncio.create_task(following), child, log)
        if looked.begun is None:
            raise RuntimeError(f"train: {side}: its first weights were not looked at: {last_words(log)}")
        return _run_of(side, plan, seed, looked.begun, msgspec.structs.asdict(looked))
    finally:
        await asyncio.to_thread(end_gently, child, END_S)


def sooner(runs: Sequence[TrainRun], seed: int, side: str, clock: Clock = "wall_s") -> tuple[str, float] | None:
    """How many times as soon as TRL a side of headrace arrived, and what is said of it; None where neither did, or one is
    missing or was never looked at. Of one that did not arrive what it had taken counts, which it needs at least.
    """
    of = {one.side: one for one in runs if one.seed == seed}
    if side not in of or TRL not in of:
        return None
    own, peer = of[side], of[TRL]
    took, peer_took = getattr(own, clock), getattr(peer, clock)
    if not (own.arrived or peer.arrived) or not took or not peer_took:
        return None
    said = ": at most" if not own.arrived else ": at least" if not peer.arrived else ""
    return said, peer_took / took
