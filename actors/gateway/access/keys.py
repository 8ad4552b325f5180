"""API keys: the object store keeps a hash of each key, and a marker for each revoked key.

    gateway/keys/<id>           tenant, scopes, limits and hash of the key; never changes
    gateway/keys/<id>.revoked   marks the key as revoked
    gateway/secret              keys the hashes of names in the log

Guarantees: headrace shows a secret when it makes the key, and stores it nowhere. A wrong secret takes as long as a right one.
One listing of the store finds all revocations, so a reload applies them. While the store is away, the last listing holds.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Collection
from typing import Literal, get_args

import msgspec

from infra.store.seal import app_secret
from infra.store.store import API_KEYS, Store

REVOKED = ".revoked"
PREFIX = "hr"
Scope = Literal["serve", "feedback", "admin", "look", "unseal"]
Train = Literal["yes", "no", "unset"]
TRAINS: tuple[Train, ...] = ("yes", "no", "unset")
SCOPES: tuple[Scope, ...] = get_args(Scope)
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key.

    id: 16 letters, which logs may show. tenant: the key may rate only answers to this tenant. scopes: serve, feedback
    and admin (its metrics) are for the gateway; look and unseal (texts of named users) for the console, where a key
    sees all tenants. sha256: of its secret. train: whether the trainer may use answers to it. rpm, tpm: requests and
    tokens a minute at each gateway, 0 for no limit. created_s, expires_s: seconds of the epoch; expires_s is 0 for
    never.
    """

    id: str
    tenant: str
    scopes: tuple[Scope, ...]
    sha256: str
    train: Train = "unset"
    rpm: int = 0
    tpm: int = 0
    created_s: float = 0.0
    expires_s: float = 0.0


class Refused(Exception):
    """An invalid key. reason: missing, wrong, revoked or expired; for the metric, not for the client."""

    def __init__(self, reason: Literal["missing", "wrong", "revoked", "expired"]) -> None:
        super().__init__(reason)
        self.reason = reason


class KeyBook:
    """The keys as last read from the store. secret: random until the first read. is_read: True after it."""

    def __init__(self, keys: Collection[ApiKey] = (), revoked: Collection[str] = (), secret: bytes = b"") -> None:
        self._keys = {key.id: key for key in keys}
        self._revoked = set(revoked)
        self.secret = secret or secrets.token_bytes(32)
        self.is_read = False

    def find(self, presented: str, now_s: float) -> ApiKey:
        """The key a client presents. Raises Refused."""
        if not presented:
            raise Refused("missing")
        prefix, _, rest = presented.partition("-")
        key_id, _, secret = rest.partition("-")
        key = self._keys.get(key_id) if prefix == PREFIX else None
        expected = key.sha256 if key is not None else "0" * 64
        is_right = hmac.compare_digest(hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest(), expected)
        if key is None or not is_right:
            raise Refused("wrong")
        return self.live(key.id, now_s)

    def live(self, key_id: str, now_s: float) -> ApiKey:
        """The valid key of that id. Raises Refused if it is unknown, revoked or expired."""
        key = self._keys.get(key_id)
        if key is None:
            raise Refused("wrong")
        if key_id in self._revoked:
            raise Refused("revoked")
        if key.expires_s and now_s >= key.expires_s:
            raise Refused("expired")
        return key

    def refresh(self, store: Store) -> None:
        """Read new keys and revocations from the store. Raises StoreError. Blocking."""
        self.secret = app_secret(store)  # first: a key opens nothing before names are keyed as everywhere
        names = [name.removeprefix(API_KEYS) for name in store.keys(API_KEYS)]
        self._revoked = {name.removesuffix(REVOKED) for name in names if name.endswith(REVOKED)}
        ids = {name for name in names if not name.endswith(REVOKED)}
        for new in ids - self._keys.keys():
            self._keys[new] = msgspec.json.decode(store.get(API_KEYS + new), type=ApiKey)
        for gone in self._keys.keys() - ids:
            del self._keys[gone]
        self.is_read = True


def create_key(
    store: Store, *, tenant: str, scopes: tuple[Scope, ...], train: Train, rpm: int, tpm: int, lives_s: float = 0.0
) -> tuple[ApiKey, str]:
    """A new key in the store, and the text a client presents: it cannot be shown again. Raises StoreError."""
    app_secret(store)  # there before anybody can be served
    secret = secrets.token_urlsafe(32)
    now_s = time.time()
    key = ApiKey(
        id="".join(secrets.choice(_ID_LETTERS) for _ in range(16)),
        tenant=tenant,
        scopes=scopes,
        sha256=hashlib.sha256(secret.encode()).hexdigest(),
        train=train,
        rpm=rpm,
        tpm=tpm,
        created_s=now_s,
        expires_s=now_s + lives_s if lives_s else 0.0,
    )
    store.put(API_KEYS + key.id, msgspec.json.encode(key))
    return key, f"{PREFIX}-{key.id}-{secret}"


def list_keys(store: Store) -> list[tuple[ApiKey, bool]]:
    """List all keys, oldest first, each with True if it was revoked. Raises StoreError."""
    names = [name.removeprefix(API_KEYS) for name in store.keys(API_KEYS)]
    keys = [
        msgspec.json.decode(store.get(API_KEYS + name), type=ApiKey) for name in names if not name.endswith(REVOKED)
    ]
    return [(key, key.id + REVOKED in names) for key in sorted(keys, key=lambda key: key.created_s)]


def revoke_key(store: Store, key_id: str) -> bool:
    """Revoke a key; False if no key has that id. Raises StoreError."""
    if not key_id.isalpha() or not any(name == API_KEYS + key_id for name in store.keys(API_KEYS + key_id)):
        return False
    store.put(API_KEYS + key_id + REVOKED, b"{}")
    return True
