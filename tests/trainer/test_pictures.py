"""Training on pictures: packed as a plain forward reads them, with gradients that reach the tower."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_tokenizer
from infra.model.vision import FAMILIES
from infra.policies.tensors import to_numpy
from infra.settings.config import Floor, Pacing
from infra.store.images import deposit_image
from infra.store.memory import MemoryStore
from schemas import Batch, Block, Drawn, Message, Span, make_experience, topics
from schemas.errors import BadFrame
from tests.role import role_of
from tests.tiny_models import NUM_PLACES, build_eye_model, drawings
from tests.trainer.memory_run import replaying
from tests.trainer.trainer_samples import make_item
from trainer.batch.batch import Microbatch, TrainItem, pack
from trainer.batch.image_inputs import BAD_IMAGE, ImageInputs, open_sight
from trainer.batch.split import for_ranks, split
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.forward import PackedModel
from trainer.learners.orders import decode_arrays, encode_arrays
from trainer.learners.torch import TorchLearner
from trainer.replay.replay import find_start, replay
from trainer.state import whole_hash
from trainer.train import run_trainer

SFT = TrainerConfig(lanes={"usual": LaneConfig(loss="sft", weight=1.0)})


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_eye_model(tmp_path_factory.mktemp("eye") / "model", family=request.param)


def opened(model: Path, count: int = 6) -> tuple[ImageInputs, MemoryStore, list[TrainItem]]:
    """Two answers to each of some pictures, and the way to see them."""
    store = MemoryStore()
    image_inputs = open_sight(str(model), store)
    assert image_inputs is not None
    tokenizer = load_tokenizer(model)
    items = []
    for index, each in enumerate(drawings(count)):
        deposit_image(store, each.image, each.picture)
        question = Message(role="user", content="count", images=(each.image,))
        prompt = tokenizer.encode_chat([question])
        for episode, answer in enumerate((each.answer, "9")):
            tokens = [*prompt, *tokenizer.encode(answer), tokenizer.eos_ids[0]]
            item = make_item(tokens, [Span(len(prompt), len(tokens), 0)], group=f"t-{index}.0", episode=episode)
            messages = (question, Message(role="assistant", content=answer))
            items.append(TrainItem(item.experience.with_bulk(messages=messages), item.item))
    return image_inputs, store, items


def by_sequence(model: PackedModel, batch: object) -> dict[int, np.ndarray]:
    found = {}
    with torch.no_grad():
        for rows in batch.microbatches:  # type: ignore[attr-defined]
            logprobs = model.logprobs(rows).numpy()
            found |= {int(s): logprobs[rows.sequence_N == s] for s in np.unique(rows.sequence_N)}
    return found


def test_a_packed_picture_gives_the_logprobs_of_each_sequence_alone_and_is_computed_once_a_group(model: Path) -> None:
    image_inputs, _, items = opened(model)
    shown = image_inputs.shown(items)
    packed = PackedModel(str(model), dtype="float32", device="cpu")
    together = pack(shown, max_tokens=4096)
    assert sum(len(rows.pixels_I3HW) for rows in together.microbatches) == 6, "a group's picture is computed once"
    found = by_sequence(packed, together)
    vision = image_inputs.vision
    for s, item in enumerate(shown):
        ids = torch.tensor(item.experience.tokens.astype(np.int64))[None]
        assert item.pictures is not None
        with torch.no_grad():
            pixels = torch.from_numpy(np.stack(item.pictures.pixels))
            logits = packed.module(input_ids=ids, pixel_values=pixels).logits[0]
        plain = torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[s], plain[-2:], atol=1e-5)
    assert vision.num_places == NUM_PLACES


def test_parts_and_ranks_get_the_pictures_of_their_rows(model: Path) -> None:
    image_inputs, _, items = opened(model)
    packed = PackedModel(str(model), dtype="float32", device="cpu")
    whole = pack(image_inputs.shown(items), max_tokens=14)
    expected = by_sequence(packed, whole)
    assert len(whole.microbatches) > 1
    sent = [
        [Microbatch(**decode_arrays(encode_arrays(rows))) for rows in part]
        for ranks in (1, 3)
        for part in for_ranks(whole, ranks)
    ]
    for parts in (split(whole, 3, seed=1), [msgspec.structs.replace(whole, microbatches=tuple(part)) for part in sent]):
        found = {s: values for part in parts for s, values in by_sequence(packed, part).items()}
        assert found.keys() == expected.keys()
        for s, values in found.items():
            np.testing.assert_allclose(values, expected[s], atol=1e-5)


def test_rows_without_pictures_give_the_tower_a_gradient_of_0_where_ranks_reduce_it(model: Path) -> None:
    plain, looking = (
        PackedModel(str(model), dtype="float32", device="cpu", looks_always=looks) for looks in (False, True)
    )
    (rows,) = pack([make_item([1, 5, 6, 7], [Span(2, 4, 0)])], max_tokens=14).microbatches
    logprob_N = looking.logprobs(rows)
    assert torch.equal(logprob_N, plain.logprobs(rows))
    logprob_N.sum().backward()
    towers = [value.grad for name, value in looking.trained.items() if "patch_embedding" in name]
    assert towers and not any(grad.any() for grad in towers)


def test_an_image_token_that_was_sampled_is_a_token_like_any_other(model: Path) -> None:
    image_inputs, _, items = opened(model, 1)
    first = items[0]
    tokens = [*first.experience.tokens[:-1].tolist(), image_inputs.vision.token, 2]
    spans = (Span(len(tokens) - 3, len(tokens), 0),)
    longer = first.experience.with_bulk(tokens=tokens, logprobs=[-1.0] * 3, spans=spans)
    (shown,) = image_inputs.shown([TrainItem(longer, first.item)])
    first_place = int(np.flatnonzero(first.experience.tokens == image_inputs.vision.token)[0])
    assert shown.pictures is not None
    assert shown.pictures.places_P.tolist() == list(range(first_place, first_place + NUM_PLACES))
    (rows,) = pack([shown], max_tokens=64).microbatches
    assert len(rows.places_P) == NUM_PLACES


def test_gradients_reach_the_vision_tower_and_a_loss_over_pictures_falls(model: Path) -> None:
    image_inputs, _, items = opened(model)
    learner = TorchLearner(str(model), SFT, device="cpu")
    batch = pack(image_inputs.shown(items[::2]), max_tokens=4096)
    before = learner.tensors()
    losses = [learner.step(batch, learning_rate=3e-3, seed=step).loss for step in range(60)]
    moved = {
        name for name, item in learner.tensors().items() if not np.array_equal(to_numpy(item), to_numpy(before[name]))
    }
    for part in ("vision_tower.embeddings.patch_embedding", "multi_modal_projector", "language_model"):
        assert any(part in name for name in moved), f"nothing of {part} was trained"
    assert losses[-1] < 0.5 * losses[0]
    blind = pack(image_inputs.shown(swapped(items[::2])), max_tokens=4096)
    assert learner.greedy_accuracy(batch) > learner.greedy_accuracy(blind), "it answers without looking"


def swapped(items: list[TrainItem]) -> list[TrainItem]:
    """Every answer about the picture of one that has another answer."""
    found = []
    for item in items:
        messages = item.experience.messages
        other = next(each for each in items if each.experience.response != item.experience.response)
        question = msgspec.structs.replace(messages[0], images=other.experience.messages[0].images)
        found.append(TrainItem(item.experience.with_bulk(messages=(question, *messages[1:])), item.item))
    return found


FLOOR = Floor(app="t", pacing=Pacing(groups_per_step=2, max_staleness=2, straggler_s=0.01))
CONFIG = TrainerConfig(
    lanes={"usual": LaneConfig(weight=1.0)}, learning_rate=1e-3, checkpoint_every=2, max_steps=4, tensorboard=""
)
GROUPS, GONE = 9, 4


@pytest.fixture(scope="module")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_eye_model(tmp_path_factory.mktemp("eye") / "model")


async def filled(log: Log, store: MemoryStore, tiny_model_folder: Path) -> None:
    """Groups of two answers about a picture each; one picture is not in the store."""
    await log.create_topics(partitions=2, keep_ms=-1)
    tokenizer = load_tokenizer(tiny_model_folder)
    for sequence, each in enumerate(drawings(GROUPS)):
        if sequence != GONE:
            deposit_image(store, each.image, each.picture)
        question = Message(role="user", content="count", images=(each.image,))
        prompt = tokenizer.encode_chat([question])
        group = f"count-{sequence}.0"
        members = tuple(
            make_experience(
                tokens=[*prompt, *tokenizer.encode(answer), 2], logprobs=[-0.5, -0.25],
                messages=(question, Message(role="assistant", content=answer)), id=f"{group}.0-{episode}-0", group=group,
                episode=episode, group_size=2, spans=(Span(len(prompt), len(prompt) + 2, 10_000),), sequence=sequence,
                reward=float(episode), advantage=float(episode) - 0.5,
            )
            for episode, answer in enumerate(("9", each.answer))
        )  # fmt: skip
        await log.publish(topics.BUFFER, Block(members))


async def test_a_run_on_pictures_drops_what_cannot_be_shown_and_is_replayed_to_the_bit(tiny_model_folder: Path) -> None:
    store = MemoryStore()
    log = Log(MemoryBus(), "t", store=store)
    await filled(log, store, tiny_model_folder)
    learner = TorchLearner(str(tiny_model_folder), CONFIG, device="cpu")
    image_inputs = open_sight(str(tiny_model_folder), store)
    await run_trainer(role_of("train", FLOOR, log, store), CONFIG, learner, seed=3, image_inputs=image_inputs)
    journal = [message.value async for message in log.scan(topics.BATCHES)]
    trained = {item.id.partition(".")[0] for each in journal if isinstance(each, Batch) for item in each.items}
    assert trained == {f"count-{sequence}" for sequence in range(GROUPS) if sequence != GONE}
    told = [message.value async for message in log.scan(topics.PROGRESS)]
    dropped = {group: why for each in told if isinstance(each, Drawn) for group, why in each.dropped.items()}
    assert dropped == {f"count-{GONE}.0": BAD_IMAGE}

    again = TorchLearner(str(tiny_model_folder), CONFIG, device="cpu")
    run = replaying(again, CONFIG, FLOOR, open_sight(str(tiny_model_folder), store))
    compared = [compared async for compared in replay(run, "t", log, store, await start(log, store))]
    assert len(compared) >= 2 and all(each.equal and not each.fault for each in compared)
    assert whole_hash(again.save()) == whole_hash(learner.save())

    name = next(iter(store.keys("blobs/")))
    store.delete(name)
    with pytest.raises(BadFrame, match=f"missing: {name}"):
        other = TorchLearner(str(tiny_model_folder), CONFIG, device="cpu")
        third = replaying(other, CONFIG, FLOOR, open_sight(str(tiny_model_folder), store))
        [compared async for compared in replay(third, "t", log, store, await start(log, store))]


async def start(log: Log, store: MemoryStore):
    return await find_start(log, store, "t", from_step=-1, to_step=None)
