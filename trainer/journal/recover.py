"""Continue from a checkpoint whose log is lost: a new journal, whose first record is that checkpoint.

Guarantees: the tokens and version numbers of the new journal are above all that the store knows, so no reader mistakes an old
record for a newer one, and no version gets a second content. After a kill at any point, the same call repeats the work.
"""

import asyncio

import msgspec

from infra.log.log import Log
from infra.roles.identity import claim
from infra.settings.config import Floor
from infra.store.store import Store
from schemas import PolicyEvent, Saved, topics
from trainer.buffer.buffer import Uses
from trainer.journal import checkpoint
from trainer.journal.checkpoint import Checkpoint, CheckpointPlace
from trainer.journal.journal import Lease, take_lease
from trainer.state import StoredState, index_hash, whole_hash

READ = (topics.BUFFER, topics.PROGRESS)


async def restart_journal(log: Log, store: Store, floor: Floor, found: Checkpoint, *, owner: str) -> Checkpoint:
    """Make the checkpoint the first record of a new journal; removes older checkpoints, whose log is lost."""
    run, policy = floor.run or floor.app, floor.policy.name
    token, version = await asyncio.to_thread(highest, store, run, policy)
    filler = PolicyEvent(event="lease", policy=policy, owner=owner, reason="tokens up to here were given out before")
    end = max((await log.bus.end_offsets(log.name(topics.POLICIES))).values())
    await log.publish_all(topics.POLICIES, [filler] * max(0, token + 1 - end))
    lease = await take_lease(log, policy=policy, run=run, owner=owner)
    state = await _written(log, store, lease, found, max(version, found.position.version) + 1)
    here = CheckpointPlace(state.position.step, lease.token)
    old = [place for place in await asyncio.to_thread(checkpoint.places, store, run) if place != here]
    await asyncio.to_thread(checkpoint.remove, store, run, old)
    await claim(log, store, floor, overwrite=True)  # last: a later call finds nothing to do
    return state


def highest(store: Store, run: str, policy: str) -> tuple[int, int]:
    """The highest token and the highest version that the store knows, -1 for none. Blocking."""
    tokens = [place.token for place in checkpoint.places(store, run)]
    versions = []
    for key in store.keys(f"policies/{policy}/"):
        token, _, rest = key.removeprefix(f"policies/{policy}/").partition("/")
        name = rest.removeprefix("manifests/").removesuffix(".json")
        tokens += [int(token)] if token.isdigit() else []
        versions += [int(name)] if name.isdigit() else []
    return max(tokens, default=-1), max(versions, default=-1)


async def _written(log: Log, store: Store, lease: Lease, found: Checkpoint, version: int) -> Checkpoint:
    learner = found.learner
    sha256 = index_hash(learner.index) if isinstance(learner, StoredState) else whole_hash(learner)
    saved = Saved(
        run=lease.run,
        token=lease.token,
        step=found.position.step,
        version=version,
        sha256=sha256,
        phase="train" if found.position.warmed_up else "warmup",
    )
    at = await log.publish(topics.BATCHES, saved)
    begins = {topic: min((await log.bus.beginning_offsets(log.name(topic))).values()) for topic in READ}
    position = msgspec.structs.replace(
        found.position,
        version=version,
        buffer_next=begins[topics.BUFFER],
        progress_next=begins[topics.PROGRESS],
        journal_next=at.offset + 1,
        journal_token=lease.token,
        settled=0,
        known=(),
        used_up={},
    )
    # Groups are numbered from 0 again: a group trained under such a name is another group.
    state = msgspec.structs.replace(found, position=position, uses=Uses(), references=())
    index = None
    if isinstance(learner, StoredState):
        folder = checkpoint.folder(lease.run, CheckpointPlace(position.step, lease.token))
        index = await asyncio.to_thread(learner.copy_to, folder)
    await asyncio.to_thread(
        checkpoint.save, store, lease.run, state, index=index, token=lease.token, time_ms=at.timestamp_ms
    )
    return state
