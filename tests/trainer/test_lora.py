"""LoRA in the learner of one process: what is trained, saved, refused, compared with, and replayed to the bit."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from infra.policies.fetch import PolicyFetcher
from infra.policies.tensors import to_numpy
from infra.settings.config import decode
from schemas import Lane, Saved
from schemas.errors import ConfigError
from tests.contracts.test_learner import batch, items
from tests.infra.tiny_families import build_family
from tests.trainer.memory_run import (
    CONFIG,
    FLOOR,
    KillingBus,
    KillingStore,
    filled_log,
    journal,
    new_run,
    published,
    replaying,
    train_through_kills,
)
from tests.trainer.memory_run import train as run_loop
from trainer.batch.batch import pack
from trainer.config import LaneConfig, LoraConfig, TrainerConfig
from trainer.learners.torch import TorchLearner
from trainer.replay.replay import find_start, replay
from trainer.state import state_adapter

LORA = LoraConfig(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
NUM = 2 * 3 * 2  # layers, targets, A and B


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_family(tmp_path_factory.mktemp("lora") / "model", "qwen3"))


def opened(model: str, lora: LoraConfig | None = LORA, *, kl: float = 0.0, **settings: Any) -> TorchLearner:
    lanes: dict[Lane, LaneConfig] = {
        "usual": LaneConfig(loss="grpo", weight=0.9, kl=kl),
        "expert": LaneConfig(loss="sft", weight=0.1),
    }
    return TorchLearner(model, TrainerConfig(lanes=lanes, threads=1, lora=lora, **settings), device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_alone_is_trained_saved_and_published(model: str, dtype: str) -> None:
    learner = opened(model, dtype=dtype)
    base = {name: value.clone() for name, value in learner.model.module.named_parameters() if ".lora_" not in name}
    before, probe = learner.tensors(), learner.probe(((1, 22, 30, 41),))
    assert probe == opened(model, None, dtype=dtype).probe(probe.sequences), "B begins as zeros"
    stats = learner.step(batch(0), learning_rate=1e-2, seed=0)
    assert stats.finite and stats.grad_norm > 0
    moved = learner.tensors()
    assert len(moved) == NUM and all(name.startswith("base_model.model.model.layers.") for name in moved)
    assert {each.dtype for each in moved.values()} == {"F32" if dtype == "float32" else "BF16"}
    assert all(to_numpy(moved[name]).any() for name in moved) and moved != before
    assert learner.probe(probe.sequences) != probe
    for name, value in learner.model.module.named_parameters():
        assert ".lora_" in name or torch.equal(value, base[name])
    state = learner.save()
    kinds = ("model", "adam/step", "adam/exp_avg", "adam/exp_avg_sq")
    assert set(state) == {"adapter", "phase", *(f"{kind}/{name}" for name in moved for kind in kinds)}
    assert state_adapter(state) == learner.adapter


def test_restore_continues_to_the_same_bits_and_only_on_the_same_base(model: str, tmp_path: Path) -> None:
    learner = opened(model)
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    saved = learner.save()
    other = opened(model)
    other.step(batch(50), learning_rate=1e-2, seed=1)
    other.restore(saved)
    for each in (learner, other):
        each.step(batch(1), learning_rate=1e-3, seed=1)
    assert learner.save() == other.save()
    with pytest.raises(ValueError, match=r"state: it is an adapter of rank 4.*expected full weights"):
        opened(model, None).restore(saved)
    with pytest.raises(ValueError, match="state: it is full weights, expected an adapter of rank 4"):
        learner.restore(opened(model, None).save())
    base = str(build_family(tmp_path / "other", "qwen3", seed=1))
    with pytest.raises(ValueError, match="on base"):
        opened(base).restore(saved)
    assert learner.save() == other.save()


def test_a_kl_takes_the_base_for_its_reference_without_a_second_model(model: str) -> None:
    learner, twin = opened(model, kl=0.1), opened(model, kl=0.1)
    plain = opened(model, None)
    own = sum(value.numel() for value in plain.model.module.parameters())
    held = sum(value.numel() for value in learner.model.module.parameters())
    adapter = sum(each.num_bytes // 4 for each in learner.tensors().values())
    assert held == own + 2 * adapter
    learner.begin_phase("train")
    twin.begin_phase("train")
    for step in range(2):
        stats = learner.step(batch(step), learning_rate=1e-2, seed=step)
    assert stats.values["usual/kl_reference"] > 0
    rows = pack(items(0), max_tokens=10_000).microbatches[0]
    assert learner._reference is not None
    with torch.no_grad():
        here, base, policy = learner._reference.logprobs(rows), plain.model.logprobs(rows), learner.model.logprobs(rows)
    assert torch.equal(here, base) and not torch.equal(policy, base)
    saved = learner.save()
    assert {name.partition("/")[0] for name in saved} == {"adapter", "phase", "model", "adam", "reference"}
    twin.restore(saved)
    for one_learner in (learner, twin):
        one_learner.step(batch(5), learning_rate=1e-2, seed=5)
    assert learner.save() == twin.save()


def test_after_a_warm_up_the_reference_is_what_the_warm_up_made(model: str) -> None:
    learner = opened(model, kl=0.1)
    learner.begin_phase("warmup")
    learner.step(batch(0), learning_rate=1e-2, seed=0)
    warm = learner.probe(((1, 22, 30, 41),))
    learner.begin_phase("train")
    learner.step(batch(1), learning_rate=1e-2, seed=1)
    state = learner.save()
    assert learner.probe(warm.sequences) != warm
    again = opened(model, kl=0.1)
    names = [name for name in again.tensors()]
    again.restore(state | {f"model/{name}": state[f"reference/{name}"] for name in names})
    assert again.probe(warm.sequences) == warm


def test_what_does_not_go_with_lora_is_refused_by_name_before_a_model_is_looked_at() -> None:
    def trainer(**settings: object) -> TrainerConfig:
        return decode({"lora": {"rank": 4}, **settings}, TrainerConfig, "headrace.toml")

    assert trainer().lora == LoraConfig(rank=4)
    with pytest.raises(ConfigError, match=r"critic: got \[trainer.critic\] with \[trainer.lora\]"):
        trainer(critic={})
    with pytest.raises(ConfigError, match=r"reference_decay: got 0.9 with \[trainer.lora\]"):
        trainer(reference_decay=0.9)
    with pytest.raises(ConfigError, match=r"lora.rank"):
        trainer(lora={"rank": 0})


def in_loop(model: str, lora: LoraConfig | None = LORA) -> tuple[TrainerConfig, TorchLearner]:
    lanes = CONFIG.lanes | {"usual": LaneConfig(weight=0.9, kl=0.05)}
    config = msgspec.structs.replace(CONFIG, lanes=lanes, learning_rate=1e-3, lora=lora)
    return config, TorchLearner(model, config, device="cpu")


async def test_a_run_through_its_warm_up_is_replayed_and_resumed_to_the_same_bits(model: str) -> None:
    config, learner = in_loop(model)
    log, store = await new_run()
    await run_loop(log, store, learner, config)
    assert sum(entry.phase == "warmup" for entry in await journal(log) if isinstance(entry, Saved)) > 0
    start = await find_start(log, store, "t", to_step=None)
    again = replaying(TorchLearner(model, config, device="cpu"), config)
    found = [compared async for compared in replay(again, "t", log, store, start)]
    assert len(found) > 3 and all(each.equal and not each.fault for each in found)
    assert again.learner.save() == learner.save() and found[0].made_with["peft"]

    bus, killed = KillingBus(), KillingStore()
    log = await filled_log(killed, bus)
    kills = [(9, -1), (-1, 12), (20, -1)]
    other, died = await train_through_kills(bus, killed, lambda: in_loop(model)[1], kills, log, config)
    assert died == 3 and other.tensors() == learner.tensors()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            None,
            LORA,
            r"is of full weights, the settings ask for an adapter of rank 4, alpha 8, targets down_proj, q_proj",
        ),
        (LORA, None, r"is of an adapter of rank 4.*, the settings ask for full weights"),
        (LORA, msgspec.structs.replace(LORA, rank=8), r"is of an adapter of rank 4.*ask for an adapter of rank 8"),
        (LORA, msgspec.structs.replace(LORA, alpha=16), r"is of .*alpha 8.*alpha 16"),
        (
            LORA,
            msgspec.structs.replace(LORA, targets=("q_proj",)),
            r"is of .*targets down_proj, q_proj, v_proj.*targets q_proj",
        ),
    ],
    ids=["on", "off", "rank", "alpha", "targets"],
)
async def test_a_run_keeps_its_adapter_and_a_new_run_begins_anew(
    model: str, before: LoraConfig | None, after: LoraConfig | None, words: str
) -> None:
    log, store = await new_run()
    config, learner = in_loop(model, before)
    await run_loop(log, store, learner, msgspec.structs.replace(config, max_steps=2))
    config, other = in_loop(model, after)
    fresh = other.tensors()
    with pytest.raises(ConfigError, match=r"trainer\.lora: the checkpoint of step \d+ " + words) as refused:
        await run_loop(log, store, other, config)
    assert "another name in `run`" in str(refused.value) and "\n" not in str(refused.value)
    assert other.tensors() == fresh
    floor = msgspec.structs.replace(FLOOR, run="anew")
    await run_loop(log, store, other, msgspec.structs.replace(config, max_steps=1), floor)
    events = await published(log)
    newest = PolicyFetcher(store, "main").fetch(events[-1])
    assert newest.adapter == other.adapter and newest.tensors.keys() == fresh.keys()
    assert len({event.version for event in events}) == len(events)
