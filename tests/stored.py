"""What tests look up in a store, or name there as its writers do."""

from infra.store.host_cache import DIGEST_LETTERS, sha256_of
from infra.store.snapshots import Refused, SnapshotManifest, candidates
from infra.store.store import Store


def digest_of(data: bytes) -> str:
    """How an object of these bytes is named."""
    return sha256_of(data)[:DIGEST_LETTERS]


def newest(store: Store, series: str, refused: Refused) -> SnapshotManifest | None:
    """The newest whole snapshot."""
    return next(candidates(store, series, refused), None)
