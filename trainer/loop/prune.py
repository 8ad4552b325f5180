"""Removes old versions of a policy from the store, never one that a kept version is rebuilt from.

Manifests go before the objects they name, so that a version that is going is absent rather than broken.
"""

import logging
import re
from collections.abc import Collection, Iterable

from infra.policies.chain import read_manifest, walk
from infra.store.store import Store
from schemas.errors import NotInStore, PolicyRefused

log = logging.getLogger(__name__)

_MANIFEST = re.compile(r"(\d+)/manifests/(\d+)\.json")
_OBJECT = re.compile(r"(\d+)/(?:anchors|deltas)/(?:\d+-)?(\d+)/")


def remove_unfinished(store: Store, policy: str, *, before: int) -> int:
    """Remove unfinished versions of trainers with leases before this token; returns the number of removed objects.

    No manifest names these objects, and none will: events that such a trainer still sends do not count.
    """
    folder = f"policies/{policy}/"
    manifests, objects = _listed(store, folder)
    finished = set(manifests.values())
    doomed = [key for key, place in objects.items() if place not in finished and place[0] < before]
    for key in doomed:
        store.delete(folder + key)
    return len(doomed)


def prune(store: Store, policy: str, *, oldest: int, needed: Collection[int] = (), tensors_only: bool = False) -> int:
    """Remove every version older than the versions that `oldest` is rebuilt from; returns the number of removed objects.

    needed: older versions that stay, with all versions that they are rebuilt from. A follower that holds a removed version
    continues from a version that is whole in the store. tensors_only: True to leave their manifests.
    """
    folder = f"policies/{policy}/"
    manifests, objects = _listed(store, folder)
    published = sorted((version, token, key) for key, (token, version) in manifests.items() if version <= oldest)
    if not published:
        return 0
    stays: set[int] = set()
    first, newest_token = oldest, published[-1][1]
    for version, _, key in published:
        if version in needed or key == published[-1][2]:
            try:
                first = walk(store, read_manifest(store, folder + key)[0]).root.version
            except (PolicyRefused, NotInStore) as error:
                log.warning("nothing pruned, %s does not lead to whole weights: %s", folder + key, error)
                return 0
            stays |= {*range(first, version + 1)}
    doomed = [
        key
        for places in ((objects,) if tensors_only else (manifests, objects))
        for key, (token, version) in places.items()
        if token <= newest_token and version < first and version not in stays
    ]
    for key in doomed:
        store.delete(folder + key)
    return len(doomed)


def stored_bytes(store: Store, folders: Iterable[str]) -> int:
    """Bytes of all objects in these folders of the store."""
    total = 0
    for folder in folders:
        for key in store.keys(folder):
            try:
                total += store.size(key)
            except NotInStore:  # removed meanwhile
                continue
    return total


def _listed(store: Store, folder: str) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    keys = [key.removeprefix(folder) for key in store.keys(folder)]
    manifests = {key: _token_version(_MANIFEST.fullmatch(key)) for key in keys if _MANIFEST.fullmatch(key)}
    objects = {key: _token_version(_OBJECT.match(key)) for key in keys if _OBJECT.match(key)}
    return manifests, objects


def _token_version(match: re.Match[str] | None) -> tuple[int, int]:
    assert match is not None
    return int(match[1]), int(match[2])
