"""A model that begins in shards: of ZeRO 3, which partitions each tensor as soon as it is there.

Guarantees: rank 0 reads the folder once, one part at a time; no rank ever holds more than its shards and one part (see
`infra.model.parts`); the weights are those that one process loads, to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from infra.model.parts import FolderParts, put
from infra.policies.tensors import Tensor, from_torch, to_torch
from schemas.errors import ConfigError
from trainer.learners.orders import Channel


class _Part(msgspec.Struct, frozen=True):
    """What rank 0 says of a part. names: of parameters, whose values follow, none in the last part. buffers: whole. tied: of
    the whole model. error: why there are no more.
    """

    names: tuple[str, ...] = ()
    buffers: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    tied: tuple[str, ...] = ()
    error: str = ""


def load_sharded(
    deepspeed: Any, channel: Channel, module: Any, folder: str, *, device: str, settings: Mapping[str, Any]
) -> None:
    """Give a hollow model the folder's weights, each rank its shards. Collective. settings: of the engine it will be in.

    Raises ConfigError, on all ranks the same.
    """
    wanted: torch.dtype = module.dtype
    dtype = str(wanted).removeprefix("torch.")
    parts = None if channel.rank else _reading(module, folder, dtype)
    partitioned: Any = None  # a parameter that is, which knows how to do it
    while True:
        sent = channel.broadcast(None if parts is None else msgspec.msgpack.encode(next(parts)))
        part = msgspec.msgpack.decode(sent, type=_Part)
        if part.error:
            raise ConfigError(part.error)
        for name, one in part.buffers.items():
            put(module, name, to_torch(Tensor(*one)))
        if not (part.names or part.buffers):
            break
        for name in part.names if channel.rank else ():
            put(module, name, torch.empty(module.get_parameter(name).shape, dtype=wanted))
        values = [module.get_parameter(name) for name in part.names]
        for value in values:
            value.data = value.data.to(wanted)
        partitioned = _partition(deepspeed, settings, partitioned, values)
    module.tie_weights(missing_keys=set(part.tied), recompute_mapping=False)
    for one in module.modules():
        for name, value in one._buffers.items():
            one._buffers[name] = None if value is None else value.to(device)


def _reading(module: Any, folder: str, dtype: str) -> Iterator[_Part]:
    """On rank 0: fill the model part by part, and say what each holds."""
    try:
        parts = FolderParts(module, folder, dtype=dtype)
        for names in parts:
            held = {name for name, _ in module.named_buffers()}.intersection(names)
            found = {name: from_torch(module.get_buffer(name)) for name in sorted(held)}
            buffers = {name: (one.dtype, one.shape, bytes(one.data)) for name, one in found.items()}
            yield _Part(names=tuple(name for name in names if name not in held), buffers=buffers)
        yield _Part(tied=tuple(sorted(parts.tied)))
    except ConfigError as error:
        yield _Part(error=str(error))


def _partition(
    deepspeed: Any, settings: Mapping[str, Any], partitioned: Any, values: Sequence[torch.nn.Parameter]
) -> Any:
    """Leave each rank its shard of these parameters, which are rank 0's; one of those that are partitioned."""
    if not values:
        return partitioned
    if partitioned is None:
        deepspeed.zero.Init(module=torch.nn.ParameterList(values), config_dict_or_path=dict(settings))
        return values[0]
    partitioned.convert_to_zero_parameters(param_list=values)
    return partitioned
