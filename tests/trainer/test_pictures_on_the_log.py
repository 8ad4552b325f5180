"""Pictures through the trainer on a log in memory: learned from, dropped where they are gone, replayed to the bit."""

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_tokenizer
from infra.observe.metrics import Metrics
from infra.settings.config import Floor, Pacing
from infra.store.images import deposit_image
from infra.store.memory import MemoryStore
from schemas import Batch, Block, Drawn, Message, Span, make_experience, topics
from schemas.errors import BadFrame
from tests.eye_model import build_eye_model, drawings
from tests.role import role_of
from trainer.batch.image_inputs import BAD_IMAGE, open_sight
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.checkpoint import Position
from trainer.learners.torch import TorchLearner
from trainer.loop.report import TrainerReport
from trainer.loop.state import Learning
from trainer.replay.replay import find_start, replay
from trainer.state import whole_hash
from trainer.train import run_trainer

FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=2, straggler_s=0.01))
CONFIG = TrainerConfig(
    lanes={"usual": LaneConfig(weight=1.0)}, learning_rate=1e-3, checkpoint_every=2, max_steps=4, tensorboard=""
)
GROUPS, GONE = 9, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_eye_model(tmp_path_factory.mktemp("eye") / "model")


async def filled(log: Log, store: MemoryStore, model: Path) -> None:
    """Groups of two answers about a picture each; one picture is not in the store."""
    await log.create_topics(partitions=2, keep_ms=-1)
    tokenizer = load_tokenizer(model)
    for sequence, one in enumerate(drawings(GROUPS)):
        if sequence != GONE:
            deposit_image(store, one.image, one.picture)
        question = Message(role="user", content="count", images=(one.image,))
        prompt = tokenizer.encode_chat([question])
        group = f"count-{sequence}.0"
        members = tuple(
            make_experience(
                tokens=[*prompt, *tokenizer.encode(answer), 2], logprobs=[-0.5, -0.25],
                messages=(question, Message(role="assistant", content=answer)), id=f"{group}.0-{episode}-0", group=group,
                episode=episode, group_size=2, spans=(Span(len(prompt), len(prompt) + 2, 10_000),), sequence=sequence,
                reward=float(episode), advantage=float(episode) - 0.5,
            )
            for episode, answer in enumerate(("9", one.answer))
        )  # fmt: skip
        await log.publish(topics.BUFFER, Block(members))


def test_a_run_on_pictures_drops_what_cannot_be_shown_and_is_replayed_to_the_bit(model: Path) -> None:
    async def main() -> None:
        store = MemoryStore()
        log = Log(MemoryBus(), "t", store=store)
        await filled(log, store, model)
        learner = TorchLearner(str(model), CONFIG, device="cpu")
        image_inputs = open_sight(str(model), store)
        await run_trainer(role_of("train", FLOOR, log, store), CONFIG, learner, seed=3, image_inputs=image_inputs)
        journal = [message.value async for message in log.read_all(topics.BATCHES)]
        trained = {item.id.partition(".")[0] for one in journal if isinstance(one, Batch) for item in one.items}
        assert trained == {f"count-{sequence}" for sequence in range(GROUPS) if sequence != GONE}
        told = [message.value async for message in log.read_all(topics.PROGRESS)]
        dropped = {group: why for one in told if isinstance(one, Drawn) for group, why in one.dropped.items()}
        assert dropped == {f"count-{GONE}.0": BAD_IMAGE}

        again = TorchLearner(str(model), CONFIG, device="cpu")
        compared = [
            one async for one in replay(learning(again, model, store), "t", log, store, await start(log, store))
        ]
        assert len(compared) >= 2 and all(one.equal and not one.fault for one in compared)
        assert whole_hash(again.save()) == whole_hash(learner.save())

        name = next(iter(store.keys("blobs/")))
        store.delete(name)
        with pytest.raises(BadFrame, match=f"missing: {name}"):
            third = learning(TorchLearner(str(model), CONFIG, device="cpu"), model, store)
            [one async for one in replay(third, "t", log, store, await start(log, store))]

    asyncio.run(main())


async def start(log: Log, store: MemoryStore):
    return await find_start(log, store, "t", from_step=-1, to_step=None)


def learning(learner: TorchLearner, model: Path, store: MemoryStore) -> Learning:
    return Learning(
        floor=FLOOR, config=CONFIG, learner=learner, report=TrainerReport(Metrics("replay")), position=Position(),
        image_inputs=open_sight(str(model), store),
    )  # fmt: skip


def test_what_lies_in_the_log_of_a_picture_is_its_reference(model: Path) -> None:
    async def main() -> list[bytes]:
        log = Log(MemoryBus(), "t", store=MemoryStore())
        await filled(log, MemoryStore(), model)
        blocks = [message async for message in log.read_all(topics.BUFFER)]
        assert all(isinstance(one.value, Block) for one in blocks)
        images = [one.value.experiences[0].messages[0].images for one in blocks]  # type: ignore[union-attr]
        assert [image.sha256 for (image,) in images] == [one.image.sha256 for one in drawings(GROUPS)]
        return [one.record.value for one in blocks]

    pictures = [one.picture for one in drawings(GROUPS)]
    assert not any(picture in value for value, picture in zip(asyncio.run(main()), pictures, strict=True))
    assert msgspec.structs.fields(Message)[-1].name == "images"
