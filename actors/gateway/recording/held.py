"""Keys created while the object store is unavailable, kept on disk next to the spool until the store is back.

    store down: of(subject) -> <folder>/<key id>, 0600 -> records sealed under it go to the spool
    store back: deposit() -> keys/… in the store, file removed -> waiting records are sent

Guarantees: no record is sent to the log before the store has its key, so readers can open it. A user who was forgotten
meanwhile stays forgotten: the store gets the key destroyed. Only the owner can read the folder. At most MAX_HELD keys are held;
beyond it records are dropped, counted as "no key". A user who was forgotten long before, and returns during the outage, counts
as forgotten meanwhile.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from infra.store.seal import KEY_BYTES, Keys, SealKey, key_place, new_key
from infra.store.store import Store
from schemas.errors import StoreError

MAX_HELD = 65_536
AWAY_S = 5.0  # pause after a failure of the store; a store that does not answer would block all writes


class HeldKeys(Keys):
    """`Keys` that also work while the store is away. folder: holds keys that the store does not have yet; of one process."""

    def __init__(self, store: Store, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(store, clock)
        self._put: Callable[[str, bytes], None] = store.put
        self._folder = folder
        self._ask_again_s = float("-inf")
        self._held: dict[str, SealKey] = {}  # by subject
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(folder.iterdir()):
            secret = path.read_bytes()
            if len(secret) == KEY_BYTES:
                self._held[path.name.rpartition("-")[0]] = SealKey(path.name, secret)
            else:  # killed in the middle of making it: nothing was sealed under it
                path.unlink()

    @property
    def num_held(self) -> int:
        """Keys that the store does not have yet."""
        return len(self._held)

    def of(self, subject: str) -> SealKey:
        """The key of a subject, held here while the store is away. Raises StoreError if it cannot be kept."""
        if self._clock() >= self._ask_again_s:
            try:
                return super().of(subject)
            except StoreError:
                self._ask_again_s = self._clock() + AWAY_S
        return self._known_key(subject) or self._held.get(subject) or self._made(subject)

    def find(self, key_id: str) -> SealKey:
        held = self._held.get(key_id.rpartition("-")[0])
        return held if held is not None and held.key_id == key_id else super().find(key_id)

    def deposit(self) -> None:
        """Put the held keys into the store. Raises StoreError if it is still unavailable."""
        for subject, key in tuple(self._held.items()):
            path = self._folder / key.key_id
            # This one may lie there already, put by a deposit that was not confirmed.
            self._put(key_place(key.key_id), b"" if self.is_forgotten(subject) else path.read_bytes())
            del self._held[subject]
            path.unlink()
        self._ask_again_s = float("-inf")

    def _known_key(self, subject: str) -> SealKey | None:
        """The key that the subject had when the store was last there."""
        with self._lock:
            key, _ = self._known.get(self._current.get(subject) or "") or (None, 0.0)
        return None if key is None or key.fault else key

    def _made(self, subject: str) -> SealKey:
        if len(self._held) >= MAX_HELD:
            raise StoreError(f"the store is away, and {MAX_HELD} keys wait for it")
        key_id, secret = new_key(subject)
        try:
            descriptor = os.open(self._folder / key_id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(secret)
                file.flush()
                os.fsync(descriptor)
        except OSError as error:
            (self._folder / key_id).unlink(missing_ok=True)
            raise StoreError(f"the store is away, and a key cannot be kept here: {error.strerror}") from error
        self._held[subject] = SealKey(key_id, secret)
        return self._held[subject]
