"""What a snapshot holds of a plan: of each part the attributes that its class names, with their types, and no others.

    KEPT    attribute -> type: what cannot be had without the log that was read
    PARTS   attributes that hold such parts themselves

What is in neither is made anew: caches, settings, and what a start begins anew.
"""

from collections import OrderedDict
from typing import Any

import msgspec

_Raw = dict[str, msgspec.Raw]


def packed(part: Any) -> bytes:
    """All that is kept of a part and of its parts."""
    return msgspec.msgpack.encode(_plain(part))


def put_back(part: Any, data: bytes | msgspec.Raw) -> None:
    """Give a new part what was `packed` of an earlier one. Raises ValueError for anything else; the part is of no use then."""
    found = msgspec.msgpack.decode(data, type=_Raw)
    try:
        for name, kind in part.KEPT.items():
            value = msgspec.msgpack.decode(found[name], type=kind)
            is_ordered = isinstance(getattr(part, name), OrderedDict)
            setattr(part, name, OrderedDict(value) if is_ordered else value)
        for name in _parts(part):
            put_back(getattr(part, name), found[name])
    except KeyError as error:
        raise ValueError(f"{type(part).__name__}: {error} is not there") from error


def _plain(part: Any) -> dict[str, Any]:
    own = {name: getattr(part, name) for name in part.KEPT}
    return own | {name: _plain(getattr(part, name)) for name in _parts(part)}


def _parts(part: Any) -> list[str]:
    """Its parts; one that the settings leave out is None."""
    return [name for name in getattr(part, "PARTS", ()) if getattr(part, name) is not None]
