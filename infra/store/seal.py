"""Seals records: encrypts a named user's texts with a key of that user, and forgets them by destroying the key.

    create    Keys.of(subject)          keys/<subject>/<random> in the object store, before the first record
    seal      encode(block, keys.find)  each compressed section body: nonce, 12 bytes · AES-256-GCM, bound to its name
    edit      header edits keep sealed sections as they are; a record derived from a sealed record is sealed under its key
    open      decode(frame, keys.find)  finds the key; sections are decrypted on first use
    forget    Keys.destroy(subject)     an empty object in place of the key, permanently

Feedback texts are strings that name their key. Their key belongs to the session, because the stages do not know the user;
`forget` destroys it with the user's. An event from another system is encrypted as a whole under the keys of all sessions whose
answers it names, so it is unreadable as soon as one of them is destroyed; an event that names no answer is not sealed. headrace
cannot delete the original in the other system's topic or file.

Guarantees: a key exists in the object store and in the memory of processes only. A process learns within FRESH_S that a key was
destroyed. A returning subject gets a new key. While the store is unreachable, processes use the keys that they know, and a
gateway keeps new keys (`actors.gateway.recording.held`). Finding a subject's keys costs the same for any number of subjects.
Object versioning must be off below keys/ and below gateway/, where the app's secret is: it keys the names in the log and signs
feedback tokens.
"""

import base64
import binascii
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from infra.newest import Newest
from infra.store.store import Store
from schemas import Block, decode, encode
from schemas.errors import BadFrame, NotInStore, Sealed, StoreError
from schemas.ids import experience_group, session_of

FOLDER = "keys/"
SECRET = "gateway/secret"
KEY_BYTES = 32
NONCE_BYTES = 12
FRESH_S = 5.0
MAX_KNOWN = 65_536
FORGOTTEN = "forgotten"
NO_KEY = "no key"
EVENT = "event"  # additional authenticated data of sealed events
MAX_SESSIONS = 16  # maximum sessions, each with a key, of an event
_KEY_ID = re.compile(r"[a-z]{1,64}-[0-9a-f]{16}")
_SEALED_TEXT = re.compile(rf"sealed:({_KEY_ID.pattern}(?:,{_KEY_ID.pattern})*):([A-Za-z0-9+/=]+)")


def app_secret(store: Store) -> bytes:
    """Return the app's secret, without which `forget` finds no user; the first caller creates it. Raises StoreError."""
    try:
        return store.get(SECRET)
    except NotInStore:
        store.put(SECRET, os.urandom(KEY_BYTES))
        return store.get(SECRET)


def key_place(key_id: str) -> str:
    """Return the place of a key in the store, in its subject's folder."""
    subject, _, number = key_id.rpartition("-")
    return f"{FOLDER}{subject}/{number}"


def sealed(block: Block, keys: "Keys", subject: str) -> Block:
    """Return the block sealed under the subject's key. Blocks; raises StoreError, Sealed."""
    key_id = keys.of(subject).key_id
    members = tuple(msgspec.structs.replace(member, key_id=key_id) for member in block.experiences)
    found = decode(encode(Block(members), keys.find))
    assert isinstance(found, Block)
    return found


def seal_text(text: str, keys: "Keys", answer: str) -> str:
    """Return a text about an answer, sealed under the key of the answer's session. answer: experience id.

    Without a session the answer has no named user, and the text stays unchanged. Blocks; raises StoreError.
    """
    session = session_of(experience_group(answer))
    if not session:
        return text
    return _shut(text.encode(), keys, (session,), f"feedback/{answer}")


def is_sealed(text: str) -> bool:
    """True if `seal_text` returned this text."""
    return _SEALED_TEXT.fullmatch(text) is not None


def open_text(text: str, keys: "Keys", answer: str) -> str:
    """Return the text of `seal_text`; an unsealed text stays unchanged. Blocks; raises StoreError, Sealed, BadFrame."""
    found = _SEALED_TEXT.fullmatch(text)
    return text if found is None else _opened(found, keys, f"feedback/{answer}").decode()


def seal_event(body: bytes, keys: "Keys", sessions: Sequence[str]) -> bytes:
    """Return an event sealed under a key of each session; without sessions it stays unchanged. Blocks; raises StoreError."""
    return msgspec.json.encode(_shut(body, keys, sessions, EVENT)) if sessions else body


def open_event(body: bytes, keys: "Keys") -> bytes:
    """Return the event of `seal_event`; an unsealed event stays unchanged. Blocks; raises StoreError, Sealed, BadFrame."""
    found = _SEALED_TEXT.fullmatch(body[1:-1].decode("latin-1"))
    return body if found is None else _opened(found, keys, EVENT)


def _shut(data: bytes, keys: "Keys", sessions: Sequence[str], about: str) -> str:
    """Encrypt once per session, nested."""
    held = [keys.of(session) for session in sessions]
    for key in held:
        data = key.close(about, data)
    return f"sealed:{','.join(key.key_id for key in held)}:{base64.b64encode(data).decode()}"


