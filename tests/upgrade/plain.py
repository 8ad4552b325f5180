"""Values as plain JSON, and whether a reading says all that an older one said."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from infra.policies.tensors import Tensor
from schemas import Block, Experience

KIND = ""  # the key under which a record says what it is: no field is called so


def plain(value: object) -> Any:
    """Records as tables with all their fields, bytes and tensors in hexadecimal."""
    if isinstance(value, Block):
        return {KIND: "Block", "experiences": [plain(one) for one in value.experiences]}
    if isinstance(value, Tensor):
        return {KIND: "Tensor", "dtype": value.dtype, "shape": list(value.shape), "data": bytes(value.data).hex()}
    if isinstance(value, msgspec.Struct):
        fields = {one: plain(getattr(value, one)) for one in value.__struct_fields__ if one != "bulk"}
        return {KIND: type(value).__name__, **fields, **(bulk_of(value) if isinstance(value, Experience) else {})}
    if isinstance(value, Mapping):
        return {name_of(key): plain(one) for key, one in value.items()}
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, set | frozenset):
        return sorted(plain(one) for one in value)
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    raise TypeError(f"got {type(value).__name__}, expected a record or plain values")


def name_of(key: object) -> str:
    return bytes(key).hex() if isinstance(key, bytes) else str(key)


def bulk_of(one: Experience) -> dict[str, Any]:
    return {"tokens": one.tokens.tolist(), "logprobs": one.logprobs.tolist(), "messages": plain(one.messages)}


def differences(told: Any, read: Any, at: str = "$") -> list[str]:
    """What a reading says otherwise than the picture that is kept, a line each.

    A record may have fields that the picture does not know, of a later release; everything else is equal.
    """
    if isinstance(told, dict) and isinstance(read, dict):
        missing = [f"{at}.{name}: not read any more" for name in sorted(told.keys() - read.keys())]
        more = [] if KIND in told else [f"{at}.{name}: was not there" for name in sorted(read.keys() - told.keys())]
        both = [name for name in told if name in read]
        return missing + more + [one for name in both for one in differences(told[name], read[name], f"{at}.{name}")]
    if isinstance(told, list) and isinstance(read, list) and len(told) == len(read):
        return [
            one for at_, two in enumerate(zip(told, read, strict=True)) for one in differences(*two, f"{at}[{at_}]")
        ]
    return [] if type(told) is type(read) and told == read else [f"{at}: read {read!r}, was {told!r}"]
