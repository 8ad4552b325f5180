"""Objects that are read whole, into one buffer, and hashed in the same pass: nothing is joined, and no byte is looked at twice.

A store that reads so says it by its method `get_hashed`; what any other gives is hashed afterwards.
"""

import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from infra.store.digests import digest_of, finished, hasher
from infra.store.store import Store

READ_BYTES = 256 * 1024  # hashed while they are in the processor's cache

Hashed = tuple[bytes | memoryview, str]
"""An object and its digest: see `infra.store.digests`."""


@runtime_checkable
class HashingStore(Protocol):
    """A store that hashes what it reads."""

    def get_hashed(self, key: str, algorithm: str) -> Hashed:
        """What `Store.get` gives, perhaps as a read-only view, and its digest. Raises NotInStore, StoreError."""


def get_hashed(store: Store, key: str, algorithm: str) -> Hashed:
    """An object of any store and its digest. Raises NotInStore, StoreError."""
    if isinstance(store, HashingStore):
        return store.get_hashed(key, algorithm)
    data = store.get(key)
    return data, digest_of((data,), algorithm)


def read_hashed(path: Path, algorithm: str) -> Hashed:
    """The bytes of a file and their digest. A copy, not a mapping: a file may be written to after it was found sound."""
    made = hasher(algorithm)
    with open(path, "rb", buffering=0) as file:
        data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)  # numpy asks for large pages, which bytes do not
        view, start = memoryview(data.data), 0
        while num_read := file.readinto(view[start : start + READ_BYTES]):
            made.update(view[start : start + num_read])
            start += num_read
    return view[:start].toreadonly(), finished(algorithm, made)
