"""Several deltas as one from their anchor, made from the deltas alone: the anchor itself is not read back."""

from collections.abc import Mapping, Sequence

from infra.policies.delta import Encoded, compose
from infra.policies.fetch import read_manifest, read_shards, slice_of
from infra.policies.manifest import PolicyManifest
from infra.policies.threads import in_threads
from infra.store.store import Store
from schemas.errors import PolicyRefused

Payload = tuple[str, bytes | memoryview]  # encoder and bytes


def consolidated(
    store: Store, parent: PolicyManifest, newest: Mapping[str, Encoded], anchor: PolicyManifest, names: Sequence[str]
) -> dict[str, Encoded] | None:
    """What differs between an anchor and a child of `parent`, by name; None where that needs the anchor's own values.

    newest: what differs between the parent and the child. names: of the tensors that differ from the anchor. Raises
    PolicyRefused and NotInStore where what was published is damaged, StoreError.
    """
    payloads: dict[str, list[Payload]] = {}
    last: dict[str, Payload] = {name: (one.encoder, one.payload) for name, one in newest.items()}
    for step in (*reversed(_walk(store, parent, anchor.version)), last):
        for name, payload in step.items():
            payloads.setdefault(name, []).append(payload)
    entries = {entry.name: entry for entry in anchor.tensors}

    def composed(name: str) -> Encoded | None:
        return compose(payloads[name], entries[name].dtype, entries[name].shape)

    try:
        found = dict(zip(names, in_threads(composed, names), strict=True))
    except (KeyError, ValueError) as error:
        raise PolicyRefused(f"the deltas from version {anchor.version} do not compose: {error}") from error
    known = {name: one for name, one in found.items() if one is not None}
    return known if len(known) == len(found) else None


def check_there(store: Store, anchor: PolicyManifest) -> None:
    """Raise PolicyRefused or NotInStore where an object of an anchor is missing or has another size: it is not read."""
    source = anchor.source("anchor")
    for shard in () if source is None else source.shards:
        if (size := store.size(shard.key)) != shard.num_bytes:
            raise PolicyRefused(f"{shard.key}: got {size} bytes, expected {shard.num_bytes}")


def _walk(store: Store, parent: PolicyManifest, anchor: int) -> list[dict[str, Payload]]:
    """The deltas from `parent` back to the anchor, newest first, by the longest steps."""
    steps: list[dict[str, Payload]] = []
    current = parent
    while current.version > anchor:
        sources = [source for source in current.sources if source.kind == "delta" and source.base >= anchor]
        if not sources:
            raise PolicyRefused(f"version {current.version} has no delta from version {anchor} or later")
        source = min(sources, key=lambda one: one.base)
        shards = read_shards(store, current, source)
        steps.append({part.tensor: (part.encoder, slice_of(shards, part)) for part in source.parts})
        if source.base >= current.version:
            raise PolicyRefused(f"version {current.version} has base {source.base}")
        current, _ = read_manifest(store, source.base_manifest, source.base_sha256)
    return steps
