"""Images of a vision-language model: their places among the tokens, and its inputs for them.

For the families LLaVA and InternVL 3 and 3.5 (`model_type` "llava", "internvl"): every picture is brought to one size by the
model's own image processor, and takes `num_places` copies of one id among the tokens, which the vision tower's features
replace; InternVL has an id before them and one after. A picture is one tile of InternVL's, never cut into several. The
explorer's engine and the trainer read pictures through this module alone, so that both compute the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from infra.store.images import Pixels

FAMILIES = ("llava", "internvl")
Frame = tuple[tuple[int, ...], tuple[int, ...]]  # ids before a picture's places, and after
NO_FRAME: Frame = ((), ())
Prepared = npt.NDArray[np.float32]  # [3, height, width], or several, as the vision tower takes them


class NoModel(ConfigError):
    """There is no model in the folder."""


class Vision:
    """Image inputs of one model. family: one of FAMILIES. token: the id at a part of a picture. num_places: how many of it make
    a picture.

    patch: side, in pixels, of the square that becomes one feature of the vision tower.
    """

    def __init__(self, family: str, token: int, num_places: int, patch: int, processor: Any) -> None:
        self.family = family
        self.token = token
        self.num_places = num_places
        self.patch = patch
        self._processor = processor

    def prepare(self, image: "Pixels") -> Prepared:
        """A picture as the vision tower takes it, [3, height, width]."""
        prepared = self._processor(images=[image], return_tensors="np")["pixel_values"][0]
        return np.ascontiguousarray(prepared, np.float32)

    def check(self, tokens: Sequence[int], num_images: int) -> None:
        """Raise ValueError for a prompt whose image tokens do not match `num_images` pictures."""
        if (found := list(tokens).count(self.token)) != num_images * self.num_places:
            raise ValueError(
                f"prompt: got {found} image tokens for {num_images} images, expected {num_images * self.num_places}"
            )

    def expand(self, ids: Sequence[int], num_images: int, frame: Frame = NO_FRAME) -> list[int]:
        """Ids with every picture's one id as its places in their frame. Raises ValueError unless there are `num_images`."""
        if (found := list(ids).count(self.token)) != num_images:
            raise ValueError(
                f"messages: the chat template writes {found} image tokens for {num_images} images; expected one for "
                "each, and none in a text"
            )
        before, after = frame
        picture = (*before, *(self.token,) * self.num_places, *after)
        return [token for given in ids for token in (picture if given == self.token else (given,))]

    def frame(self, tokenizer: Any) -> Frame:
        """The ids before and after a picture's places, by the tokenizer of the model's folder. Raises ConfigError."""
        if self.family != "internvl":
            return NO_FRAME
        names = ("start_image_token", "end_image_token")
        words = [getattr(tokenizer, name, None) for name in names]
        if missing := [name for name, word in zip(names, words, strict=True) if word is None]:
            raise ConfigError(
                f"tokenizer: {tokenizer.name_or_path}: got no {missing[0]}, expected one in extra_special_tokens of "
                f"tokenizer_config.json, as models of type {self.family!r} are published"
            )
        before, after = (int(tokenizer.convert_tokens_to_ids(word)) for word in words)
        return (before,), (after,)

    def places(self, tokens: Sequence[int] | npt.NDArray[Any], num_images: int) -> npt.NDArray[np.int64]:
        """The places of its pictures in a sequence, [num_images * num_places].

        These are the first such ids: one that the policy sampled itself is a token like any other. Raises ValueError
        where they are too few, or a picture is torn.
        """
        found = np.flatnonzero(np.asarray(tokens) == self.token)[: num_images * self.num_places]
        runs = found.reshape(-1, self.num_places) if len(found) == num_images * self.num_places else None
        if runs is None or (np.diff(runs, axis=1) != 1).any():
            raise ValueError(
                f"tokens: got {len(found)} of image token {self.token}, expected {num_images} runs of {self.num_places}"
            )
        return found.astype(np.int64)

    def probe(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int64], Prepared]:
        """Places and pictures of a sequence that is scored without its images: made-up pictures, so that a probe of a
        policy covers the vision tower too."""
        found = np.flatnonzero(np.asarray(tokens) == self.token)
        whole: list[int] = []
        start = 0
        while start + self.num_places <= len(found):
            run = found[start : start + self.num_places]
            torn = bool((np.diff(run) != 1).any())
            whole += [] if torn else run.tolist()
            start += 1 if torn else self.num_places
        num_images = len(whole) // self.num_places
        places = np.array(whole, np.int64)
        pictures = [self.prepare(probe_picture(index)) for index in range(num_images)]
        return places, np.stack(pictures) if pictures else np.zeros((0, 3, 0, 0), np.float32)


