"""What tests look up in a store, or name there as its writers do."""

from infra.store.snapshots import Refused, SnapshotManifest, candidates
from infra.store.store import Store, digest_of, name_of


def content_name(data: bytes) -> str:
    """How an object of these bytes is named."""
    return name_of(digest_of((data,)))


def newest(store: Store, series: str, refused: Refused) -> SnapshotManifest | None:
    """The newest whole snapshot."""
    return next(candidates(store, series, refused), None)
