"""The images of one prompt: compared by their pixels, prepared for the vision tower once."""

import hashlib
from collections.abc import Sequence

from infra.model.vision import Prepared, Vision
from infra.store.images import Pixels


class RequestImages:
    """The images of one prompt, equal where their pixels are."""

    def __init__(self, images: Sequence[Pixels] = ()) -> None:
        self.images = tuple(images)
        self._prepared: tuple[Prepared, ...] | None = None
        self._digest = tuple((one.shape, hashlib.blake2b(one.tobytes(), digest_size=16).digest()) for one in images)

    def prepared(self, vision: Vision) -> tuple[Prepared, ...]:
        """As the vision tower takes them, computed once."""
        if self._prepared is None:
            self._prepared = tuple(vision.prepare(image) for image in self.images)
        return self._prepared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestImages) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)
