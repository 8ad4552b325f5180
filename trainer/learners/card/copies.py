"""Whether copies of the policy are kept on the card that trains it (`trainer.weights_on_card`)."""

import logging
from collections.abc import Mapping

import torch

from infra.store.rooms import Rooms
from trainer.learners.card.tensors import CardTensors

logger = logging.getLogger(__name__)

ROOM = 3  # copies: two while a version is published, and what it takes to compare them


class CardCopies:
    """Of one learner or rank. wanted: by its settings. stepped: whether it took a step, which shows how much memory is left."""

    def __init__(self, device: torch.device, *, wanted: bool) -> None:
        self.stepped = False
        self._device = device
        self._wanted = wanted and device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    def begin(self, num_bytes: int) -> CardTensors | None:
        """The next copy, still empty; None where it is to go to the host: before the first step, and where steps leave less
        than ROOM copies. num_bytes: of a copy.
        """
        if not (self._wanted and self.stepped):
            return None
        if self._stream is None:
            self._wanted = has_room(left_by_steps(self._device), num_bytes)
            if not self._wanted:
                return None
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CardTensors(self._stream)

    def take(self, values: Mapping[str, torch.Tensor], rooms: Rooms) -> CardTensors | None:
        """A copy of a whole policy; see `begin`. rooms: for what goes to the host."""
        found = self.begin(sum({one.data_ptr(): one.nbytes for one in values.values()}.values()))
        if found is not None:
            found.add(values, rooms)
        return found


def has_room(left: int, num_bytes: int) -> bool:
    """Whether copies of `num_bytes` fit into what steps leave of the card's memory; the log says where they do not."""
    if left < ROOM * num_bytes:
        logger.info(
            "weights_on_card: got %.2f GB that steps leave, expected %.2f for %d copies: versions are compared on the host",
            left / 1e9, ROOM * num_bytes / 1e9, ROOM,
        )  # fmt: skip
        return False
    return True


def left_by_steps(device: torch.device) -> int:
    """Bytes of the card that no tensor took at the peak of the steps so far."""
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total - torch.cuda.max_memory_allocated(device)
