"""Reads the images of drawn experiences from the store.

Guarantees: a group with an unreadable image is dropped before the journal, with a reason and a count; a journaled batch is
always packed with the same pixels, or the step raises.
"""

from collections.abc import Sequence

import msgspec

from infra.model.vision import Vision, vision_if_any
from infra.store.images import ImageReader, images_of
from infra.store.store import Store
from schemas import Block, Experience
from schemas.errors import BadFrame, BadImage
from trainer.batch.batch import TrainItem
from trainer.batch.tree import Pictures
from trainer.buffer.pool import Candidate

BAD_IMAGE = "bad image"


class ImageInputs:
    """Reads the images of a model's experiences. Blocking: call from a thread."""

    def __init__(self, vision: Vision, store: Store) -> None:
        self.vision = vision
        self._reader = ImageReader(store, prepare=vision.prepare)

    def pictures(self, experience: Experience) -> Pictures | None:
        """The pictures at the image tokens of an experience. Raises BadImage, StoreError."""
        images = images_of(experience.messages)
        if not images:
            return None
        try:
            places = self.vision.places(experience.tokens, len(images))
        except ValueError as error:
            raise BadImage(BAD_IMAGE, f"{experience.id}: {error}") from error
        pixels = self._reader.read_all(images)
        return Pictures(names=tuple(image.sha256 for image in images), places_P=places, pixels=pixels)

    def shown(self, items: Sequence[TrainItem]) -> list[TrainItem]:
        """The items with their pictures. Raises BadFrame naming an experience or image that cannot be read."""
        try:
            return [msgspec.structs.replace(item, pictures=self.pictures(item.experience)) for item in items]
        except BadImage as error:
            raise BadFrame(f"a journaled batch needs it: {error}") from error

    def unreadable(self, taken: Sequence[Candidate], blocks: Sequence[Block]) -> list[Candidate]:
        """Groups that cannot be shown. Raises StoreError."""
        return [candidate for candidate, block in zip(taken, blocks, strict=True) if not self._can_show(block)]

    def _can_show(self, block: Block) -> bool:
        try:
            for experience in block.experiences:
                self.pictures(experience)
        except BadImage:
            return False
        return True


def open_sight(folder: str, store: Store) -> ImageInputs | None:
    """Open the image inputs of a model folder; None for a text model, or without a model. Raises ConfigError for an unsupported
    vision model.
    """
    vision = vision_if_any(folder)
    return None if vision is None else ImageInputs(vision, store)
