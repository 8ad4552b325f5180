"""Checkpoints: the complete state of a trainer.

    <folder>/state-*.bin, index.msgpack     the learner's state, see `trainer.state`
    <folder>/state.safetensors              the buffer's uses and references
    <folder>/manifest.json                  last

Guarantees: the manifest is written last and has the hashes of all objects, so an incomplete checkpoint is never used. The
newest checkpoint that verifies is used; a broken checkpoint is reported and skipped. Two trainers never write to the same
place. A checkpoint contains no code.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from infra.observe.failpoint import reach
from infra.policies.tensors import Tensor, load_tensors, save_tensors
from infra.store.store import Store
from schemas.errors import ConfigError, NotInStore
from trainer.buffer.buffer import KEY_BYTES, Known, Uses
from trainer.config import SLOTS
from trainer.health import GuardState
from trainer.state import Index, StoredState, encode_index, index_hash, open_state, write_whole

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
USES_KEYS = "buffer/uses_keys"
USES_COUNTS = "buffer/uses_counts"
USES_OFFSETS = "buffer/uses_offsets"
REFERENCES = "buffer/references"
_PART = re.compile(r"(?:adam/\w+/)?(reference|critic)/")


class CheckpointPlace(NamedTuple):
    """One checkpoint of a run. If two have the same step, the later trainer's is newer.

    step: after which it was taken. token: of the trainer's lease.
    """

    step: int
    token: int


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's place in the log after `step`.

    step: last executed, -1 before the first. version: last published. first_train_step: -1 during the warm-up. warmed_up: the
    warm-up has ended. buffer_next, journal_next, progress_next: offsets to read on from. journal_token: highest fence seen.
    guard: of the steps so far. settled: issue numbers below it are not waited for after a restart. known: those from it on that
    had arrived, were closed or given up. used_up: experiences without a use left that had arrived, by lane.
    """

    step: int = -1
    version: int = 0
    first_train_step: int = -1
    warmed_up: bool = False
    buffer_next: int = 0
    journal_next: int = 0
    journal_token: int = -1
    progress_next: int = 0
    guard: GuardState = GuardState()
    settled: int = 0
    known: tuple[int, ...] = ()
    used_up: dict[str, int] = {}


def check_warm_up(position: Position) -> None:
    """Refuse settings with a warm-up for a run that began without one. Raises ConfigError."""
    if position.warmed_up and position.first_train_step == 0:
        raise ConfigError(
            "trainer.warmup: got one, but this run began without a warm-up, and no later step can be one; expected no "
            "[trainer.warmup] and no master.first_version, or a new run: another `app`, or another folder"
        )


class Checkpoint(msgspec.Struct, frozen=True):
    """A verified checkpoint.

    position: position to continue from. learner: tensors of the learner, in memory or read from the store on use (StoredState).
    uses: use counts. references: offsets of undrawn buffer blocks.
    """

    position: Position
    learner: Mapping[str, Tensor]
    uses: Uses
    references: tuple[int, ...]

    @property
    def oldest_offset(self) -> int:
        """Oldest offset of `buffer` that going on from here can ask for; uses are counted by key and need none."""
        return min(self.references, default=self.position.buffer_next)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The record that makes a checkpoint valid.

    position: as in Checkpoint. state, size, sha256: key, bytes and hash of the object with uses and references. token: of the
    trainer's lease. learner_sha256, made_with: as in the journal's Saved. time_ms: log-append time of that record, 0 without
    one. oldest_offset: of `buffer`, see Checkpoint. index, index_sha256: key and hash of the index.
    """

    position: Position
    state: str
    size: int
    sha256: str
    index: str
    index_sha256: str
    token: int = 0
    learner_sha256: str = ""
    made_with: dict[str, str] = {}
    time_ms: int = 0
    oldest_offset: int = 0

    @property
    def place(self) -> CheckpointPlace:
        return CheckpointPlace(self.position.step, self.token)


def state_part(name: str) -> str:
    """The part of a learner's state that a tensor belongs to: reference or critic; "" for the policy itself.

    >>> state_part("adam/exp_avg/critic/head.bias"), state_part("model/lm_head.weight")
    ('critic', '')
    """
    found = _PART.match(name)
    return found[1] if found else ""


def state_parts(names: Iterable[str]) -> set[str]:
    return {state_part(name) for name in names} - {""}


def save(
    store: Store,
    run: str,
    checkpoint: Checkpoint,
    *,
    index: Index | None = None,
    token: int = 0,
    made_with: Mapping[str, str] = {},
    time_ms: int = 0,
) -> Manifest:
    """Write a checkpoint, manifest last. Blocking. index: index of a learner's state whose objects are in `folder` already."""
    place = CheckpointPlace(checkpoint.position.step, token)
    if index is None:
        reach("checkpoint.before_state")
        index = write_whole(store, folder(run, place), checkpoint.learner)
    references = np.asarray(checkpoint.references, dtype="<i8")
    remembered = _uses_tensors(checkpoint.uses)
    body = save_tensors(remembered | {REFERENCES: Tensor("I64", references.shape, references.tobytes())})
    encoded = encode_index(index)
    manifest = Manifest(
        position=checkpoint.position,
        state=f"{folder(run, place)}/state.safetensors",
        size=len(body),
        sha256=hashlib.sha256(body).hexdigest(),
        token=token,
        learner_sha256=index_hash(index),
        made_with=dict(made_with),
        time_ms=time_ms,
        oldest_offset=checkpoint.oldest_offset,
        index=f"{folder(run, place)}/index.msgpack",
        index_sha256=hashlib.sha256(encoded).hexdigest(),
    )
    store.put(manifest.state, body)
    store.put(manifest.index, encoded)
    reach("checkpoint.before_manifest")
    store.put(_manifest_key(run, place), msgspec.json.encode(manifest))
    reach("checkpoint.after_manifest")
    return manifest


