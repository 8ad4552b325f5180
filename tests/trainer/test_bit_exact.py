"""The torch learner through crashes: resumed and replayed to the same bits, whatever died when."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from infra.log.log import Log
from infra.model.model import no_progress_bars
from schemas import Saved, topics
from tests.trainer.memory_run import (
    CONFIG,
    STEPS,
    KillingBus,
    KillingStore,
    block,
    filled_log,
    journal,
    train_through_kills,
)
from tests.trainer.test_replay import replayed
from trainer.config import TrainerConfig
from trainer.learners.learner import Learner
from trainer.learners.torch import TorchLearner
from trainer.state import whole_hash

ASYNC_STEPS = 500
NUM_CRASHES = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False, dtype="float32",
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "tiny"
    with no_progress_bars():
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def opened(model: Path, config: TrainerConfig) -> Callable[[], Learner]:
    return lambda: TorchLearner(str(model), config, device="cpu")


def settings(**changes: object) -> TrainerConfig:
    return msgspec.structs.replace(CONFIG, learning_rate=1e-3, **changes)


@pytest.mark.slow
async def test_a_trainer_killed_at_any_send_and_any_put_ends_with_the_bits_of_one_that_was_not(model: Path) -> None:
    config = settings()

    async def final(bus: KillingBus, store: KillingStore, *kills: tuple[int, int]) -> str:
        log = await filled_log(store, bus)
        learner, died = await train_through_kills(bus, store, opened(model, config), kills, log, config)
        assert died >= bool(kills), "nothing was killed"
        return whole_hash(learner.save())

    bus, store = KillingBus(), KillingStore()
    expected = await final(bus, store)
    # Up to three lives each, so that a resume is killed too; `test_replay` has every single send and put.
    sends = [((send, -1), (send // 2, -1)) for send in range(3, bus.sends, bus.sends // 7)]
    puts = [((-1, put),) for put in range(2, store.puts, store.puts // 7)]
    for kills in sends + puts:
        assert await final(KillingBus(), KillingStore(), *kills) == expected, kills


async def feed(log: Log, seed: int) -> None:
    """Groups in issue order and demonstrations in between, at a pace of their own."""
    chance = random.Random(seed)
    for sequence in range(2 * ASYNC_STEPS):
        await log.publish(topics.BUFFER, block(STEPS * 2 + sequence))
        if chance.random() < 0.1:
            await log.publish(topics.BUFFER, block(100 + sequence, "expert"))
        if chance.random() < 0.2:
            await asyncio.sleep(chance.random() * 0.03)


@pytest.mark.full
async def test_an_asynchronous_run_with_twenty_crashes_replays_three_times_to_equal_hashes_everywhere(
    model: Path,
) -> None:
    config = settings(max_steps=ASYNC_STEPS, checkpoint_every=4)
    chance = random.Random(11)
    kills = [
        (chance.randrange(4, 60), -1) if chance.random() < 0.7 else (-1, chance.randrange(1, 24))
        for _ in range(NUM_CRASHES)
    ]
    bus, store = KillingBus(), KillingStore()
    log = await filled_log(store, bus)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed(log, seed=7))
        learner, died = await train_through_kills(bus, store, opened(model, config), kills, log, config)
    assert died == NUM_CRASHES
    steps = {entry.step for entry in await journal(log) if isinstance(entry, Saved)}
    runs = [(await replayed(log, store, opened(model, config)(), config))[0] for _ in range(3)]
    assert {each.step for each in runs[0]} == steps and len(steps) > ASYNC_STEPS / 8
    assert all(each.equal and not each.fault for found in runs for each in found)
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][-1].got == whole_hash(learner.save())
