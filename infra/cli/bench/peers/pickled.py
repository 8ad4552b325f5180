"""Pickle as a peer: of what the very benchmark packed. Nothing else of headrace reads a pickle."""

import pickle
from typing import Any

PROTOCOL = 5


def packed(value: Any) -> bytes:
    """A value as its bytes."""
    return pickle.dumps(value, protocol=PROTOCOL)


def opened(data: bytes) -> Any:
    """The value again; of bytes that this benchmark made, for they may run code."""
    return pickle.loads(data)
