"""A large learner's state on several ranks: published, saved, all ranks killed, read again by one, two and three of them.

Each rank is a process of this machine with gloo between them. Memory is what a process holds itself (RssAnon, every 20 ms),
above what it held when the phase began; a rank's shards are its part of the state's bytes, its part of a version is what it
publishes of one.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from infra.policies.publish import NewVersion
from infra.store.store import Store
from trainer.state.stored import Index, encode_index, index_hash, open_state

if TYPE_CHECKING:
    from trainer.learners.deepspeed import DeepSpeedLearner

Said = dict[str, Any]  # what a rank measured, and its memory over time
T = TypeVar("T")
FOLDER = "checkpoints/bench/000000000001-0"
VERSION = NewVersion(policy="bench", token=0, version=1, parent=-1, step=1)
SAMPLE_S = 0.02
LIMIT_S = 1200.0
GIB = 2**30


class StatePlan(msgspec.Struct, frozen=True):
    """What is measured. hidden, layers: of a random Qwen3 (13·hidden² parameters a layer). stage: of ZeRO. silence_s:
    how long the second group hears nothing; timeout_s: ranks_timeout meanwhile; 0 for none. restore_on: numbers of
    ranks. bucket: parameters that ZeRO reduces, and updates, at once: its buffers are not what is measured. dtype: of
    its weights.

    Example: StatePlan(hidden=2048, layers=9)
    """

    hidden: int = 2048
    layers: int = 9
    stage: int = 3
    dtype: str = "bfloat16"
    silence_s: float = 0.0
    timeout_s: float = 600.0
    restore_on: tuple[int, ...] = (1, 2, 3)
    bucket: int = 20_000_000


def run(plan: StatePlan, say: Callable[[str], None] = print) -> dict[str, float]:
    """The figures; see the module. 2 ranks hold about 15 bytes a parameter each while they save: 7 of weights, masters and
    moments, 2 of gradients, 6 of the snapshot.
    """
    from infra.cli.demo.char_model import Size, build_char_model

    with tempfile.TemporaryDirectory(prefix="headrace-bench-state-") as folder:
        top = Path(folder)
        say(f"building a random Qwen3, hidden {plan.hidden}, {plan.layers} layers")
        build_char_model(top / "model", seed=1, size=Size(hidden=plan.hidden, layers=plan.layers))
        (top / "plan.json").write_bytes(msgspec.json.encode(plan))
        say("2 ranks: one step, then the state is saved, then SIGKILL")
        saved = _group(top, "save", 2, killed=True)
        figures = _saved(saved)
        for num_ranks in plan.restore_on:
            say(f"{num_ranks} ranks: the state is read")
            found = _group(top, f"restore-{num_ranks}", num_ranks)
            figures |= _restored(found, num_ranks, saved[0]["facts"]["hash"])
    return figures


def _saved(ranks: list[Said]) -> dict[str, float]:
    facts = ranks[0]["facts"]
    shard_bytes = facts["state_bytes"] / len(ranks)
    write_s = facts["write"][1] - facts["write"][0]
    return {
        "parameters_m": facts["parameters"] / 1e6,
        "state_gib": facts["state_bytes"] / GIB,
        "snapshot_s": facts["snapshot"][1] - facts["snapshot"][0],
        "upload_s": write_s,
        "orders_done_beside_the_upload": facts["orders_beside"],
        "save_peak_gib_above_shards": _peak(ranks, (facts["snapshot"][0], facts["write"][1]), shard_bytes),
        "publish_s": facts["publish"][1] - facts["publish"][0],
        "publish_peak_gib_above_parts": _peak(ranks, facts["publish"], facts["version_bytes"] / len(ranks)),
        "peak_gib_of_all_ranks": sum(max(size for _, size in one["memory"]) for one in ranks) / GIB,
    }


def _restored(ranks: list[Said], num_ranks: int, expected: str) -> dict[str, float]:
    facts = ranks[0]["facts"]
    return {
        f"ranks_{num_ranks}_equal_hash": float(facts["hash"] == expected),
        f"ranks_{num_ranks}_load_s": facts["load"][1] - facts["load"][0],
        f"ranks_{num_ranks}_load_peak_gib": _peak(ranks, facts["load"]),
        **({f"ranks_{num_ranks}_silence_survived_s": facts["silence_s"]} if facts["silence_s"] else {}),
    }


def _peak(ranks: list[Said], span_s: tuple[float, float], shard_bytes: float = 0.0) -> float:
    """The most that any rank held between two times above what it held at the first, less its shards; GiB."""
    begin_s, end_s = span_s
    found = []
    for one in ranks:
        memory: list[tuple[float, int]] = one["memory"]
        before = [size for at, size in memory if at <= begin_s][-1]
        during = max([before, *(size for at, size in memory if begin_s <= at <= end_s)])
        found.append((during - before - shard_bytes) / GIB)
    return max(found)


def _group(top: Path, phase: str, num_ranks: int, *, killed: bool = False) -> list[Said]:
    """Run one group of ranks to its end, or until rank 0 has said all and then kill it; what each said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(Path(__file__).resolve().parents[4])
    shared = os.environ | {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", "infra.cli.bench.learner.state", str(top), phase]
    logs = [top / f"{phase}-{rank}.log" for rank in range(num_ranks)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as file:
                ranks.append(subprocess.Popen(argv, env=own, stdout=file, stderr=file))
        said = [top / f"{phase}-{rank}.json" for rank in range(num_ranks)]
        deadline_s = time.monotonic() + LIMIT_S
        while not all(path.exists() for path in said) or (not killed and any(one.poll() is None for one in ranks)):
            dead = [rank for rank, one in enumerate(ranks) if one.poll() not in (None, 0)]
            if dead or time.monotonic() > deadline_s:
                words = logs[dead[0] if dead else 0].read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{phase}: rank {dead[0] if dead else 0} did not come to its end:\n{words}")
            time.sleep(0.1)
        return [json.loads(path.read_text()) for path in said]
    finally:
        for one in ranks:
            one.send_signal(signal.SIGKILL)
            one.wait()


@contextmanager
def _measured(path: Path) -> Iterator[dict[str, object]]:
    """Sample this process's memory until the end of the block, then write down what was said in it."""
    memory: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            memory.append((time.time(), _anonymous_bytes()))
            done.wait(SAMPLE_S)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    facts: dict[str, object] = {}
    yield facts
    done.set()
    thread.join()
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"facts": facts, "memory": memory}))
    partial.rename(path)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def main(top: Path, phase: str) -> None:
    """One rank."""
    from infra.store.directory import DirectoryStore
    from trainer.config import LaneConfig, TrainerConfig
    from trainer.learners.deepspeed import DeepSpeedLearner

    plan = msgspec.json.decode((top / "plan.json").read_bytes(), type=StatePlan)
    config = TrainerConfig(
        lanes={"expert": LaneConfig(loss="sft")},
        threads=1,
        dtype=plan.dtype,  # type: ignore[arg-type]
        ranks_timeout=f"{plan.timeout_s:g}s",
    )
    store = DirectoryStore(top / "store")
    with _measured(top / f"{phase}-{os.environ['RANK']}.json") as facts:
        buffers = {"zero_optimization": {"reduce_bucket_size": plan.bucket, "sub_group_size": plan.bucket}}
        learner = DeepSpeedLearner(str(top / "model"), config, stage=plan.stage, json=buffers)
        if learner.rank:
            learner.follow(store)
        elif phase == "save":
            _save(learner, store, facts)
            learner.close()
        else:
            _restore(learner, store, facts, plan.silence_s if phase == "restore-2" else 0.0)
            learner.close()
    if phase == "save":
        time.sleep(LIMIT_S)  # until SIGKILL


