"""The program of each rank of test_deepspeed_learner: model folder, ZeRO stage, what to check, and words of that check.

Started by torchrun it is one rank. With "serve" alone it forks ranks for each line of stdin, and imports DeepSpeed once.
"""

import hashlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from trainer_samples import CRITIC, make_item, random_items, rewarded

from infra.policies.tensors import Tensor, to_numpy
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from schemas import Span
from schemas.errors import ConfigError
from trainer.batch.batch import Microbatch, PackedBatch, TrainItem, pack
from trainer.buffer.buffer import Uses
from trainer.config import LaneConfig, LoraConfig, TrainerConfig
from trainer.journal.checkpoint import Checkpoint, CheckpointPlace, Position, load_newest, save
from trainer.journal.checkpoint import folder as folder_of
from trainer.learners.deepspeed import DeepSpeedLearner
from trainer.learners.learner import StepStats, take_from
from trainer.learners.torch import TorchLearner
from trainer.state import Index, StoredState, encode_index, open_state, whole_hash

LIMIT_S = 300
LANES = {"usual": LaneConfig(loss="grpo", weight=0.9), "expert": LaneConfig(loss="sft", weight=0.1)}
DECOUPLED = LANES | {"usual": LaneConfig(loss="decoupled", weight=0.9)}
REFERENCE = LANES | {"usual": LaneConfig(loss="grpo", kl=0.1)}
PENALTY = {
    "usual": LaneConfig(loss="gspo", weight=0.9, kl=0.1, entropy=0.05),
    "expert": LaneConfig(loss="sft", weight=0.1, entropy=0.05),
}
Learner = DeepSpeedLearner | TorchLearner


def config(lanes: dict[str, LaneConfig] = LANES, **settings: object) -> TrainerConfig:
    return TrainerConfig(lanes=lanes, threads=1, **settings)  # type: ignore[arg-type]


CONFIGS = {
    "steps": config(),
    "unequal": config(gradient_clip=1e9),
    "sums": config(gradient_clip=1e9, dtype="bfloat16"),
    "proximal": config(DECOUPLED, reference_decay=0.9, activation_checkpointing=True),
    "bound": config(LANES | {"usual": LaneConfig(loss="m2po", weight=0.9)}),
    "reference": config(REFERENCE, reference_decay=0.9),
    "penalty": config(PENALTY, reference_decay=0.9),
    "bfloat16": config(dtype="bfloat16"),
    "refused": config(),
    "refused minibatch": config(DECOUPLED),
    "opens": config(REFERENCE),
    "opens bfloat16": config(REFERENCE, dtype="bfloat16"),
    "probed": config(REFERENCE),
    "critic": CRITIC,
    "shards": config(REFERENCE),
    "shards critic": CRITIC,
    "lora": config(lora=LoraConfig(rank=4)),
    "lora bfloat16": config(lora=LoraConfig(rank=4), dtype="bfloat16"),
    "lora reference": config(REFERENCE, lora=LoraConfig(rank=4)),
    "silence": config(ranks_timeout="4s"),
    "hang": config(ranks_timeout="4s"),
}


def near(config: TrainerConfig, exact: float, rounded: float) -> float:
    """The bound of a comparison, by dtype."""
    return rounded if config.dtype == "bfloat16" else exact


