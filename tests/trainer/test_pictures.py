"""Training on pictures: packed as a plain forward reads them, with gradients that reach the tower."""

from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch

from infra.model.model import load_tokenizer
from infra.model.vision import FAMILIES
from infra.policies.tensors import to_numpy
from infra.store.images import deposit_image
from infra.store.memory import MemoryStore
from schemas import Block, Message, Span
from schemas.errors import BadFrame
from tests.eye_model import NUM_PLACES, build_eye_model, drawings
from tests.trainer.trainer_samples import make_item
from trainer.batch.batch import Microbatch, TrainItem, pack
from trainer.batch.image_inputs import ImageInputs, open_sight
from trainer.batch.split import split
from trainer.buffer.pool import Candidate
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.forward import PackedModel
from trainer.learners.orders import decode_arrays, encode_arrays
from trainer.learners.torch import TorchLearner

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
    for index, one in enumerate(drawings(count)):
        deposit_image(store, one.image, one.picture)
        question = Message(role="user", content="count", images=(one.image,))
        prompt = tokenizer.encode_chat([question])
        for episode, answer in enumerate((one.answer, "9")):
            tokens = [*prompt, *tokenizer.encode(answer), tokenizer.eos_ids[0]]
            item = make_item(tokens, [Span(len(prompt), len(tokens), 0)], group=f"t-{index}.0", episode=episode)
            messages = (question, Message(role="assistant", content=answer))
            items.append(TrainItem(item.experience.with_bulk(messages=messages), item.item))
    return image_inputs, store, items


def by_sequence(model: PackedModel, batch: object) -> dict[int, np.ndarray]:
    found = {}
    with torch.no_grad():
        for one in batch.microbatches:  # type: ignore[attr-defined]
            logprobs = model.logprobs(one).numpy()
            found |= {int(s): logprobs[one.sequence_N == s] for s in np.unique(one.sequence_N)}
    return found


def test_a_packed_picture_gives_the_logprobs_of_each_sequence_alone_and_is_computed_once_a_group(model: Path) -> None:
    image_inputs, _, items = opened(model)
    shown = image_inputs.shown(items)
    packed = PackedModel(str(model), dtype="float32", device="cpu")
    together = pack(shown, max_tokens=4096)
    assert sum(len(one.pixels_I3HW) for one in together.microbatches) == 6, "a group's picture is computed once"
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
    sent = [Microbatch(**decode_arrays(encode_arrays(one))) for one in whole.microbatches]
    for parts in (split(whole, 3, seed=1), [msgspec.structs.replace(whole, microbatches=tuple(sent))]):
        found = {s: values for part in parts for s, values in by_sequence(packed, part).items()}
        assert found.keys() == expected.keys()
        for s, values in found.items():
            np.testing.assert_allclose(values, expected[s], atol=1e-5)


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
    (one,) = pack([shown], max_tokens=64).microbatches
    assert len(one.places_P) == NUM_PLACES


def test_gradients_reach_the_vision_tower_and_a_loss_over_pictures_falls(model: Path) -> None:
    image_inputs, _, items = opened(model)
    learner = TorchLearner(str(model), SFT, device="cpu")
    batch = pack(image_inputs.shown(items[::2]), max_tokens=4096)
    before = learner.tensors()
    losses = [learner.step(batch, learning_rate=3e-3, seed=step).loss for step in range(60)]
    moved = {
        name for name, one in learner.tensors().items() if not np.array_equal(to_numpy(one), to_numpy(before[name]))
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
        other = next(one for one in items if one.experience.response != item.experience.response)
        question = msgspec.structs.replace(messages[0], images=other.experience.messages[0].images)
        found.append(TrainItem(item.experience.with_bulk(messages=(question, *messages[1:])), item.item))
    return found


def test_a_group_whose_image_cannot_be_shown_is_found_before_the_journal(model: Path) -> None:
    image_inputs, store, items = opened(model, 3)
    blocks = [Block(tuple(one.experience for one in items[at : at + 2])) for at in (0, 2, 4)]
    taken = tuple(
        Candidate(group=block.experiences[0].group, lane="usual", offset=at, num_experiences=2)
        for at, block in enumerate(blocks)
    )
    gone = blocks[1].experiences[0].messages[0].images[0]
    store.delete(f"blobs/{gone.sha256}")
    assert image_inputs.unreadable(taken, blocks) == [taken[1]]
    with pytest.raises(BadFrame, match="missing"):
        image_inputs.shown(items)


def test_places_that_do_not_fit_the_images_are_a_bad_image(model: Path) -> None:
    image_inputs, _, items = opened(model, 1)
    experience = items[0].experience
    torn = experience.tokens.copy()
    torn[Random(1).choice(image_inputs.vision.places(torn, 1))] = 2
    block = Block((experience.with_bulk(tokens=torn),))
    candidate = Candidate(group=experience.group, lane="usual", offset=0, num_experiences=1)
    assert image_inputs.unreadable([candidate], [block]) == [candidate]
