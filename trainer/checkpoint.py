"""Checkpoints: everything a trainer needs to go on as if it had never stopped.

Guarantees: the manifest is written last and names the hash of the state, so a torn checkpoint is never taken; the newest
that verifies is used and a broken one is reported and passed over; at least `keep` remain. Only safetensors and JSON.
"""

import hashlib
import logging
from collections.abc import Mapping

import msgspec
import numpy as np

from infra.store import Store
from infra.weights.tensors import Tensor, load_tensors, save_tensors
from schemas.errors import StoreError

logger = logging.getLogger(__name__)

USES_KEYS = "buffer/uses_keys"
USES_COUNTS = "buffer/uses_counts"
REFERENCES = "buffer/references"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer stands in the log after `step`.

    step: last executed, -1 before the first. version: last published. first_train_step: -1 during the warm-up.
    buffer_next, journal_next, progress_next: offsets to read on from. journal_token: highest fence seen.
    """

    step: int = -1
    version: int = 0
    first_train_step: int = -1
    warmed_up: bool = False
    buffer_next: int = 0
    journal_next: int = 0
    journal_token: int = -1
    progress_next: int = 0
    config_hash: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """A verified checkpoint. references: offsets of undrawn buffer blocks. uses: trained (group, revision, lane) keys."""

    position: Position
    learner: Mapping[str, Tensor]
    uses: Mapping[bytes, int]
    references: tuple[int, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What makes a checkpoint valid: the position, and size and sha256 of its state object."""

    position: Position
    state: str
    size: int
    sha256: str


def save(store: Store, run: str, checkpoint: Checkpoint) -> None:
    """Write one checkpoint, manifest last. Blocking."""
    tensors = dict(checkpoint.learner)
    tensors[USES_KEYS] = Tensor("U8", (len(checkpoint.uses), 16), b"".join(checkpoint.uses))
    counts = np.fromiter(checkpoint.uses.values(), dtype="<u4", count=len(checkpoint.uses))
    tensors[USES_COUNTS] = Tensor("U32", counts.shape, counts.tobytes())
    references = np.asarray(checkpoint.references, dtype="<i8")
    tensors[REFERENCES] = Tensor("I64", references.shape, references.tobytes())
    body = save_tensors(tensors)
    key = f"{_folder(run, checkpoint.position.step)}/state.safetensors"
    store.put(key, body)
    digest = hashlib.sha256(body).hexdigest()
    manifest = Manifest(position=checkpoint.position, state=key, size=len(body), sha256=digest)
    store.put(_manifest_key(run, checkpoint.position.step), msgspec.json.encode(manifest))


def load_newest(store: Store, run: str) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None where there is none."""
    for step in sorted(steps(store, run), reverse=True):
        try:
            return load(store, run, step)
        except (StoreError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("checkpoint passed over run=%s step=%d error=%s", run, step, error)
    return None


def load(store: Store, run: str, step: int) -> Checkpoint:
    """One checkpoint, verified. Raises StoreError or ValueError saying what differs."""
    manifest = msgspec.json.decode(store.get(_manifest_key(run, step)), type=Manifest)
    body = store.get(manifest.state)
    if len(body) != manifest.size or hashlib.sha256(body).hexdigest() != manifest.sha256:
        raise ValueError(f"{manifest.state}: its bytes are not those the manifest names")
    tensors = load_tensors(body)
    keys = bytes(tensors.pop(USES_KEYS).data)
    counts = np.frombuffer(tensors.pop(USES_COUNTS).data, dtype="<u4").tolist()
    references = np.frombuffer(tensors.pop(REFERENCES).data, dtype="<i8").tolist()
    uses = {keys[at * 16 : at * 16 + 16]: count for at, count in enumerate(counts)}
    return Checkpoint(position=manifest.position, learner=tensors, uses=uses, references=tuple(references))


def steps(store: Store, run: str) -> list[int]:
    """Steps that have a manifest, ascending; whether they verify is another question."""
    suffix = "/manifest.json"
    return [int(key.split("/")[-2]) - 1 for key in store.keys(f"checkpoints/{run}/") if key.endswith(suffix)]


def prune(store: Store, run: str, keep: int) -> list[int]:
    """Remove all but the newest `keep`, manifest first; returns the steps that remain."""
    if keep < 3:
        raise ValueError(f"keep: got {keep}, expected at least 3 checkpoints")
    have = sorted(steps(store, run))
    for step in have[:-keep]:
        store.delete(_manifest_key(run, step))
        for key in list(store.keys(f"{_folder(run, step)}/")):
            store.delete(key)
    return have[-keep:]


def _folder(run: str, step: int) -> str:
    return f"checkpoints/{run}/{step + 1:012d}"


def _manifest_key(run: str, step: int) -> str:
    return f"{_folder(run, step)}/manifest.json"