def probe_picture(index: int, side: int = 32) -> "Pixels":
    """A picture without meaning, the same everywhere: slopes of colour that differ by index."""
    across = np.arange(side * side * 3, dtype=np.uint64).reshape(side, side, 3)
    return (across * np.uint64(7 + 2 * index) % np.uint64(251)).astype(np.uint8)


def takes_pictures(folder: str | Path) -> bool:
    """True if the model of a folder takes images. Raises NoModel, and ConfigError for a family there is not code for."""
    return _seeing_config(folder) is not None


def load_vision(folder: str | Path) -> Vision | None:
    """Image inputs of the model of a folder; None for a model of text alone. Raises as `takes_pictures`, and ConfigError
    where the image processor is missing.
    """
    config = _seeing_config(folder)
    if config is None:
        return None
    from transformers import AutoImageProcessor

    whole = {"crop_to_patches": False} if config.model_type == "internvl" else {}
    try:
        processor = AutoImageProcessor.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, backend="pil", **whole
        )
    except (OSError, ValueError) as error:
        raise ConfigError(not_loadable("model", folder, "preprocessor_config.json", error)) from error
    patch = config.vision_config.patch_size
    patch = int(patch if isinstance(patch, int) else patch[0])
    return Vision(config.model_type, int(config.image_token_id), int(config.image_seq_length), patch, processor)


def _seeing_config(folder: str | Path) -> Any:
    """The configuration of a model that takes pictures, None for one of text alone."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise NoModel(not_loadable("model", folder, "config.json", error)) from error
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model: {folder} is of type {config.model_type!r} and takes pictures; expected one of {', '.join(FAMILIES)}"
        )
    return config


def vision_if_any(folder: str | Path) -> Vision | None:
    """Like `load_vision`, and None without a model: code that needs a model raises its own error."""
    try:
        return load_vision(folder)
    except NoModel:
        return None


def model_inputs(
    module: Any, tokens_BT: "torch.Tensor", places: npt.NDArray[np.int64] | None, pictures: Prepared | None
) -> Mapping[str, "torch.Tensor"]:
    """Inputs of the model's forward pass: the tokens, and the features of the images.

    places [I * num_places]: indexes into B*T, picture after picture. pictures [I, 3, H, W]. Gradients reach the tower. Without
    places the pictures have no effect, and the tower's gradients are 0.
    """
    if places is None or pictures is None or not len(pictures):
        return {"input_ids": tokens_BT}
    import torch

    embedded_BTD = module.get_input_embeddings()(tokens_BT)
    device, dtype = embedded_BTD.device, embedded_BTD.dtype
    shown = torch.from_numpy(pictures).to(device, dtype)
    seen = torch.cat(tuple(module.get_image_features(shown).pooler_output))
    if len(places) not in (0, len(seen)):
        raise ValueError(f"pictures: the vision tower gives {len(seen)} features, expected {len(places)}")
    at = torch.from_numpy(places).to(device)
    flat = embedded_BTD.flatten(0, 1).index_put((at,), seen[: len(at)].to(dtype))
    return {"inputs_embeds": flat.view_as(embedded_BTD)}


def probe_inputs(module: Any, vision: Vision | None, tokens_1T: "torch.Tensor") -> Mapping[str, "torch.Tensor"]:
    """Inputs of the forward pass of one sequence without its images: see `Vision.probe`."""
    if vision is None:
        return {"input_ids": tokens_1T}
    return model_inputs(module, tokens_1T, *vision.probe(tokens_1T[0].tolist()))


def not_loadable(what: str, folder: str | Path, expected: str, error: Exception) -> str:
    """Why a library could not load a folder. expected: content of it."""
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, OSError) and not Path(folder).is_dir():
        why = "no such folder, and the local Hugging Face cache lacks this model or a file of it"
    return f"{what}: cannot be loaded from {folder}, expected a local folder with {expected}: {why}"
