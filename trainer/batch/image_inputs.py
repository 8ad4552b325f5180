"""The pictures of what is trained: read back from the store by the references that experiences keep.

Guarantees: a group with a picture that cannot be read is dropped before the journal, with a reason, published and counted; what
is in the journal is packed with the same pixels every time, or the step raises.
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
    """Reads the pictures of one model's experiences. Blocking: call from a thread."""

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
        """The items with their pictures. Raises BadFrame naming what cannot be shown."""
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
    """For the model of a folder; None where it reads text alone, or where no model is: a learner that needs one says so.

    Raises ConfigError for a model that takes pictures in a way there is not code for.
    """
    vision = vision_if_any(folder)
    return None if vision is None else ImageInputs(vision, store)
