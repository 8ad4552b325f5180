"""A model folder's weights, one part after the other: for a model that no process may hold whole.

The model begins on torch's meta device, with its shapes and without weights. A part is what becomes one or a few of its
tensors: one matrix, or all experts of a layer that transformers puts together. transformers reads and converts each as
`from_pretrained` does, so that the weights are the same to the bit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from infra.model.model import meta_model, no_progress_bars
from schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
COMPARED = 2**24  # elements of two tied tensors that are compared at once


class _Shards(msgspec.Struct):
    weight_map: dict[str, str]


def hollow_model(folder: str | Path, *, dtype: str) -> "torch.nn.Module":
    """The model of a folder without weights, in evaluation mode: parameters and saved buffers are on the meta device, what a
    folder does not hold (rotary frequencies) is computed. dtype: see `infra.model.model.DTYPES`. Raises ConfigError.
    """
    import torch

    module: Any = meta_model(folder, dtype=dtype)
    for value in module.state_dict(keep_vars=True).values():
        value._is_hf_initialized = True  # transformers leaves these as they are
    for name, value in list(module.named_non_persistent_buffers()):
        parent, _, own = name.rpartition(".")
        module.get_submodule(parent)._buffers[own] = torch.empty_like(value, device="cpu")
    module.initialize_weights()
    hollow: torch.nn.Module = module.eval()
    return hollow


def put(module: "torch.nn.Module", name: str, value: "torch.Tensor") -> None:
    """Give a model a tensor under a name of its own, as a parameter where it has one there."""
    import torch

    parent, _, own = name.rpartition(".")
    owner = module.get_submodule(parent)
    if own in owner._buffers:
        owner._buffers[own] = value
    else:
        setattr(owner, own, torch.nn.Parameter(value, requires_grad=value.is_floating_point()))


class FolderParts:
    """The parts of a folder for a hollow model. tied: its tensors that are others of its own, and not read.

    Raises ConfigError for a folder that does not hold all the others.
    """

    def __init__(self, module: Any, folder: str | Path, *, dtype: str) -> None:
        import torch
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        self._module = module
        self._folder = folder
        self._files = _files(folder)
        wanted = getattr(torch, dtype)
        mapping: Any = get_model_conversion_mapping(self._module)
        plan = self._module._get_dtype_plan(wanted)
        self._config = LoadStateDictConfig(dtype=wanted, dtype_plan=plan, weight_mapping=mapping)
        self._keys = self._grouped(mapping)
        self.tied: frozenset[str] = self._tied()

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        """Fill the model part by part, on the CPU; names of what a part filled. Whoever asks for the next may have taken the
        tensors of the last out of the model.
        """
        for first, keys in self._keys.items():
            if first in self.tied:
                continue
            names = self._filled(keys)
            if not names:
                raise ConfigError(f"model: {self._folder}: {first} has another shape than its config.json says")
            yield names

    def _filled(self, keys: list[str]) -> tuple[str, ...]:
        from safetensors import SafetensorError, safe_open
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        before = {name: id(value) for name, value in self._module.state_dict(keep_vars=True).items()}
        try:
            files = {path: safe_open(path, framework="pt") for path in {self._files[key] for key in keys}}
            slices = {key: files[self._files[key]].get_slice(key) for key in keys}  # type: ignore[no-untyped-call]
            with no_progress_bars():
                convert_and_load_state_dict_in_model(self._module, slices, self._config)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"model: {self._folder}: {keys[0]} cannot be read: {error}") from error
        after = self._module.state_dict(keep_vars=True)
        return tuple(name for name, value in after.items() if id(value) != before[name])

    def _grouped(self, mapping: Any) -> dict[str, list[str]]:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [change for change in mapping if isinstance(change, WeightRenaming)]
        converters = [change for change in mapping if isinstance(change, WeightConverter)]
        state, prefix = self._module.state_dict(), self._module.base_model_prefix
        found: dict[str, list[str]] = {}
        for key in sorted(self._files):
            name, _ = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name = key
            found.setdefault(name, []).append(key)
        return {name: keys for name, keys in found.items() if name in state}

    def _tied(self) -> frozenset[str]:
        found = set()
        for target, source in self._module.all_tied_weights_keys.items():
            if target in self._keys and source in self._keys:
                if not self._equal(*self._keys[target], *self._keys[source]):
                    raise ConfigError(
                        f"model: {self._folder}: {target} differs from {source}, expected the same: its config.json ties "
                        "them; set tie_word_embeddings to false there"
                    )
                found.add(target)
            elif target in self._keys or source in self._keys:
                found.add(source if target in self._keys else target)
        if lost := sorted(set(self._module.state_dict()) - set(self._keys) - found):
            raise ConfigError(
                f"model: {self._folder}: {lost[0]} is missing ({len(lost)} names), expected every tensor of the model that "
                "its config.json describes"
            )
        return frozenset(found)

    def _equal(self, name: str, other: str) -> bool:
        import torch
        from safetensors import safe_open

        opened: list[Any] = [safe_open(self._files[key], framework="pt") for key in (name, other)]
        first, second = (file.get_slice(key) for file, key in zip(opened, (name, other), strict=True))
        shape = first.get_shape()
        if shape != second.get_shape():
            return False
        rows = max(1, COMPARED // max(1, torch.Size(shape[1:]).numel()))
        starts = range(0, shape[0], rows)
        return all(torch.equal(first[start : start + rows], second[start : start + rows]) for start in starts)


def _files(folder: str | Path) -> dict[str, Path]:
    """The file of every tensor of a folder, or of a model in the local cache."""
    from safetensors import SafetensorError, safe_open
    from transformers.utils import cached_file

    def path_of(name: str) -> Path | None:
        found = cached_file(str(folder), name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    expected = f"model: {folder}: expected {WHOLE}, or {INDEX} and the files it names"
    try:
        if index := path_of(INDEX):
            files = {
                key: path_of(name)
                for key, name in msgspec.json.decode(index.read_bytes(), type=_Shards).weight_map.items()
            }
        elif whole := path_of(WHOLE):
            with safe_open(whole, framework="pt") as opened:
                files = dict.fromkeys(opened.keys(), whole)
        else:
            raise ConfigError(expected)
    except (OSError, ValueError, SafetensorError, msgspec.DecodeError) as error:
        raise ConfigError(f"{expected}: {error}") from error
    found = {key: path for key, path in files.items() if path is not None}
    if lost := sorted(set(files) - set(found)):
        raise ConfigError(f"{expected}: that of {lost[0]} is missing")
    return found