def furthest(each: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert each.keys() == other.keys(), sorted(set(each) ^ set(other))
    numbers = [name for name, item in each.items() if item.dtype != "U8"]
    return max(float(np.abs(to_numpy(each[name]) - to_numpy(other[name])).max()) for name in numbers)


def batch(seed: int, *, max_tokens: int = 40) -> PackedBatch:
    return pack(random_items(seed), max_tokens=max_tokens, version=5)


def both_step(
    learner: Learner, alone: Learner, given: PackedBatch, seed: int, bound: float = 1e-4, rate: float = 1e-4
) -> tuple[StepStats, StepStats]:
    """Statistics of a step of each, finite and with nearly equal losses."""
    stats, expected = (each.step(given, learning_rate=rate, seed=seed) for each in (learner, alone))
    assert stats.finite and expected.finite and abs(stats.loss - expected.loss) < bound, (stats, expected)
    return stats, expected


def assert_near_values(stats: StepStats, expected: StepStats) -> None:
    assert stats.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        assert abs(stats.values[name] - value) < 1e-3 * max(1, abs(value)), (name, stats.values[name], value)


def poisoned(seed: int) -> PackedBatch:
    items = random_items(seed)
    items[3] = TrainItem(items[3].experience, msgspec.structs.replace(items[3].item, advantage=float("nan")))
    return pack(items, max_tokens=40, version=5)


def check_unequal(learner: Learner, alone: Learner, config: TrainerConfig) -> None:
    """Losses and gradients of sequences of 2 to 300 tokens: the first moment after one step is a tenth of the gradient."""
    for max_tokens in (300, 10_000):
        random, items = np.random.default_rng(max_tokens), []
        for g, length in enumerate((1, 300, 2, 1, 150, 7, 1, 40)):
            tokens, logprobs = [1, *random.integers(3, 90, length).tolist()], -4.5 + random.normal(0, 0.2, length)
            advantage, span = float(random.normal()), Span(1, 1 + length, 3)
            items.append(make_item(tokens, [span], group=f"u-{g}.0", advantage=advantage, logprobs=logprobs))
        both_step(learner, alone, pack(items, max_tokens=max_tokens, version=3), 0, bound=1e-5)
        gradients = [{n: t for n, t in each.save().items() if "/exp_avg/" in n} for each in (learner, alone)]
        assert 10 * furthest(*gradients) < 1e-5, furthest(*gradients)
        for each in (learner, alone):
            each.begin_phase("train")
        learner.restore(alone.save())


def check_needs(learner: Learner, alone: Learner, config: TrainerConfig) -> None:
    """Options of losses, and lower precision, give the results of one process."""
    for step in range(2):
        both_step(learner, alone, batch(step), step, bound=near(config, 1e-4, 2e-2))
    assert furthest(learner.save(), alone.save()) < near(config, 5e-5, 2e-3)


def check_steps(learner: Learner, alone: Learner, config: TrainerConfig) -> None:
    assert furthest(learner.tensors(), alone.tensors()) == 0
    # 40 makes several microbatches; 10,000 a single one, whose few rows the ranks share.
    for step, max_tokens in enumerate((40, 10_000, 40)):
        stats, expected = both_step(learner, alone, batch(step, max_tokens=max_tokens), step)
        assert abs(stats.grad_norm - expected.grad_norm) < 1e-3 * expected.grad_norm, (stats, expected)
        assert_near_values(stats, expected)
    assert furthest(learner.save(), alone.save()) < 2e-5
    both_step(learner, alone, pack(random_items(0)[:1], max_tokens=100), 8)  # fewer rows than ranks
    before = learner.save()
    assert not learner.step(poisoned(4), learning_rate=1e-4, seed=4).finite
    assert furthest(learner.save(), before) == 0
    for each in (learner, alone):
        each.restore(before)
    both_step(learner, alone, batch(9), 9)
    after = learner.save()
    assert furthest(after, alone.save()) < 2e-5
    learner.restore(before)
    learner.step(batch(9), learning_rate=1e-4, seed=9)
    assert furthest(learner.save(), after) < 1e-7
    assert learner.greedy_accuracy(batch(9)) == alone.greedy_accuracy(batch(9))
    assert np.allclose(learner.log_distances(batch(9)), alone.log_distances(batch(9)), atol=1e-3)
    assert np.allclose(*(each.probe(((1, 5, 9),)).logprobs for each in (learner, alone)), atol=1e-4)
    learner.begin_phase("warmup")
    assert not any(name.startswith("adam/") for name in learner.save())


def check_refused(learner: Learner, alone: Learner, config: TrainerConfig, offload: str = "") -> None:
    """A gradient above what is allowed changes nothing on any rank, whether the step has one minibatch or several."""
    both_step(learner, alone, batch(1), 1)
    before = learner.save()
    norms = [alone.step(batch(2), learning_rate=1e-4, seed=2, max_grad_norm=0.0).grad_norm]  # of the first minibatch
    norms.append(norms[0] * 1.0001)  # a second one may be above it, and then the first is taken back
    for limit in (1e-9, *norms):
        stats = learner.step(batch(2), learning_rate=1e-4, seed=2, max_grad_norm=limit)
        if stats.finite:
            learner.restore(before)
            continue
        assert stats.grad_norm > limit
        assert furthest(learner.save(), before) == 0
    both_step(learner, alone, batch(2), 2)
    assert furthest(learner.save(), alone.save()) < 5e-5


def check_shards(learner: DeepSpeedLearner, alone: Learner, config: TrainerConfig, folder: str) -> None:
    """Go on from the newest checkpoint, which another number of ranks at another stage wrote, then write the next."""
    store, items = DirectoryStore(Path(folder)), random_items if config.critic is None else rewarded
    found = load_newest(store, "r", take=take_from(learner))
    assert found is not None and isinstance(found.learner, StoredState)
    learner.restore(found.learner)
    index = learner.snapshot(store, "again").write()
    assert whole_hash(found.learner) == whole_hash(learner.save())
    assert {each.rank for each in index.objects} == set(range(int(os.environ["WORLD_SIZE"])))
    check_damage(learner, store, "again", index)
    step = found.position.step + 1
    assert learner.step(pack(items(step), max_tokens=40, version=5), learning_rate=1e-4, seed=step).finite
    taken = learner.snapshot(store, folder_of("r", CheckpointPlace(step, 0)))
    learner.step(pack(items(99), max_tokens=40, version=5), learning_rate=1e-4, seed=99)  # it reaches no snapshot
    save(store, "r", Checkpoint(Position(step=step), {}, Uses(), ()), index=taken.write())


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
        error = refused_with(ValueError, lambda: learner.verify(state))
        assert f"{last.name} (rank {last.rank})" in error and damage in error and error.startswith("rank "), error
        store.delete(f"{folder}/{last.name}")
    assert whole_hash(learner.save()) == before


def refused_with(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def check_silence(learner: Learner, alone: Learner, config: TrainerConfig, *folder: str) -> None:
    """Ranks outlive a silence longer than their timeout."""
    time.sleep(10)
    assert learner.step(batch(0), learning_rate=1e-4, seed=0).finite


def check_opens(learner: DeepSpeedLearner, alone: TorchLearner, config: TrainerConfig) -> None:
    """A model is opened as one process opens it: the same bits, read in the same way; and it computes with them."""
    assert learner.tensors() == alone.tensors()
    assert learner.numerics()["attention"] == alone.numerics()["attention"]
    assert furthest(learner.save(), alone.save()) == 0
    both_step(learner, alone, batch(0), 0, bound=near(config, 1e-4, 2e-2))


def check_probed(learner: DeepSpeedLearner, alone: Learner, config: TrainerConfig) -> None:
    """After a forward that no backward follows, a rank holds its shards and small weights alone; the next step is as ever."""
    values = list(learner._model.module.parameters())
    small = sum(each.ds_numel for each in values if each.ds_persist)

    def held() -> int:
        return sum(each.numel() for each in values)  # one that is partitioned is empty

    probe = learner.probe(((1, 20, 21, 22),))
    assert held() == small < sum(each.ds_numel for each in values), "the probe's weights are still here"
    learner.log_distances(batch(0))
    assert held() == small
    assert learner.step(batch(0), learning_rate=1e-4, seed=0).finite
    assert learner.probe(((1, 20, 21, 22),)) != probe


def check_sums(learner: DeepSpeedLearner, alone: Learner, config: TrainerConfig, offload: str = "") -> None:
    """Gradients of many microbatches in bfloat16 are summed in float32: the first moment after one step is a tenth of it."""
    items = [item for seed in range(16) for item in random_items(seed) if item.item.lane == "usual"][:64]
    given = pack(items, max_tokens=1, version=5)

    def gradient(each: Learner, microbatches: tuple[Microbatch, ...]) -> np.ndarray:
        """Nothing moves at this learning rate."""
        each.begin_phase("train")
        part = msgspec.structs.replace(given, microbatches=microbatches)
        assert each.step(part, learning_rate=1e-30, seed=0).finite
        state = each.save()
        names = sorted(name for name in state if name.startswith("adam/exp_avg/"))
        return np.concatenate([to_numpy(state[name]).ravel() for name in names])

    parts = [gradient(alone, (rows,)) for rows in given.microbatches]
    exact, rounded = np.zeros(len(parts[0])), torch.zeros(len(parts[0]), dtype=torch.bfloat16)
    for part in parts:
        exact += part
        rounded += torch.from_numpy(part).bfloat16()
    norm = float(np.linalg.norm(exact))
    far = float(np.linalg.norm(rounded.double().numpy() - exact)) / norm
    off = float(np.linalg.norm(gradient(learner, given.microbatches) - exact)) / norm
    print(f"{len(parts)} microbatches: off by {off:.2g}, a sum in bfloat16 by {far:.2g}")
    limit = (
        2e-3 if learner.numerics()["zero"] == "2" and int(os.environ["WORLD_SIZE"]) > 1 else 1e-3
    )  # see DeepSpeedLearner
    assert len(parts) == 64 and far > 5e-3 and off < limit


def check_critic(learner: Learner, alone: Learner, config: TrainerConfig) -> None:
    """A critic on several ranks is that of one process: begun as the warmed-up policy, stepped, refused, restored."""
    shown = pack([each for each in rewarded(7) if each.item.lane == "expert"], max_tokens=100)
    for each in (learner, alone):
        each.begin_phase("warmup")
    both_step(learner, alone, shown, 0)
    for each in (learner, alone):
        each.begin_phase("train")
    assert furthest(learner.save(), alone.save()) < 2e-5
    for step, max_tokens in enumerate((30, 10_000)):
        stats, expected = both_step(learner, alone, pack(rewarded(step), max_tokens=max_tokens, version=5), step)
        assert "critic/value_loss" in stats.values
        assert_near_values(stats, expected)
    before = learner.save()
    assert furthest(before, alone.save()) < 5e-5
    for seed in (2, 3):  # a value loss that is not finite, and then a gradient of the policy that is too large
        limit = {} if seed == 2 else {"max_grad_norm": 1e-9}
        given = pack(rewarded(seed, 3e38 if seed == 2 else None), max_tokens=30, version=5)
        assert not learner.step(given, learning_rate=1e-4, seed=seed, **limit).finite
        assert furthest(learner.save(), before) == 0
    for each in (learner, alone):
        each.restore(before)
    both_step(learner, alone, pack(rewarded(4), max_tokens=30, version=5), 4)
    assert furthest(learner.save(), alone.save()) < 5e-5


def check_lora(learner: Learner, alone: Learner, config: TrainerConfig) -> None:
    """An adapter alone is in the state and in a version, and its steps are those of one process."""
    assert learner.tensors() == alone.tensors() and learner.save() == alone.save()
    for step in range(4):
        if step in (0, 2):
            for each in (learner, alone):
                each.begin_phase("train" if step else "warmup")
        both_step(learner, alone, batch(step), step, bound=near(config, 1e-4, 3e-2), rate=1e-3)
    before = learner.save()
    assert furthest(before, alone.save()) < near(config, 1e-4, 2e-2) and before["adapter"] == alone.save()["adapter"]
    alone.restore(before)
    assert learner.tensors() == alone.tensors()
    probes = (each.probe(((1, 5, 9),)).logprobs for each in (learner, alone))
    assert np.allclose(*probes, atol=near(config, 1e-4, 0.1))
    assert not learner.step(poisoned(4), learning_rate=1e-4, seed=4).finite
    assert learner.save() == before
    learner.step(batch(3), learning_rate=1e-3, seed=9)
    learner.restore(before)
    assert learner.save() == before
    whole = {name: item for name, item in before.items() if name != "adapter"}
    assert "it is full weights, expected an adapter" in refused_with(ValueError, lambda: learner.restore(whole))


def hang(folder: Path) -> None:
    """Stop this rank, once in all."""
    if not (folder / "hung").exists():
        (folder / "hung").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


COMPARE: dict[str, Callable[..., None]] = {
    "steps": check_steps, "unequal": check_unequal, "sums": check_sums, "refused": check_refused, "shards": check_shards,
    "opens": check_opens, "probed": check_probed, "critic": check_critic, "lora": check_lora, "silence": check_silence,
    "hang": check_silence,
}  # fmt: skip


def check(model: str, stage: int, what: str, *words: str) -> None:
    """Compare a learner of ranks with one process. what: a key of CONFIGS, or "refusal" for a model that does not open; words:
    of that check.
    """
    if what == "refusal":
        print(refused_with(ConfigError, lambda: DeepSpeedLearner(model, config(), stage=stage)))
        print(f"stage {stage} agrees")
        return
    learner = DeepSpeedLearner(model, CONFIGS[what], stage=stage, offload="offload" in words)
    if learner.rank:
        if what == "hang":
            hang(Path(*words))
        learner.follow(DirectoryStore(Path(*words)) if what.startswith("shards") else MemoryStore())
        return
    alone = TorchLearner(model, CONFIGS[what], device="cpu")
    COMPARE.get(what.split()[0], check_needs)(learner, alone, CONFIGS[what], *words)
    learner.close()
    print(f"stage {stage} agrees")


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