def _opened(found: re.Match[str], keys: "Keys", about: str) -> bytes:
    try:
        data = base64.b64decode(found[2])
    except binascii.Error as error:
        raise BadFrame(f"sealed text under {found[1][:200]}: the text is truncated or damaged") from error
    for key_id in reversed(found[1].split(",")):
        data = keys.find(key_id).open(about, data)
    return data


class SealKey:
    """An encryption key. secret: its bytes. fault: reason why it is unusable, with an empty secret."""

    def __init__(self, key_id: str, secret: bytes, fault: str = "") -> None:
        self.key_id = key_id
        self.fault = fault
        self._cipher = AESGCM(secret) if secret else None

    def close(self, name: str, body: bytes) -> bytes:
        """Encrypt a section body. Raises Sealed if the key is gone."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._held().encrypt(nonce, body, f"{self.key_id}/{name}".encode())

    def open(self, name: str, body: bytes | memoryview) -> bytes:
        """Decrypt a section body. Raises Sealed if the key is gone, BadFrame if it was altered or is another section's."""
        cipher = self._held()
        try:
            bound = f"{self.key_id}/{name}".encode()
            return cipher.decrypt(bytes(body[:NONCE_BYTES]), bytes(body[NONCE_BYTES:]), bound)
        except (InvalidTag, ValueError) as error:
            raise BadFrame(f"section {name}: altered, or not sealed under {self.key_id}") from error

    def _held(self) -> AESGCM:
        if self._cipher is None:
            why = "was destroyed" if self.fault == FORGOTTEN else f"is not in this store ({key_place(self.key_id)})"
            raise Sealed(f"{self.fault}: the key {self.key_id} {why}")
        return self._cipher


def new_key(subject: str) -> tuple[str, bytes]:
    key_id = f"{subject}-{os.urandom(8).hex()}"
    assert _KEY_ID.fullmatch(key_id), f"subject {subject!r}: expected a name of schemas.ids"
    return key_id, os.urandom(KEY_BYTES)


class Keys:
    """The keys of an object store, cached in this process. Thread-safe; calls may block."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known = Newest[str, tuple[SealKey, float]](MAX_KNOWN)  # key id → key, time of the look-up
        self._current = Newest[str, str](MAX_KNOWN)  # subject → key id
        self._lock = threading.Lock()
        self._secret = b""

    def app_secret(self) -> bytes:
        """Return the app's secret, cached. Raises StoreError."""
        self._secret = self._secret or app_secret(self._store)
        return self._secret

    def of(self, subject: str) -> SealKey:
        """Return the key for a subject's next record; create it if there is none. Raises StoreError."""
        with self._lock:
            current = self._current.get(subject)
        if current is not None and not (key := self.find(current)).fault:
            return key
        for key_id in self.named(subject):
            if not (key := self.find(key_id)).fault:
                break
        else:
            key_id, secret = new_key(subject)
            self._store.put(key_place(key_id), secret)
            key = self._remember(SealKey(key_id, secret))
        with self._lock:
            self._current.put(subject, key.key_id)
        return key

    def find(self, key_id: str) -> SealKey:
        """Return a key by its id, with a fault if it was destroyed or is missing. Raises StoreError."""
        with self._lock:
            known, seen_s = self._known.get(key_id) or (None, 0.0)
        # A destroyed key is never restored.
        if known is not None and (known.fault == FORGOTTEN or self._clock() - seen_s < FRESH_S):
            return known
        if not _KEY_ID.fullmatch(key_id):
            return SealKey(key_id, b"", NO_KEY)
        try:
            secret = self._store.get(key_place(key_id))
        except NotInStore:
            return self._remember(SealKey(key_id, b"", NO_KEY))
        except StoreError:
            if known is None:
                raise
            return known
        return self._remember(SealKey(key_id, secret, "" if secret else FORGOTTEN))

    def named(self, subject: str) -> Iterator[str]:
        """Return the ids of all keys, usable or destroyed, of a subject. Raises StoreError."""
        folder = f"{FOLDER}{subject}/"
        return (f"{subject}-{name.removeprefix(folder)}" for name in self._store.keys(folder))

    def is_forgotten(self, subject: str) -> bool:
        """True if a key of a subject was ever destroyed, as the store has them now. Raises StoreError."""
        return any(not self._store.get(key_place(key_id)) for key_id in self.named(subject))

    def destroy(self, subject: str) -> tuple[str, ...]:
        """Destroy all keys of a subject and return their ids. Raises StoreError; then call it again.

        A subject without a key gets a destroyed one, not returned: a gateway may hold a first key that the store does not have.
        """
        never = f"{subject}-{'0' * 16}"
        key_ids = tuple(key_id for key_id in self.named(subject) if key_id != never)
        for key_id in key_ids or (never,):
            self._store.put(key_place(key_id), b"")
            self._remember(SealKey(key_id, b"", FORGOTTEN))
        return key_ids

    def _remember(self, key: SealKey) -> SealKey:
        with self._lock:
            self._known.put(key.key_id, (key, self._clock()))
        return key
