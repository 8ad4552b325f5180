"""What each rank of test_deepspeed_learner runs: model folder, ZeRO stage, what to check, and where states lie.

Started by torchrun it is one rank. With the word "serve" alone it forks the ranks of one check for each line of stdin: to
import torch and DeepSpeed takes far longer than most checks, and is done once for all of them.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from trainer_samples import CRITIC, make_item, random_items, rewarded

from infra.policies.tensors import Tensor, load_tensors, save_tensors, to_numpy
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import BatchItem, Span
from trainer.batch.batch import TrainItem, pack
from trainer.buffer.buffer import Uses
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import Checkpoint, CheckpointPlace, Position, load_newest, save
from trainer.journal.checkpoint import folder as folder_of
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.learners.learner import take_from
from trainer.learners.torch import TorchLearner
from trainer.state import Index, StoredState, encode_index, open_state, whole_hash

LIMIT_S = 300
LANES = {"usual": LaneConfig(loss="grpo", weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}


def furthest(each: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert each.keys() == other.keys(), sorted(set(each) ^ set(other))
    return max(float(np.abs(to_numpy(each[name]) - to_numpy(other[name])).max()) for name in each)


def poisoned(seed: int) -> list[TrainItem]:
    items = random_items(seed)
    item = items[3].item
    fields = {name: getattr(item, name) for name in item.__struct_fields__} | {"advantage": float("nan")}
    return [*items[:3], TrainItem(items[3].experience, BatchItem(**fields)), *items[4:]]


def unequal(seed: int) -> list[TrainItem]:
    """A batch whose sequences are of 2 to 300 tokens."""
    random = np.random.default_rng(seed)
    found = []
    for g, length in enumerate((1, 300, 2, 1, 150, 7, 1, 40)):
        tokens = [1, *random.integers(3, 90, length).tolist()]
        logprobs = -4.5 + random.normal(0, 0.2, length)
        found.append(
            make_item(
                tokens, [Span(1, 1 + length, 3)], group=f"u-{g}.0", advantage=float(random.normal()), logprobs=logprobs
            )
        )
    return found


def check_unequal(model: str, stage: int) -> None:
    """Losses and gradients on very unequal lengths: the first moment after one step is a tenth of the gradient."""
    config = TrainerConfig(lanes=LANES, threads=1, gradient_clip=1e9)
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    for max_tokens in (300, 10_000):
        batch = pack(unequal(max_tokens), max_tokens=max_tokens, version=3)
        stats, expected = (each.step(batch, learning_rate=1e-4, seed=0) for each in (learner, alone))
        assert abs(stats.loss - expected.loss) < 1e-5, (stats.loss, expected.loss)
        gradients = [{n: t for n, t in each.save().items() if "/exp_avg/" in n} for each in (learner, alone)]
        assert 10 * furthest(*gradients) < 1e-5, furthest(*gradients)
        for each in (learner, alone):
            each.begin_phase("train")
        learner.restore(alone.save())
    learner.close()
    print(f"stage {stage} agrees")


NEEDS = {
    "proximal": {"usual": LaneConfig(loss="decoupled", weight=0.9), "expert": LANES["expert"]},
    "bound": {"usual": LaneConfig(loss="m2po", weight=0.9), "expert": LANES["expert"]},
    "reference": {"usual": LaneConfig(loss="grpo", options={"kl": 0.1}), "expert": LANES["expert"]},
    "penalty": {
        "usual": LaneConfig(loss="gspo", weight=0.9, kl=0.1, entropy=0.05),
        "expert": LaneConfig(loss="sft", weight=0.1, entropy=0.05),
    },
    "bfloat16": LANES,
}


def check_needs(model: str, stage: int, what: str) -> None:
    """What losses want of a learner, and lower precision, come out as in one process."""
    dtype = "bfloat16" if what == "bfloat16" else "float32"
    config = TrainerConfig(
        lanes=NEEDS[what],
        threads=1,
        dtype=dtype,
        reference_decay=0.9,
        activation_checkpointing=what == "proximal",
    )
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    for step in range(2):
        items = random_items(step)
        batch = pack(items, max_tokens=40, version=5)
        stats, expected = (each.step(batch, learning_rate=1e-4, seed=step) for each in (learner, alone))
        assert stats.finite and expected.finite
        near = 2e-2 if dtype == "bfloat16" else 1e-4
        assert abs(stats.loss - expected.loss) < near, (stats.loss, expected.loss)
    assert furthest(learner.save(), alone.save()) < (2e-3 if dtype == "bfloat16" else 5e-5)
    learner.close()
    print(f"stage {stage} agrees")


def check_states(model: str, stage: int, folder: Path) -> None:
    """Go on from a state that another learner, or another number of ranks, saved; then save for the next."""
    config = TrainerConfig(lanes=LANES, threads=1)
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    state = load_tensors((folder / "state").read_bytes())
    for each in (learner, alone):
        each.restore(state)
        each.step(pack(random_items(11), max_tokens=40, version=5), learning_rate=1e-4, seed=11)
    assert furthest(learner.save(), alone.save()) < 2e-5
    (folder / "state").write_bytes(save_tensors(learner.save()))
    learner.close()
    print(f"stage {stage} agrees")


def main(model: str, stage: int) -> None:
    config = TrainerConfig(lanes=LANES, threads=1, learning_rate=1e-3)
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    assert furthest(learner.tensors(), alone.tensors()) == 0
    # 40 makes several microbatches; 10,000 a single one, whose few rows the ranks share.
    for step, max_tokens in enumerate((40, 10_000, 40)):
        batch = pack(random_items(step), max_tokens=max_tokens, version=5)
        stats, expected = (each.step(batch, learning_rate=1e-4, seed=step) for each in (learner, alone))
        assert stats.finite
        assert abs(stats.loss - expected.loss) < 1e-4, (stats.loss, expected.loss)
        assert abs(stats.grad_norm - expected.grad_norm) < 1e-3 * expected.grad_norm, (stats, expected)
        assert stats.values.keys() == expected.values.keys()
        assert all(
            abs(stats.values[name] - value) < 1e-3 * max(1, abs(value)) for name, value in expected.values.items()
        )
    assert furthest(learner.save(), alone.save()) < 2e-5
    one_row = pack(random_items(0)[:1], max_tokens=100)  # fewer rows than ranks
    assert (
        abs(
            learner.step(one_row, learning_rate=1e-4, seed=8).loss
            - alone.step(one_row, learning_rate=1e-4, seed=8).loss
        )
        < 1e-4
    )

    before = learner.save()
    stats = learner.step(pack(poisoned(4), max_tokens=40, version=5), learning_rate=1e-4, seed=4)
    assert not stats.finite
    assert furthest(learner.save(), before) == 0

    for each in (learner, alone):
        each.restore(before)
    batch = pack(random_items(9), max_tokens=40, version=5)
    for each in (learner, alone):
        assert each.step(batch, learning_rate=1e-4, seed=9).finite
    assert furthest(learner.save(), alone.save()) < 2e-5
    after = learner.save()
    learner.restore(before)
    learner.step(batch, learning_rate=1e-4, seed=9)
    assert furthest(learner.save(), after) < 1e-7

    assert learner.greedy_accuracy(batch) == alone.greedy_accuracy(batch)
    assert np.allclose(learner.log_distances(batch), alone.log_distances(batch), atol=1e-3)
    mine, other = learner.probe(((1, 5, 9),)), alone.probe(((1, 5, 9),))
    assert np.allclose(mine.logprobs, other.logprobs, atol=1e-4)
    learner.begin_phase("warmup")
    assert not any(name.startswith("adam/") for name in learner.save())
    learner.close()
    print(f"stage {stage} agrees")


def check_refused(model: str, stage: int, what: str) -> None:
    """A gradient above what is allowed changes nothing on any rank, whether the step has one minibatch or several."""
    config = TrainerConfig(lanes=NEEDS["proximal"] if what == "refused minibatch" else LANES, threads=1)
    learner = DeepSpeedLearner(model, config, stage=stage, offload=what == "refused offload")
    if learner.rank:
        learner.follow(MemoryStore())
        return
    alone = TorchLearner(model, config, device="cpu")
    first, second = (pack(random_items(seed), max_tokens=40, version=5) for seed in (1, 2))
    for each in (learner, alone):
        assert each.step(first, learning_rate=1e-4, seed=1).finite
    before = learner.save()
    norms = [alone.step(second, learning_rate=1e-4, seed=2, max_grad_norm=0.0).grad_norm]  # of the first minibatch
    norms.append(norms[0] * 1.0001)  # a second one may be above it, and then the first is taken back
    for limit in (1e-9, *norms):
        stats = learner.step(second, learning_rate=1e-4, seed=2, max_grad_norm=limit)
        if stats.finite:
            learner.restore(before)
            continue
        assert stats.grad_norm > limit
        assert furthest(learner.save(), before) == 0
    for each in (learner, alone):
        assert each.step(second, learning_rate=1e-4, seed=2, max_grad_norm=1e6).finite
    assert furthest(learner.save(), alone.save()) < 5e-5
    learner.close()
    print(f"stage {stage} agrees")


def check_shards(model: str, stage: int, folder: Path, what: str = "reference") -> None:
    """Go on from the newest checkpoint, which another number of ranks at another stage wrote, then write the next."""
    store = DirectoryStore(folder)
    config = CRITIC if what == "critic" else TrainerConfig(lanes=NEEDS["reference"], threads=1)
    items = rewarded if what == "critic" else random_items
    learner = DeepSpeedLearner(model, config, stage=stage)
    if learner.rank:
        learner.follow(store)
        return
    found = load_newest(store, "r", take=take_from(learner))
    assert found is not None and isinstance(found.learner, StoredState)
    learner.restore(found.learner)
    index = learner.snapshot(store, f"again/{stage}").write()
    assert whole_hash(found.learner) == whole_hash(learner.save())
    ranks_at_work = {each.rank for each in index.objects}
    assert ranks_at_work == set(range(int(os.environ["WORLD_SIZE"])))
    check_damage(learner, store, f"again/{stage}", index)
    step = found.position.step + 1
    assert learner.step(pack(items(step), max_tokens=40, version=5), learning_rate=1e-4, seed=step).finite
    position = Position(step=step)
    taken = learner.snapshot(store, folder_of("r", CheckpointPlace(step, 0)))
    learner.step(pack(items(99), max_tokens=40, version=5), learning_rate=1e-4, seed=99)  # it reaches no snapshot
    save(store, "r", Checkpoint(position, {}, Uses(), ()), index=taken.write())
    learner.close()
    print(f"stage {stage} agrees")


def check_damage(learner: DeepSpeedLearner, store: DirectoryStore, folder: str, index: Index) -> None:
    """A shard that is missing or damaged is named with the rank that wrote it, and nothing is changed."""
    encoded = encode_index(index)
    store.put(f"{folder}/index.msgpack", encoded)
    state = open_state(store, folder, f"{folder}/index.msgpack", hashlib.sha256(encoded).hexdigest())
    learner.verify(state)
    before = whole_hash(learner.save())
    last = index.objects[-1]
    data = store.get(f"{folder}/{last.name}")
    store.put(f"{folder}/{last.name}", data[:-1] + bytes([data[-1] ^ 1]))
    for damage in ("not those that were written", "missing"):
        try:
            learner.verify(state)
        except ValueError as error:
            assert f"{last.name} (rank {last.rank})" in str(error) and damage in str(error), error
            assert str(error).startswith("rank "), error
        else:
            raise AssertionError(damage)
        store.delete(f"{folder}/{last.name}")
    assert whole_hash(learner.save()) == before


def check_silence(model: str, stage: int, what: str, folder: Path | None = None) -> None:
    """Ranks outlive a silence longer than their timeout; one that hangs meanwhile ends the group. folder: it hangs once."""
    learner = DeepSpeedLearner(model, TrainerConfig(lanes=LANES, threads=1, ranks_timeout="4s"), stage=stage)
    if learner.rank:
        if what == "hang" and (folder is None or not (folder / "hung").exists()):
            if folder is not None:
                (folder / "hung").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        learner.follow(MemoryStore())
        return
    time.sleep(60 if what == "hang" and folder is None else 10)
    learner.step(pack(random_items(0), max_tokens=40, version=5), learning_rate=1e-4, seed=0)
    learner.close()
    print(f"stage {stage} agrees")


def check(model: str, stage: int, what: str, *folder: str) -> None:
    match what:
        case "refused" | "refused minibatch" | "refused offload":
            check_refused(model, stage, what)
        case "shards":
            check_shards(model, stage, Path(folder[0]), *folder[1:])
        case "silence" | "hang":
            check_silence(model, stage, what, *(Path(each) for each in folder))
        case "steps":
            main(model, stage)
        case "unequal":
            check_unequal(model, stage)
        case "opens" | "memory" | "probed" | "critic" | "sums" | "refusal":
            import sharded_ranks

            getattr(sharded_ranks, f"check_{what}")(model, stage, *folder)
        case "lora" | "lora reference" | "lora bfloat16":
            from lora_ranks import check_lora

            check_lora(model, stage, what)
        case "states":
            check_states(model, stage, Path(*folder))
        case _:
            check_needs(model, stage, what)


def serve() -> None:
    """A line in is the output's file, the number of ranks and the arguments of `check`; a line out is 0, or 1 for failed."""
    # The ranks find these imported, with what DeepSpeed imports late.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import peft  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    for line in sys.stdin:
        output, num_ranks, model, stage, *rest = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        running = set()
        for rank in range(num_ranks):
            pid = os.fork()
            if not pid:
                run_rank(output, {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}, model, int(stage), *rest)
            running.add(pid)
        failed = False
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if status and not failed:
                failed = True
                for other in running:  # they would wait for the one that is gone
                    os.kill(other, signal.SIGKILL)
        print(int(failed), flush=True)


def run_rank(output: str, places: dict[str, int], *arguments: object) -> None:
    """The forked process, to its end."""
    code = 1
    try:
        signal.alarm(LIMIT_S)
        with open(output, "ab", buffering=0) as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        os.environ |= {name: str(value) for name, value in places.items()}
        os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1"}
        check(*arguments)  # type: ignore[arg-type]
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        check(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