Take = Callable[[StoredState], Mapping[str, Tensor]]


def load_newest(
    store: Store, run: str, *, before: CheckpointPlace | None = None, take: Take = dict
) -> Checkpoint | None:
    """Return the newest checkpoint (older than `before`) that verifies, None for none. take: as in `load`. Raises StoreError if
    the store fails; it skips only checkpoints that are broken for certain.
    """
    for place in sorted(places(store, run), reverse=True):
        if before is None or place < before:
            try:
                return load(store, run, place, take)
            except (NotInStore, ValueError, msgspec.MsgspecError) as error:
                logger.warning("checkpoint passed over run=%s step=%d error=%s", run, place.step, error)
    return None


def load(store: Store, run: str, place: CheckpointPlace, take: Take = dict) -> Checkpoint:
    """Return a verified checkpoint. Raises StoreError, or ValueError with the difference.

    take: function that verifies the learner's state and returns its tensors; `dict` reads and verifies all of it.
    """
    manifest = load_manifest(store, run, place)
    body = store.get(manifest.state)
    if len(body) != manifest.size or hashlib.sha256(body).hexdigest() != manifest.sha256:
        raise ValueError(f"{manifest.state}: its bytes are not those the manifest names")
    tensors = load_tensors(body)
    references = np.frombuffer(tensors[REFERENCES].data, dtype="<i8").tolist()
    learner = take(open_state(store, folder(run, place), manifest.index, manifest.index_sha256))
    return Checkpoint(manifest.position, learner, _load_uses(tensors), tuple(references))


def _uses_tensors(uses: Uses) -> dict[str, Tensor]:
    keys = b"".join(key for key, _ in uses)
    counts = np.fromiter((known.count for _, known in uses), dtype="<u4", count=len(uses))
    offsets = np.fromiter((known.offset for _, known in uses), dtype="<i8", count=len(uses))
    return {
        USES_KEYS: Tensor("U8", (len(uses), KEY_BYTES), keys),
        USES_COUNTS: Tensor("U32", counts.shape, counts.tobytes()),
        USES_OFFSETS: Tensor("I64", offsets.shape, offsets.tobytes()),
    }


def _load_uses(tensors: Mapping[str, Tensor]) -> Uses:
    keys = bytes(tensors[USES_KEYS].data)
    counts = np.frombuffer(tensors[USES_COUNTS].data, dtype="<u4").tolist()
    offsets = np.frombuffer(tensors[USES_OFFSETS].data, dtype="<i8").tolist()
    uses = Uses()
    for at, (count, offset) in enumerate(zip(counts, offsets, strict=True)):
        uses.put(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], Known(count, offset))
    return uses


def load_manifest(store: Store, run: str, place: CheckpointPlace) -> Manifest:
    """Read the manifest of a checkpoint. Raises StoreError or ValueError."""
    key = _manifest_key(run, place)
    try:
        return msgspec.json.decode(store.get(key), type=Manifest)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{key}: {error}") from error


def manifests(store: Store, run: str) -> list[Manifest]:
    """The manifests that can be read, oldest first."""
    found = []
    for place in places(store, run):
        try:
            found.append(load_manifest(store, run, place))
        except (NotInStore, ValueError) as error:
            logger.warning("checkpoint passed over run=%s step=%d error=%s", run, place.step, error)
    return found


def places(store: Store, run: str) -> list[CheckpointPlace]:
    """Checkpoints that have a manifest, ascending; whether they verify is another question."""
    return sorted(place for place, names in _folders(store, run).items() if MANIFEST in names)