def _save(learner: "DeepSpeedLearner", store: Store, facts: dict[str, object]) -> None:
    """What rank 0 does first: a step, so that there are moments, then a snapshot, and orders while it is written."""
    from infra.cli.bench.learning.adding import Problem, demonstration
    from trainer.batch.batch import pack

    batch = pack([demonstration(Problem("a", (1, 20, 21), (22, 23, 2)))], max_tokens=64)
    if not learner.step(batch, learning_rate=1e-4, seed=1).finite:
        raise RuntimeError("the step was refused")
    facts["parameters"] = sum(one.num_bytes // 4 for name, one in learner.layout().items() if name.startswith("model/"))
    facts["state_bytes"] = sum(one.num_bytes for _, one in learner.layout().items())
    event = _timed(facts, "publish", lambda: learner.weights().publish(store, VERSION, previous=None, probe=None))
    facts["version_bytes"] = event.stats["full_bytes"]
    snapshot = _timed(facts, "snapshot", lambda: learner.snapshot(store, FOLDER))
    written: list[Index] = []
    thread = threading.Thread(target=lambda: _timed(facts, "write", lambda: written.append(snapshot.write())))
    thread.start()
    orders = 0
    while thread.is_alive():
        learner.probe(((1, 20, 21),))
        orders += 1
    data = encode_index(written[0])
    store.put(f"{FOLDER}/index.msgpack", data)
    facts["hash"] = index_hash(written[0])
    facts["orders_beside"] = orders


def _restore(learner: "DeepSpeedLearner", store: Store, facts: dict[str, object], silence_s: float) -> None:
    """What rank 0 does in a later group: read the state, be silent, and hash what all ranks then hold."""
    key = f"{FOLDER}/index.msgpack"
    state = open_state(store, FOLDER, key, hashlib.sha256(store.get(key)).hexdigest())
    _timed(facts, "load", lambda: learner.load(state))
    time.sleep(silence_s)
    facts["silence_s"] = silence_s
    facts["hash"] = learner.state_hash()


def _timed(facts: dict[str, object], name: str, work: Callable[[], T]) -> T:
    began_s = time.time()
    found = work()
    facts[name] = (began_s, time.time())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
