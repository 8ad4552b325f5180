"""What vLLM is given to read: tokens, and pictures prepared as the trainer prepares them.

Guarantees: no processor of vLLM's changes a picture or its places in the prompt; a picture's name is made of what
the vision tower takes, so that no cache confuses two pictures behind equal tokens. A salt divides vLLM's cache of prefixes:
what was computed for one is not found for another.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.engines.request_images import RequestImages
from infra.model.vision import Prepared, Vision

Input = dict[str, Any]  # as vLLM's `add_request` takes it, past its own renderer


def prompt_input(tokens: Sequence[int], pictures: RequestImages, vision: Vision | None, salt: str = "") -> Input:
    """A prompt with what it shows. Prepares the pictures, so call it from a thread where there are any. salt: of text alone."""
    if vision is None or not pictures.images:
        return _text_input(tokens, salt)
    places = vision.places(tokens, len(pictures.images))
    return _seen_input(tokens, places, pictures.prepared(vision), vision.num_places)


def probe_input(tokens: Sequence[int], vision: Vision | None, salt: str = "") -> Input:
    """A sequence that is scored without its images, see `Vision.probe`."""
    if vision is None:
        return _text_input(tokens, salt)
    places, pictures = vision.probe(tokens)
    return _seen_input(tokens, places, pictures, vision.num_places) if len(pictures) else _text_input(tokens, salt)


def _text_input(tokens: Sequence[int], salt: str) -> Input:
    return {"type": "token", "prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})}


def _seen_input(
    tokens: Sequence[int], places: npt.NDArray[np.int64], pictures: Sequence[Prepared] | Prepared, num_places: int
) -> Input:
    """places: as `Vision.places` gives them, picture after picture."""
    from vllm.multimodal.inputs import PlaceholderRange

    starts = [int(start) for start in places[::num_places]]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(tokens),
        "mm_kwargs": {"image": [_item(picture) for picture in pictures]},
        "mm_hashes": {"image": [_name(picture) for picture in pictures]},
        "mm_placeholders": {"image": [PlaceholderRange(offset=start, length=num_places) for start in starts]},
    }


def _item(picture: Prepared) -> Any:
    """A picture as vLLM's transformers models take it."""
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    def element(data: torch.Tensor, *, keep_on_cpu: bool = False) -> MultiModalFieldElem:
        return MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=keep_on_cpu))

    return MultiModalKwargsItem(
        pixel_values=element(torch.from_numpy(picture)),
        num_image_patches=element(torch.tensor(1), keep_on_cpu=True),
    )


def _name(picture: Prepared) -> str:
    return hashlib.blake2b(repr(picture.shape).encode() + picture.tobytes(), digest_size=16).hexdigest()