def _folders(store: Store, run: str) -> dict[CheckpointPlace, list[str]]:
    """Folders named like a checkpoint, and the names of their objects."""
    found: dict[CheckpointPlace, list[str]] = {}
    for key in store.keys(f"checkpoints/{run}/"):
        where, _, name = key.removeprefix(f"checkpoints/{run}/").rpartition("/")
        number, _, token = where.partition("-")
        if number.isdigit() and token.isdigit():
            found.setdefault(CheckpointPlace(int(number) - 1, int(token)), []).append(name)
    return found


def objects(store: Store, run: str, place: CheckpointPlace) -> list[str]:
    return list(store.keys(f"{folder(run, place)}/"))


def remove(store: Store, run: str, doomed: Iterable[CheckpointPlace]) -> None:
    """Remove checkpoints, manifest first, so that a half-removed checkpoint is absent rather than broken."""
    for place in doomed:
        reach("checkpoint.before_prune")
        store.delete(_manifest_key(run, place))
        reach("checkpoint.amid_prune")
        for key in objects(store, run, place):
            store.delete(key)


def remove_unfinished(store: Store, run: str, newest: CheckpointPlace) -> int:
    """Remove the leftovers of trainers that died while storing a checkpoint; return the number of folders. newest: last
    checkpoint of this trainer; unfinished checkpoints before it can never count.
    """
    torn = [
        place
        for place, names in _folders(store, run).items()
        if MANIFEST not in names and (place.token < newest.token or (place.token == newest.token and place < newest))
    ]
    for place in torn:
        for key in objects(store, run, place):
            store.delete(key)
    return len(torn)


def folder(run: str, place: CheckpointPlace) -> str:
    return f"checkpoints/{run}/{place.step + 1:012d}-{place.token}"


def _manifest_key(run: str, place: CheckpointPlace) -> str:
    return f"{folder(run, place)}/{MANIFEST}"


class CheckpointTime(msgspec.Struct, frozen=True, order=True):
    """A checkpoint and when it was made.

    place: step and token. time_ms: log time of its Saved record.
    """

    place: CheckpointPlace
    time_ms: int


def kept(marks: Iterable[CheckpointTime], *, newest: int, keep_ms: int, slots: int = SLOTS) -> set[CheckpointPlace]:
    """The checkpoints that stay: at most newest + slots + 2, always the newest `newest` among them.

    Spans begin at multiples of their length since the epoch, so that the first checkpoint of a span does not change later.
    """
    if newest < 2:
        raise ValueError(f"newest: got {newest}, expected at least 2 checkpoints")
    ordered = sorted(marks)
    if not ordered:
        return set()
    begins_ms = ordered[-1].time_ms - keep_ms
    slot_ms = max(1, -(-keep_ms // slots))
    stay = {mark.place for mark in ordered[-newest:]}
    first: dict[int, CheckpointPlace] = {}
    base = ordered[0]
    for mark in ordered:
        if mark.time_ms <= begins_ms:
            base = mark
        else:
            first.setdefault(mark.time_ms // slot_ms, mark.place)
    return stay | set(first.values()) | {base.place}


def trim_below(manifests: Iterable[Manifest], stay: Collection[CheckpointPlace]) -> int:
    """Offset of `buffer` below which no checkpoint that stays needs anything; 0 without such checkpoints."""
    return min((manifest.oldest_offset for manifest in manifests if manifest.place in stay), default=0)


def journal_begin(manifests: Iterable[Manifest], stay: Collection[CheckpointPlace], keep_ms: int) -> tuple[int, int]:
    """Offset of `batches` that the journal may begin with, and the token it must have; (0, -1) while all of it is needed.

    It is the record before the first record that a kept checkpoint continues with, so that a reader from there on knows the
    lease in force. All records below were written before the horizon: so the offset is 0 until a checkpoint is older than the
    horizon, even if other runs have written there.
    """
    left = [manifest for manifest in manifests if manifest.place in stay]
    begins_ms = max((manifest.time_ms for manifest in left), default=0) - keep_ms
    if all(manifest.time_ms > begins_ms for manifest in left):
        return 0, -1
    first = min(left, key=lambda manifest: manifest.position.journal_next).position
    return max(0, first.journal_next - 1), first.journal_token


def uses_below(manifests: Iterable[Manifest], stay: Collection[CheckpointPlace], keep_ms: int) -> int:
    """Offset of `buffer` below which everything was delivered before the horizon, so that nothing brings it again.

    Collect knows an answer no longer than the horizon, and a record that a restart reads again is held or lies above. 0 while
    no checkpoint is older than the horizon: records that the first checkpoint had read may still be delivered again.
    """
    left = [manifest for manifest in manifests if manifest.place in stay]
    begins_ms = max((manifest.time_ms for manifest in left), default=0) - keep_ms
    if all(manifest.time_ms > begins_ms for manifest in left):
        return 0
    return min(manifest.position.buffer_next for manifest in left)
