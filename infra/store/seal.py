"""Sealing: what is written of a named user lies in the log under a key of their own, and is forgotten with that key.

    made       Keys.of(subject)          keys/<subject>/<random> in the object store, before the first record is made
    sealed     encode(block, keys.find)  each compressed section body: nonce, 12 bytes · AES-256-GCM, bound to its name
    carried    header edits re-emit sealed sections as they came; what is made from one names its key, and is sealed too
    opened     decode(frame, keys.find)  the key is looked up here, the sections are opened on first use
    forgotten  Keys.destroy(subject)     an empty object in the key's place, for good

What people write about an answer is sealed too, from our first write on, as a string that says under which key; since
no stage there knows whose answer it was, under a key of the session, which is destroyed with the user's. An event from outside
is sealed as a whole, under the keys of all sessions whose answers it names, so it goes with the first of them; one that names
none is not sealed. What lies in a topic or a file of another system is that system's to delete.

Guarantees: a key lies in the object store and in the memory of processes, nowhere else; a process that looks up a key
learns within FRESH_S that it was destroyed; a subject that comes back gets a new key, and what was forgotten stays so.
While the store is away, what was known holds; a gateway keeps what it makes meanwhile (`actors.gateway.recording.held`).
Looking for the keys of one subject costs the same whatever the number of others. A store that keeps old versions of objects
must not do so below keys/, nor below gateway/, where the app's secret lies: names in the log are keyed with it, and
feedback tokens signed.
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
from schemas.ids import group_of, session_of

FOLDER = "keys/"
SECRET = "gateway/secret"
KEY_BYTES = 32
NONCE_BYTES = 12
FRESH_S = 5.0
MAX_KNOWN = 65_536
FORGOTTEN = "forgotten"
NO_KEY = "no key"
EVENT = "event"  # what sealed events are bound to
MAX_SESSIONS = 16  # that one event may be about: each has a key
_KEY_ID = re.compile(r"[a-z]{1,64}-[0-9a-f]{16}")
_SEALED_TEXT = re.compile(rf"sealed:({_KEY_ID.pattern}(?:,{_KEY_ID.pattern})*):([A-Za-z0-9+/=]+)")


def app_secret(store: Store) -> bytes:
    """The app's secret, made by the first that needs it: `headrace keys create`, before a gateway has clients. All names in the
    log are made with it (`schemas.ids`): if it is lost, `forget` finds no user. Raises StoreError.
    """
    try:
        return store.get(SECRET)
    except NotInStore:
        store.put(SECRET, os.urandom(KEY_BYTES))
        return store.get(SECRET)


def key_place(key_id: str) -> str:
    """Place of a key in the store, in a folder of its subject."""
    subject, _, number = key_id.rpartition("-")
    return f"{FOLDER}{subject}/{number}"


def sealed(block: Block, keys: "Keys", subject: str) -> Block:
    """The block as it may be written of a subject: sealed under their key. Blocks; raises StoreError, Sealed."""
    key_id = keys.of(subject).key_id
    members = tuple(msgspec.structs.replace(member, key_id=key_id) for member in block.experiences)
    found = decode(encode(Block(members), keys.find))
    assert isinstance(found, Block)
    return found


def seal_text(text: str, keys: "Keys", answer: str) -> str:
    """Text about an answer as it may be kept: sealed under its session's key. answer: experience id.

    An answer that is of no session was given to no user: what is written about it stays as it is. Blocks; raises StoreError.
    """
    session = session_of(group_of(answer))
    if not session:
        return text
    return _shut(text.encode(), keys, (session,), _about(answer))


def is_sealed(text: str) -> bool:
    """True if `seal_text` made it."""
    return _SEALED_TEXT.fullmatch(text) is not None


def open_text(text: str, keys: "Keys", answer: str) -> str:
    """The text again; one that was not sealed is as it was. Blocks; raises StoreError, Sealed where the key is gone, and
    BadFrame where it was altered or is about another answer.
    """
    found = _SEALED_TEXT.fullmatch(text)
    return text if found is None else _opened(found, keys, _about(answer)).decode()


def seal_event(body: bytes, keys: "Keys", sessions: Sequence[str]) -> bytes:
    """An event as it may be kept: sealed under a key of each session, so that it is forgotten with the first of them; one
    that names none stays as it is. Blocks; raises StoreError.
    """
    return msgspec.json.encode(_shut(body, keys, sessions, EVENT)) if sessions else body


def open_event(body: bytes, keys: "Keys") -> bytes:
    """The event again; one that was not sealed is as it was. Blocks; raises StoreError, Sealed, BadFrame."""
    found = _SEALED_TEXT.fullmatch(body[1:-1].decode("latin-1"))
    return body if found is None else _opened(found, keys, EVENT)


def _shut(data: bytes, keys: "Keys", sessions: Sequence[str], about: str) -> str:
    """Closed once for each session, one around the other."""
    held = [keys.of(session) for session in sessions]
    for key in held:
        data = key.close(about, data)
    return f"sealed:{','.join(key.key_id for key in held)}:{base64.b64encode(data).decode()}"


def _opened(found: re.Match[str], keys: "Keys", about: str) -> bytes:
    try:
        data = base64.b64decode(found[2])
    except binascii.Error as error:
        raise BadFrame(f"sealed text under {found[1][:200]}: it is cut or damaged") from error
    for key_id in reversed(found[1].split(",")):
        data = keys.find(key_id).open(about, data)
    return data


def _about(answer: str) -> str:
    return f"feedback/{answer}"


class SealKey:
    """One key, or what is left of it: fault says why it opens nothing. secret: its bytes, empty with a fault."""

    def __init__(self, key_id: str, secret: bytes, fault: str = "") -> None:
        self.key_id = key_id
        self.fault = fault
        self._cipher = AESGCM(secret) if secret else None

    def close(self, name: str, body: bytes) -> bytes:
        """A section body, sealed. Raises Sealed where the key is gone."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._held().encrypt(nonce, body, self._bound(name))

    def open(self, name: str, body: bytes | memoryview) -> bytes:
        """The body again. Raises Sealed where the key is gone, BadFrame where it was altered or is another section's."""
        cipher = self._held()
        try:
            return cipher.decrypt(bytes(body[:NONCE_BYTES]), bytes(body[NONCE_BYTES:]), self._bound(name))
        except (InvalidTag, ValueError) as error:
            raise BadFrame(f"section {name}: it was not sealed under {self.key_id} as it is now") from error

    def _held(self) -> AESGCM:
        if self._cipher is None:
            why = "was destroyed" if self.fault == FORGOTTEN else f"is not in this store ({key_place(self.key_id)})"
            raise Sealed(f"{self.fault}: the key {self.key_id} {why}")
        return self._cipher

    def _bound(self, name: str) -> bytes:
        return f"{self.key_id}/{name}".encode()


