"""A critic and preference pairs through the trainer's own loop: drawn whole, and the same bits after a restart."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from infra.cli.demo.char_model import Size, build_char_model
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.policies.tensors import Tensor
from infra.settings.config import Floor, Pacing
from infra.store.memory import MemoryStore
from schemas import Batch, Block, Span, make_experience, topics
from schemas.errors import ConfigError
from tests.role import role_of
from tests.trainer.memory_run import KillingBus, KillingStore, block, ends, journal
from trainer.config import CriticConfig, LaneConfig, TrainerConfig, WarmupConfig
from trainer.journal import checkpoint
from trainer.journal.checkpoint import state_part
from trainer.learners.torch import TorchLearner
from trainer.state import whole_hash
from trainer.train import run_trainer

FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=99, straggler_s=0.01))
STEPS = 4


def group(sequence: int) -> Block:
    random = np.random.default_rng(sequence)
    return Block(
        tuple(
            make_experience(
                tokens=[1, 20, *random.integers(30, 60, 3 + episode).tolist()],
                logprobs=np.full(3 + episode, -np.log(128)), messages=(), spans=(Span(2, 5 + episode, 0),),
                id=f"task-{sequence}.0.0-{episode}-0", group=f"task-{sequence}.0", episode=episode, group_size=3,
                sequence=sequence, end="truncated" if episode == 2 else "terminal", reward=float(episode),
            )
            for episode in range(3)
        )
    )  # fmt: skip


def pair(number: int, rejected: int = 41) -> Block:
    return Block(
        tuple(
            make_experience(
                tokens=[1, 25, answer, 2],
                logprobs=[0.0, 0.0],
                messages=(),
                spans=(Span(2, 4, -1, 1.0, False),),
                id=f"pair-{number}.0.0-{episode}-0",
                group=f"pair-{number}.0",
                episode=episode,
                group_size=2,
                lane="human",
                kind=side,  # type: ignore[arg-type]
            )
            for episode, (side, answer) in enumerate((("chosen", 40), ("rejected", rejected)))
        )
    )


WARMUP = WarmupConfig(every=1, stop_at=1.0, max_steps=2, min_experiences=2, batch=2, learning_rate=1e-2)
BEFORE = {"usual": LaneConfig(), "expert": LaneConfig(loss="sft", weight=0.1, share=0.1, max_uses=99, optional=True)}
HUMAN = LaneConfig(loss="dpo", weight=0.2, share=0.5, max_uses=99, optional=True)


PPO = {
    "usual": LaneConfig(loss="ppo", weight=0.8, options={"minibatches": 2}),
    "human": LaneConfig(loss="dpo", weight=0.2, share=0.5, max_uses=9, optional=True),
}
DEMONSTRATIONS = [block(number, "expert") for number in range(4)]


def settings(steps: int, lanes: dict[str, LaneConfig], **more: object) -> TrainerConfig:
    given = {"checkpoint_every": 2, "keep_checkpoints": 9, "learning_rate": 1e-3, "threads": 1, **more}
    return TrainerConfig(lanes=lanes, max_steps=steps, **given)  # type: ignore[arg-type]


async def filled(store: MemoryStore, first: Sequence[Block], steps: int = 20, bus: MemoryBus | None = None) -> Log:
    log = Log(bus or MemoryBus(), "t", store=store)
    await log.create_topics(partitions=1, keep_ms=-1)
    for each in (*first, *map(group, range(2 * steps))):
        await log.publish(topics.BUFFER, each)
    return log


async def prefer(log: Log, steps: int) -> None:
    """Pairs for the lane that joins, and groups for what comes after `steps`, which cannot be drawn before them."""
    for number in range(10, 14):
        await log.publish(topics.BUFFER, pair(number))
    for sequence in range(2 * steps, 40):
        await log.publish(topics.BUFFER, group(sequence))


async def num_pairs(log: Log) -> int:
    """Sides of pairs that were trained."""
    return sum(item.lane == "human" for entry in await journal(log) if isinstance(entry, Batch) for item in entry.items)


async def train(log: Log, store: MemoryStore, model: str, config: TrainerConfig) -> dict[str, Tensor]:
    learner = TorchLearner(model, config, device="cpu")
    await run_trainer(role_of("train", FLOOR, log, store), config, learner, seed=3)
    return learner.save()


def part(state: dict[str, Tensor], name: str) -> dict[str, bytes]:
    return {tensor: bytes(item.data) for tensor, item in state.items() if state_part(tensor) == name}


def weights(state: dict[str, Tensor]) -> dict[str, bytes]:
    return {f"reference/{name[6:]}": bytes(item.data) for name, item in state.items() if name.startswith("model/")}


@pytest.mark.slow
async def test_pairs_are_drawn_whole_and_a_restarted_critic_goes_on_to_the_same_bits(model: str) -> None:
    first = [*map(pair, range(4)), pair(9, rejected=40)]
    saved = []
    for stops in ((STEPS,), (STEPS // 2, STEPS)):
        store = MemoryStore()
        log = await filled(store, first, STEPS)
        for steps in stops:
            state = await train(log, store, model, settings(steps, PPO, critic=CriticConfig(learning_rate=1e-3)))
        saved.append({name: bytes(item.data) for name, item in state.items()})
        batches = [record for record in await journal(log) if isinstance(record, Batch)]
        assert [batch.step for batch in batches] == list(range(STEPS))
        for batch in batches:
            human = [item.id for item in batch.items if item.lane == "human"]
            assert human and human[0::2] == [name.replace("-1-0", "-0-0") for name in human[1::2]]
            assert not any(name.startswith("pair-9") for name in human), "equal sides teach nothing"
    assert saved[0] == saved[1] and any(name.startswith("critic/") for name in saved[0])


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [None, WARMUP], ids=["no warm-up", "warm-up"])
async def test_a_lane_that_needs_a_reference_joins_a_run_and_is_held_to_the_policy_that_it_joins(
    model, warmup, caplog
) -> None:
    store = MemoryStore()
    log = await filled(store, DEMONSTRATIONS, 4)
    await train(log, store, model, settings(4, BEFORE, warmup=warmup))
    joined = checkpoint.load(store, "t", max(checkpoint.places(store, "t")))
    await prefer(log, 4)
    state = await train(log, store, model, settings(6, BEFORE | {"human": HUMAN}, warmup=warmup))
    assert await num_pairs(log) > 0
    assert part(state, "reference") == weights(dict(joined.learner)) != weights(state)
    assert "has no reference, a lane wants one: it begins as the policy of the checkpoint" in caplog.text
    again = await train(log, store, model, settings(8, BEFORE | {"human": HUMAN}, warmup=warmup))
    assert part(again, "reference") == part(state, "reference")
    gone = await train(log, store, model, settings(10, BEFORE, warmup=warmup))
    assert not part(gone, "reference") and "no lane wants any more" in caplog.text


@pytest.mark.slow
async def test_a_trainer_killed_around_the_lanes_first_steps_ends_with_the_bits_of_one_that_was_not(model: str) -> None:
    lanes = settings(5, BEFORE | {"human": HUMAN})

    async def final(*kills: int) -> str:
        """The state after processes that died at these sends, counted from the start of each."""
        bus, store = KillingBus(), KillingStore()
        log = await filled(store, DEMONSTRATIONS, 2, bus)
        await train(log, store, model, settings(2, BEFORE))
        await prefer(log, 2)
        for send in kills:
            bus.sends, bus.kill_at = 0, send
            assert not await ends(train(log, store, model, lanes))
        bus.kill_at = -1
        state = await train(log, store, model, lanes)
        assert await num_pairs(log) > 0
        return whole_hash(state)

    expected = await final()
    for kills in ((2, 5), (6, 4), (9,)):
        assert await final(*kills) == expected, kills


@pytest.mark.slow
async def test_a_critic_joins_a_run_and_begins_as_the_models_folder(model: str) -> None:
    store = MemoryStore()
    log = await filled(store, DEMONSTRATIONS)
    before = await train(log, store, model, settings(2, {"usual": LaneConfig()}))
    lanes = {"usual": LaneConfig(loss="ppo")}
    state = await train(log, store, model, settings(4, lanes, critic=CriticConfig()))
    assert not part(before, "critic") and "critic/head.weight" in state
    assert len(await journal(log)) > 4


@pytest.mark.slow
async def test_another_model_is_refused_as_before(model: str, tmp_path: Path) -> None:
    other = str(build_char_model(tmp_path / "other", seed=3, size=Size(hidden=64)))
    store = MemoryStore()
    log = await filled(store, DEMONSTRATIONS)
    await train(log, store, model, settings(2, BEFORE))
    with pytest.raises(ConfigError, match=r"checkpoint of step 1 does not fit the configured model: .* got shape"):
        await train(log, store, other, settings(4, BEFORE | {"human": HUMAN}))
