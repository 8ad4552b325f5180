"""Tiny random models of every family through the learner, publication and the torch engine.

Each is opened by the learner (packed, or sequence by sequence), its gradients are compared with those of plain forwards by
transformers, then it takes steps whose versions are stored, fetched and loaded by an engine that scores their probes.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from infra.cli.bench.learner.tiny_models import FAMILIES, build_tiny_model
from schemas import BatchItem, Span, make_experience
from schemas.errors import ConfigError, PolicyRefused

if TYPE_CHECKING:
    from infra.policies.policy import Policy
    from trainer.batch.batch import TrainItem
    from trainer.learners.forward import PackedModel
    from trainer.learners.torch import TorchLearner

RELOADS = 3
GRADIENT, LOGPROB = 1e-5, 1e-4  # relative, and nats: what a family may differ by in float32
TOKENS = range(24, 94)  # of the vocabulary: none is the token of a picture
SHARED, LENGTH, EPISODES = 12, 30, 3


class Family(msgspec.Struct, frozen=True):
    """What was found of one family of models.

    name: as transformers has it. reading: how the learner reads rows. gradient: largest relative difference from plain
    forwards. engine: largest difference of a probe's logprob over three reloads, nats. refused: why it goes no further,
    "" if it does.
    """

    name: str
    reading: str = ""
    gradient: float = 0.0
    engine: float = 0.0
    refused: str = ""

    @property
    def works(self) -> bool:
        """Within what float32 may differ by."""
        return not self.refused and self.gradient <= GRADIENT and self.engine <= LOGPROB


def run(names: Sequence[str] = ()) -> Iterator[Family]:
    """One family after the other. names: all where left out."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or FAMILIES:
            yield examined(name, build_tiny_model(Path(folder) / name, name))


def examined(name: str, folder: Path) -> Family:
    """What is found of the model in a folder; a family that is refused says so, and anything else raises."""
    from trainer.learners.forward import PackedModel

    try:
        packed = PackedModel(str(folder), dtype="float32", device="cpu")
    except ConfigError as error:
        return Family(name=name, refused=str(error).replace(str(folder), name))
    gradient = _gradient_error(str(folder), packed)
    try:
        engine = asyncio.run(_engine_error(folder))
    except PolicyRefused as error:
        return Family(name=name, reading=packed.reading, gradient=gradient, refused=str(error))
    return Family(name=name, reading=packed.reading, gradient=gradient, engine=engine)


def _items(folder: str) -> list["TrainItem"]:
    """A group whose sequences share their beginning, longer than any window here; it shows a picture to a model that sees."""
    from infra.model.vision import load_vision, probe_picture
    from trainer.batch.batch import TrainItem
    from trainer.batch.pictures import Pictures

    vision = load_vision(folder)
    seen = [] if vision is None else [vision.token] * vision.num_places
    pictures = None
    if vision is not None:
        places = np.arange(1, 1 + len(seen))
        pictures = Pictures(names=("picture",), places_P=places, pixels=(vision.prepare(probe_picture(0)),))
    items = []
    for episode in range(EPISODES):
        tokens = [TOKENS[(7 * at + (at >= SHARED) * 11 * episode) % len(TOKENS)] for at in range(LENGTH)]
        tokens[1 : 1 + len(seen)] = seen
        name = f"family-0.0.0-{episode}-0"
        experience = make_experience(
            id=name,
            group="family-0.0",
            episode=episode,
            group_size=EPISODES,
            tokens=tokens,
            logprobs=[-1.0] * (LENGTH - SHARED),
            messages=(),
            spans=(Span(SHARED, LENGTH, 0),),
        )
        item = BatchItem(id=name, partition=0, offset=0, index=episode, lane="usual", advantage=1.0 - episode)
        items.append(TrainItem(experience, item, pictures))
    return items


def _gradient_error(folder: str, packed: "PackedModel") -> float:
    """Largest difference of a gradient of packed rows from that of each sequence alone, per largest of its tensor."""
    import torch

    from infra.model.model import load_model
    from trainer.batch.batch import pack

    items = _items(folder)
    plain = load_model(folder)
    for one in pack(items, max_tokens=1000).microbatches:
        torch.autograd.backward(packed.logprobs(one).sum())
    for item in items:
        ids = torch.from_numpy(item.experience.tokens.astype("int64"))[None]
        shown = item.pictures
        pixels = {} if shown is None else {"pixel_values": torch.from_numpy(np.stack(shown.pixels))}
        logits = plain(input_ids=ids, **pixels, use_cache=False).logits[0, SHARED - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[0, SHARED:, None])
        torch.autograd.backward(logprobs.sum())
    errors = [0.0]
    for mine, other in zip(packed.module.parameters(), plain.parameters(), strict=True):
        if mine.grad is not None and other.grad is not None:
            scale = max(1.0, float(other.grad.abs().max()))
            errors.append(float((mine.grad - other.grad).abs().max()) / scale)
    return max(errors)


async def _engine_error(folder: Path) -> float:
    """Largest difference between an engine's logprobs and the probe's, over `RELOADS` versions. Raises PolicyRefused."""
    from actors.engines.torch import TorchEngine
    from trainer.config import LaneConfig, TrainerConfig
    from trainer.learners.torch import TorchLearner

    config = TrainerConfig(lanes={"usual": LaneConfig(loss="grpo")}, threads=0)
    learner = await asyncio.to_thread(TorchLearner, str(folder), config, device="cpu")
    engine = TorchEngine(model=str(folder), max_model_len=128)
    await engine.start()
    largest = 0.0
    try:
        async for policy in _versions(learner, str(folder)):
            await engine.load(policy)
            assert policy.probe is not None
            for tokens, expected in zip(policy.probe.sequences, policy.probe.logprobs, strict=True):
                scores = await engine.score_tokens(tokens)
                largest = max(largest, *(abs(a - b) for a, b in zip(scores, expected, strict=True)))
    finally:
        await engine.close()
    return largest


async def _versions(learner: "TorchLearner", folder: str) -> AsyncIterator["Policy"]:
    """Versions as an engine gets them: stepped, stored and fetched."""
    from infra.policies.fetch import PolicyFetcher
    from infra.policies.publish import NewVersion, publish
    from infra.store.memory import MemoryStore
    from trainer.batch.batch import pack

    store, items = MemoryStore(), _items(folder)
    batch = pack(items, max_tokens=1000)
    sequences = tuple(tuple(one.experience.tokens.tolist()) for one in items)
    fetcher, previous = PolicyFetcher(store, "main"), None
    for version in range(RELOADS):
        learner.step(batch, learning_rate=1e-3, seed=version)
        tensors, probe = learner.tensors(), learner.probe(sequences)
        new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
        event = publish(store, new, tensors, previous=previous, probe=probe)
        previous = tensors
        policy = fetcher.fetch(event)
        yield policy
        fetcher.confirm(policy)