def new_key(subject: str) -> tuple[str, bytes]:
    key_id = f"{subject}-{os.urandom(8).hex()}"
    assert _KEY_ID.fullmatch(key_id), f"subject {subject!r}: expected one of schemas.ids"
    return key_id, os.urandom(KEY_BYTES)


class Keys:
    """The keys of one object store, as this process last saw them. Threads may share it; calls may block."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known = Newest[str, tuple[SealKey, float]](MAX_KNOWN)  # key id → key, time of the look-up
        self._current = Newest[str, str](MAX_KNOWN)  # subject → key id
        self._lock = threading.Lock()
        self._secret = b""

    def app_secret(self) -> bytes:
        """The secret names are keyed with, as first read. Raises StoreError."""
        self._secret = self._secret or app_secret(self._store)
        return self._secret

    def of(self, subject: str) -> SealKey:
        """The key that a subject's next record is sealed under, made where there is none. Raises StoreError."""
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
        """The key called so, with a fault where it is destroyed or not here. Raises StoreError."""
        with self._lock:
            known, seen_s = self._known.get(key_id) or (None, 0.0)
        # A key that is gone stays gone: nothing ever puts one back.
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
        """Ids of all keys a subject ever had. Raises StoreError."""
        folder = f"{FOLDER}{subject}/"
        return (f"{subject}-{name.removeprefix(folder)}" for name in self._store.keys(folder))

    def destroy(self, subject: str) -> tuple[str, ...]:
        """Destroy every key of a subject; the ids of all it ever had. Raises StoreError; then it is to be done again."""
        key_ids = tuple(self.named(subject))
        for key_id in key_ids:
            self._store.put(key_place(key_id), b"")
            self._remember(SealKey(key_id, b"", FORGOTTEN))
        return key_ids

    def _remember(self, key: SealKey) -> SealKey:
        with self._lock:
            self._known.put(key.key_id, (key, self._clock()))
        return key
